"""Replay: a recorded run's own durations through the simulator, step by step against what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from steptime._program.workload import Workload
from steptime._sim import Timeline
from steptime._sim.core.simulate import simulate
from steptime._sim.core.steps import step_times_ns
from steptime._sim.recorded.timing import Recorded, recorded
from steptime.errors import InputError


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
    inputs = recorded(workload)
    timeline = simulate(inputs.cohorts, queue_depth=inputs.queue_depth)
    measured, predicted = step_times_ns(inputs), step_times_ns(inputs, timeline)
    steps = tuple(StepReplay(step, predicted[step], measured[step]) for step in measured if measured[step])
    return Replay(_warned(workload, [step for step in measured if not measured[step]], len(steps)), inputs, timeline, steps)


def _warned(workload: Workload, empty: Sequence[int], compared: int) -> Workload:
    """The workload with a warning about steps that took no time, which cannot be compared with anything."""
    if not compared:
        raise InputError(f"{workload.programs[0].source}: no step takes any time as recorded; is the trace damaged?")
    if not empty:
        return workload
    listed = ", ".join(map(str, empty))
    message = f"left out of the replay, because they end no later than the step before them: steps {listed}"
    return replace(workload, warnings=(*workload.warnings, message))
