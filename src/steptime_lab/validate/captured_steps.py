"""Shipped steps that no config builds, captured where torch and their libraries are installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from steptime.errors import InputError

if TYPE_CHECKING:
    from steptime._program.workload import Workload
    from steptime_lab.validate.steps.cases import StepCase

# Workloads, and the library that has their models.
_LIBRARIES = {
    "bert": "transformers",
    "gpt2": "transformers",
    "xlnet": "transformers",
    "resnet50": "torchvision",
    "inception_v3": "torchvision",
}
# An optimiser makes its state in the first step; the second is as all later ones.
_WARM_UP = 2


def captured_steps() -> dict[str, Callable[[StepCase], Workload]]:
    """What captures the steps of a workload, for those whose libraries are here."""
    if find_spec("torch") is None:
        return {}
    return {workload: captured_step for workload, library in _LIBRARIES.items() if find_spec(library) is not None}


@dataclass(frozen=True)
class _Group:
    rank: int
    ranks: int


def captured_step(case: StepCase) -> Workload:
    """The workload of a shipped case: the step that was measured, made again and never run. Its ranks all do the same."""
    # Its observer says in a warning that it ends.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    from torch import distributed

    from steptime._capture.ranks import capture_ranks
    from steptime_lab.workloads.case import build
    from steptime_lab.workloads.cases import step_cases

    known = next((step_case for step_case in step_cases(case.ranks) if step_case.name == case.name), None)
    if known is None:
        raise InputError(f"{case.name}: is no step that `steptime measure steps` knows how to make; leave it out")

    def step() -> object:
        rank = distributed.get_rank() if case.ranks > 1 else 0
        return build(known, _Group(rank, case.ranks), torch.device("cuda", 0))

    return capture_ranks(step, ranks=case.ranks, alike=True, name=case.name, warm_up=_WARM_UP)
