"""The autograd engine: what a node of the backward pass costs, what accumulating a gradient costs, what starting it costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from steptime._calibrate.host.bench import Action, HostBench, less
from steptime._calibrate.host.probe import Probe, Times
from steptime._calibrate.host.representative import LONG_CHAIN, SHORT_CHAIN, Form, chain, node_probe
from steptime_lab.measure.host.forms import FORMS


def autograd_probes() -> list[Probe]:
    """All that concerns the backward pass."""
    chained = [node_probe(form) for form in FORMS if form.keeps_shape]
    between = Probe(("between_backward",), "neg", _between, phase="backward")
    gathered = [Probe(("accumulate_grad",), how, partial(_accumulate, how), phase="backward") for how in ("take", "add")]
    return [*chained, between, *gathered]


def _between(bench: HostBench) -> Times:
    """What the engine spends per node apart from the node's one op, taken as much as it costs in a loop without a graph."""
    device = bench.group.device
    with torch.no_grad():
        alone = bench.per_op(torch.neg, torch.randn(32, 32, device=device))
    slopes, _ = bench.at_two_sizes(chain(_form("neg"), device), SHORT_CHAIN, LONG_CHAIN)
    return (less(slopes, alone),)


def _accumulate(how: str, bench: HostBench) -> Times:
    """Per leaf: its gradient is taken over as it is, or added to one that is there; less the node that made it."""
    node, _ = bench.at_two_sizes(chain(_form("neg"), bench.group.device), SHORT_CHAIN, LONG_CHAIN)
    leaf, _ = bench.at_two_sizes(_leaves(how, bench.group.device), SHORT_CHAIN, LONG_CHAIN)
    return (less(leaf, node),)


def _leaves(how: str, device: torch.device) -> Callable[[int], Action]:
    leaves = [torch.randn(32, 32, device=device, requires_grad=True) for _ in range(LONG_CHAIN)]
    seeds = [torch.randn(32, 32, device=device) for _ in range(LONG_CHAIN)]

    def make(count: int) -> Action:
        for leaf in leaves[:count]:
            leaf.grad = torch.zeros_like(leaf) if how == "add" else None
        return partial(torch.autograd.backward, [torch.neg(leaf) for leaf in leaves[:count]], seeds[:count])

    return make


def _form(name: str) -> Form:
    return next(form for form in FORMS if form.name == name)
