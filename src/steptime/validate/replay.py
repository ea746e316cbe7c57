"""Replay: a recorded run's own durations through the simulator, step by step against what was recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime.errors import InputError
from steptime.graph.program import CallKind
from steptime.graph.workload import Workload
from steptime.sim import Timeline, simulate
from steptime.sim.recorded import Recorded, recorded


@dataclass(frozen=True)
class StepReplay:
    """One step: predicted and recorded, in nanoseconds."""

    step: int
    predicted_ns: int
    measured_ns: int

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return (self.predicted_ns - self.measured_ns) / self.measured_ns


@dataclass(frozen=True)
class Replay:
    """A replayed workload."""

    workload: Workload
    recorded: Recorded
    timeline: Timeline
    steps: tuple[StepReplay, ...]


def replay(workload: Workload) -> Replay:
    """Play the run's own kernel times and host gaps through the simulator and compare step by step."""
    unrecorded = [p.source or f"rank {p.rank}" for p in workload.programs if not p.recorded]
    if unrecorded:
        raise InputError(f"{unrecorded[0]}: holds no device times to replay; a Kineto trace of the run is needed")
    inputs = recorded(workload)
    timeline = simulate(inputs.cohorts, queue_depth=inputs.queue_depth)
    return Replay(workload, inputs, timeline, _steps(inputs, timeline))


def _steps(inputs: Recorded, timeline: Timeline) -> tuple[StepReplay, ...]:
    """T(k) = E(k) - E(k-1), E(k) = the latest, over ranks, of the host's end of step k and the end of the work it launched."""
    common = set.intersection(*(set(c.program.steps) for c in inputs.cohorts))
    if not common:
        raise InputError("the traces share no step to compare; give traces of the same steps of every rank")
    steps = sorted(common)
    measured, predicted = [_begin(inputs, None, steps[0])], [_begin(inputs, timeline, steps[0])]
    found = []
    for step in steps:
        measured.append(_end(inputs, None, step))
        predicted.append(_end(inputs, timeline, step))
        found.append(StepReplay(step, predicted[-1] - predicted[-2], measured[-1] - measured[-2]))
    return tuple(found)


def _begin(inputs: Recorded, timeline: Timeline | None, step: int) -> int:
    """The earliest start of a step."""
    starts = []
    for index, (cohort, offset) in enumerate(zip(inputs.cohorts, inputs.offsets_ns, strict=True)):
        calls = cohort.program.calls
        rows = np.flatnonzero((calls.kind == CallKind.STEP_BEGIN) & (calls.step == step))
        times = calls.start_ns + offset if timeline is None else timeline.cohorts[index].call_start_ns[:, 0, 0]
        starts += times[rows].tolist()
    return int(min(starts))


def _end(inputs: Recorded, timeline: Timeline | None, step: int) -> int:
    ends = []
    for index, (cohort, offset) in enumerate(zip(inputs.cohorts, inputs.offsets_ns, strict=True)):
        calls, works = cohort.program.calls, cohort.program.works
        call_end, work_end = calls.end_ns + offset, works.end_ns + offset
        if timeline is not None:
            call_end, work_end = timeline.cohorts[index].call_end_ns[:, 0, 0], timeline.cohorts[index].work_end_ns[:, 0, 0]
        ends += call_end[(calls.kind == CallKind.STEP_END) & (calls.step == step)].tolist()
        ends += work_end[works.step == step].tolist()
    return int(max(ends))
