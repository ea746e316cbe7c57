"""One plan by the whole way: its workload is built, every model asked and the step played, as `predict` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import Plan
from steptime._build.dlrm.workload import dlrm_workload
from steptime._platforms.calibration import Calibration
from steptime._platforms.platform import Platform
from steptime._sim.core.timeline import CohortTimeline, Timeline
from steptime._sim.modelled.issue import Issued
from steptime._sim.modelled.step import ModelledStep, modelled

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Simulated:
    """What one plan's step is made of; per rank where there are several values."""

    step_ns: float
    forward_ns: tuple[float, ...]
    backward_ns: tuple[float, ...]
    exchange_ns: tuple[float, ...]
    waiting_ns: tuple[float, ...]
    host_ns: float  # of the rank whose host has most to do


def simulated(model: Dlrm, platform: Platform, ranks: int, plan: Sequence[int], calibration: Calibration) -> Simulated:
    """The step under one plan: the rank of every table of the model."""
    built = dlrm_workload(model, ranks, dict(zip((table.name for table in model.tables), plan, strict=True)))
    step = modelled(built, platform)
    result, _ = step.steady(calibration)
    return of_timeline(step, result.timeline, float(result.period_ns[0]))


def played_ns(model: Dlrm, platform: Platform, plan: Plan, calibration: Calibration) -> float:
    """The step of a plan as `predict` has it, with all tables of the model, however they are divided."""
    result, _ = modelled(dlrm_workload(model, plan.ranks, plan), platform).steady(calibration)
    return float(result.period_ns[0])


def of_timeline(step: ModelledStep, timeline: Timeline, step_ns: float) -> Simulated:
    """What the ranks of a played step do."""
    rows: dict[int, tuple[float, float, float, float, float]] = {}
    for program, played in zip(step.programs, timeline.cohorts, strict=True):
        for index, rank in enumerate(played.cohort.ranks):
            rows[rank] = _of_rank(program, played, index)
    forward, backward, exchange, waiting, host = zip(*(rows[rank] for rank in sorted(rows)), strict=True)
    return Simulated(step_ns, forward, backward, exchange, waiting, max(host))


def _of_rank(one: Issued, played: CohortTimeline, place: int) -> tuple[float, float, float, float, float]:
    """Forward, backward, exchange, waiting, host."""
    groups = np.array([one.groups[number] for number in one.estimate])
    begin, moving, end = (column[:, place, 0] for column in (played.work_start_ns, played.moving_ns, played.work_end_ns))
    took = (end - moving).astype(np.float64)
    collective = np.char.startswith(groups, "collective")
    timing = played.cohort.timing
    return (
        float(took[groups == "lookup forward"].sum()),
        float(took[groups == "lookup backward"].sum()),
        float(took[groups == "collective all_to_all"].sum()),
        float((moving - begin)[collective].sum()),
        float((timing.gap_ns + timing.call_ns).sum()),
    )
