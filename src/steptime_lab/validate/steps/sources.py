"""Where the workload of a shipped step comes from: its execution trace, its config, or a capture."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import Plan
from steptime._build.dlrm.workload import dlrm_workload, table_lookups
from steptime._lookups.workload import RankLookups, StepLookups, WorkloadLookups
from steptime._program.workload import Workload
from steptime.errors import InputError
from steptime_lab.measurements.shipped import program_of, shipped_programs
from steptime_lab.validate.steps.cases import DLRM, StepCase

if TYPE_CHECKING:
    from steptime._program.workload import Workload
    from steptime_lab.validate.steps.cases import StepCase


TRACE, CONFIG, RECORDED = "trace", "config", "recorded"
SOURCES = (TRACE, CONFIG, RECORDED)
Build = Callable[[StepCase], Workload]


def from_trace(case: StepCase) -> Workload:
    """The execution traces of its ranks; what a DLRM looks up is expected of its generators, never counted."""
    shipped = shipped_programs(case.name)
    programs = tuple(program_of(shipped, owner) for owner in sorted(shipped.traces))
    everybody = (tuple(range(case.ranks)),)
    groups = {collective.group: everybody for program in programs for collective in program.collectives}
    owners = tuple(shipped.owners)
    return Workload(programs, case.ranks, name=case.name, owners=owners, groups=groups, lookups=_lookups(case))


def from_config(case: StepCase) -> Workload:
    """A DLRM that was never run: its config and its plan."""
    if case.workload != DLRM:
        raise InputError(f"{case.name}: no config builds a {case.workload}; its step is captured where torch is installed")
    return dlrm_workload(_model(case), case.ranks, json.loads(case.plan))


def builder(case: StepCase, source: str, captured: Mapping[str, Build]) -> Build | None:
    """What makes the workload of a case; None where nothing can.

    `captured`, by workload, captures a step that no config builds. A recorded step has the ops of its trace; its host costs
    are its own.
    """
    if source != CONFIG:
        return from_trace
    return from_config if case.workload == DLRM else captured.get(case.workload)


def _model(case: StepCase) -> Dlrm:
    return Dlrm.from_dict(json.loads(case.config))


def _lookups(case: StepCase) -> WorkloadLookups | None:
    if case.workload != DLRM:
        return None
    model = _model(case)
    placed = json.loads(case.plan) or {table.name: 0 for table in model.tables}
    owned = Plan.from_dict(placed, model.tables, case.ranks).split(model.tables)
    return WorkloadLookups(
        {
            rank: RankLookups(
                model.lookup, model.optimizer, StepLookups((tuple(table_lookups(table, case.batch) for table in tables),))
            )
            for rank, tables in enumerate(owned)
            if tables
        }
    )


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
