"""Python between ops: calling modules, one after another and inside each other, and autocast around them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from steptime._calibrate.host.bench import Action, HostBench, less
from steptime._calibrate.host.probe import Probe, Times
from steptime._calibrate.host.representative import representative_probes


def module_probes() -> list[Probe]:
    """Modules and autocast."""
    casts = ("enter_exit", "no_cast", "input_cast", "input_and_weight_cast")
    return [
        Probe(("between_forward",), "sequential_relu", _between_forward, phase="forward"),
        *(probe for probe in representative_probes() if probe.kinds[0] == "module_call"),
        *(Probe(("autocast",), what, partial(_autocast, what), phase="forward") for what in casts),
    ]


def _between_forward(bench: HostBench) -> Times:
    """From one op to the next where each is a module in a sequence: less the op itself, which records a graph."""
    x = torch.randn(32, 32, device=bench.group.device, requires_grad=True)
    alone = bench.per_op(F.relu, x)

    def make(length: int) -> Action:
        return partial(nn.Sequential(*(nn.ReLU() for _ in range(length))), x)

    slopes, _ = bench.at_two_sizes(make, 20, 200)
    return (less(slopes, alone),)


def _autocast(what: str, bench: HostBench) -> Times:
    """What autocast adds to a linear layer by the casts it has to make; a leaf weight is cast once and kept."""
    device = bench.group.device
    if what == "enter_exit":
        return (bench.per_op(_enter_exit, device.type),)
    if not bench.cuda:
        raise NotImplementedError("not every CPU multiplies in bfloat16")
    given = torch.float32 if what != "no_cast" else torch.bfloat16
    x = torch.randn(32, 32, device=device, dtype=given)
    weight = torch.randn(32, 32, device=device, dtype=given, requires_grad=what != "input_and_weight_cast")
    plain = bench.per_op(F.linear, x.bfloat16(), weight.detach().bfloat16().requires_grad_(weight.requires_grad))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        return (less(bench.per_op(F.linear, x, weight), plain),)


def _enter_exit(device_type: str) -> None:
    with torch.autocast(device_type, dtype=torch.bfloat16):
        pass
