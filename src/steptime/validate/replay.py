"""Replay: a recorded run's own durations through the simulator, step by step against what was recorded."""

from __future__ import annotations

from dataclasses import dataclass

from steptime.errors import InputError
from steptime.graph.workload import Workload
from steptime.sim import Timeline, simulate
from steptime.sim.recorded import Recorded, recorded
from steptime.sim.steps import step_times_ns


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
    measured, predicted = step_times_ns(inputs), step_times_ns(inputs, timeline)
    steps = tuple(StepReplay(step, predicted[step], measured[step]) for step in measured)
    return Replay(workload, inputs, timeline, steps)
