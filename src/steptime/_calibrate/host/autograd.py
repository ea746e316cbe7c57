"""The autograd engine: what a node of the backward pass costs, what accumulating a gradient costs, what starting it costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from steptime._calibrate.host.bench import Action, Bench, less
from steptime._calibrate.host.forms import FORMS, Form, chain
from steptime._calibrate.host.probe import Probe, Times

# Lengths of a chain; a node launches at most 4 kernels, so that the longer one fits into the launch queue.
SHORT, LONG = 50, 200


def autograd_probes() -> list[Probe]:
    """All that concerns the backward pass."""
    chained = [_node(form) for form in FORMS if form.keeps_shape]
    between = Probe(("between_backward",), "neg", _between, phase="backward")
    gathered = [Probe(("accumulate_grad",), how, partial(_accumulate, how), phase="backward") for how in ("take", "add")]
    return [*chained, between, *gathered]


def _node(form: Form) -> Probe:
    """`backward_node`: per node, its ops and the gradients of its weights included; `backward_call`: once per backward."""

    def measure(bench: Bench) -> Times:
        return bench.at_two_sizes(chain(form, bench.group.device), SHORT, LONG)

    return Probe(("backward_node", "backward_call"), form.name, measure, phase="backward")


def _between(bench: Bench) -> Times:
    """What the engine spends per node apart from the node's one op, taken as much as it costs in a loop without a graph."""
    device = bench.group.device
    with torch.no_grad():
        alone = bench.per_op(torch.neg, torch.randn(32, 32, device=device))
    slopes, _ = bench.at_two_sizes(chain(_form("neg"), device), SHORT, LONG)
    return (less(slopes, alone),)


def _accumulate(how: str, bench: Bench) -> Times:
    """Per leaf: its gradient is taken over as it is, or added to one that is there; less the node that made it."""
    node, _ = bench.at_two_sizes(chain(_form("neg"), bench.group.device), SHORT, LONG)
    leaf, _ = bench.at_two_sizes(_leaves(how, bench.group.device), SHORT, LONG)
    return (less(leaf, node),)


def _leaves(how: str, device: torch.device) -> Callable[[int], Action]:
    leaves = [torch.randn(32, 32, device=device, requires_grad=True) for _ in range(LONG)]
    seeds = [torch.randn(32, 32, device=device) for _ in range(LONG)]

    def make(count: int) -> Action:
        for leaf in leaves[:count]:
            leaf.grad = torch.zeros_like(leaf) if how == "add" else None
        return partial(torch.autograd.backward, [torch.neg(leaf) for leaf in leaves[:count]], seeds[:count])

    return make


def _form(name: str) -> Form:
    return next(form for form in FORMS if form.name == name)
