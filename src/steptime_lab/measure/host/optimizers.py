"""Optimiser steps, clearing and clipping gradients: per parameter, and once per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from steptime._calibrate.host.bench import Action, HostBench
from steptime._calibrate.host.probe import Probe, Times
from steptime._calibrate.host.representative import FEW, MANY, optimizer_probe, parameters

OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd_momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-3),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}
WAYS: Mapping[str, dict[str, Any]] = {
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
    "for_loop": {"foreach": False, "fused": False},
}
# Parameters: Adam's loop launches about 12 kernels for each, which have to fit into the launch queue.
MANY_IN_A_LOOP = 40


def optimizer_probes() -> list[Probe]:
    """Every optimiser in each of its ways, then what surrounds its step."""
    steps = [
        optimizer_probe(f"{name}_{way}", partial(make, **setting), MANY_IN_A_LOOP if way == "for_loop" else MANY)
        for name, make in OPTIMIZERS.items()
        for way, setting in WAYS.items()
    ]
    clears = [
        Probe(("zero_grad", "zero_grad_fixed"), what, partial(_zero_grad, what == "to_none"), phase="optimizer")
        for what in ("to_none", "to_zero")
    ]
    clips = Probe(("clip_grad", "clip_grad_fixed"), "norm", _clip, phase="optimizer")
    return [*steps, *clears, clips]


def _zero_grad(to_none: bool, bench: HostBench) -> Times:
    result = {size: torch.optim.SGD(parameters(size, bench.group.device), lr=1e-3) for size in (FEW, MANY)}

    def make(size: int) -> Action:
        for parameter in result[size].param_groups[0]["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return partial(result[size].zero_grad, set_to_none=to_none)

    return bench.at_two_sizes(make, FEW, MANY)


def _clip(bench: HostBench) -> Times:
    result = {size: parameters(size, bench.group.device) for size in (FEW, MANY)}
    return bench.at_two_sizes(lambda size: partial(torch.nn.utils.clip_grad_norm_, result[size], 1.0), FEW, MANY)
