"""Replay: a recorded run's own durations through the simulator, step by step against what was recorded.

`repeatable` makes of a recorded window one that can follow itself. A profiler waits for the device when it stops, and a window
opens with a backlog. Neither is part of a step; repeated, they would keep the host from running ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from steptime._files import read_whole
from steptime._program.program import CallKind, Program
from steptime._program.workload import Workload
from steptime._sim.core.simulate import simulate
from steptime._sim.core.steady import Steady, steady
from steptime._sim.core.timing import PER_CALL, PER_WORK, Cohort, Nanoseconds, Timeline
from steptime._sim.recorded.timing import Recorded, recorded, timed
from steptime._units import NS_PER_MS
from steptime.errors import InputError

Rows = npt.NDArray[np.int64]
_Times = tuple[Program, Nanoseconds, Nanoseconds, Nanoseconds]  # starts of calls, ends of calls, ends of works

MEASURED_FILE = "measured.json"


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


def step_times_ns(inputs: Recorded, timeline: Timeline | None = None) -> dict[int, int]:
    """Step number -> its time: from the end of the step before (the first: from its earliest start) to its own end.

    A step ends with the latest, over ranks, of the host's end of the step and the end of the device work it launched. Steps
    that not every rank has are left out. Without a timeline: as recorded.
    """
    times = list(_recorded(inputs) if timeline is None else _played(timeline))
    steps = sorted(set.intersection(*(set(program.steps) for program, *_ in times)))
    if not steps:
        raise InputError("the traces share no step to compare; give traces of the same steps of every rank")
    ends = np.array([[_end(program, calls, works, step) for step in steps] for program, _, calls, works in times])
    begin = min(_begin(program, starts, steps[0]) for program, starts, _, _ in times)
    # In a damaged recording a step may end before the one before it does; it then takes no time, never less.
    reached = np.maximum.accumulate([begin, *ends.max(axis=0).tolist()])
    return dict(zip(steps, np.diff(reached).tolist(), strict=True))


def recorded_step_ns(workload: Workload) -> float | None:
    """Mean time of a run's steps as recorded, as a replay compares with it; None for what never ran."""
    if not all(timed(program) for program in workload.programs):
        return None
    times = [time_ns for time_ns in step_times_ns(recorded(workload)).values() if time_ns]
    return sum(times) / len(times) if times else None


def _recorded(inputs: Recorded) -> Iterator[_Times]:
    for cohort, offset in zip(inputs.cohorts, inputs.offsets_ns, strict=True):
        calls, works = cohort.program.calls, cohort.program.works
        yield cohort.program, calls.start_ns + offset, calls.end_ns + offset, works.end_ns + offset


def _played(timeline: Timeline) -> Iterator[_Times]:
    for played in timeline.cohorts:
        times = played.call_start_ns, played.call_end_ns, played.work_end_ns
        starts, calls, works = (array[:, 0, 0] for array in times)
        yield played.cohort.program, starts, calls, works


def _begin(program: Program, starts: Nanoseconds, step: int) -> int:
    marks = (program.calls.kind == CallKind.STEP_BEGIN) & (program.calls.step == step)
    return int(starts[marks].min())


def _end(program: Program, calls: Nanoseconds, works: Nanoseconds, step: int) -> int:
    marks = (program.calls.kind == CallKind.STEP_END) & (program.calls.step == step)
    return int(np.concatenate([calls[marks], works[program.works.step == step]]).max())


def repeatable(recorded: Recorded) -> Recorded:
    """The same timings without calls outside the steps and without backlog; ranks without a trace come as late as recorded."""
    cut = [_cut(_delayed(c, late_ns), late_ns) for c, late_ns in zip(recorded.cohorts, recorded.late_ns, strict=True)]
    return replace(recorded, cohorts=tuple(cohort for cohort, _ in cut), late_ns=tuple(late_ns for _, late_ns in cut))


def _delayed(cohort: Cohort, late_ns: Rows) -> Cohort:
    """Collectives with what the ranks without a trace come later: nothing else says what those do."""
    timing = cohort.timing
    return replace(cohort, timing=replace(timing, duration_ns=timing.duration_ns + late_ns[:, None, None]))


def _cut(cohort: Cohort, late_ns: Rows) -> tuple[Cohort, Rows]:
    program = cohort.program
    calls = np.flatnonzero(_inside(program))
    new_call = _positions(calls, len(program.calls))
    works = np.flatnonzero((program.works.call >= 0) & (new_call[program.works.call] >= 0)) if len(calls) else calls
    new_work = _positions(works, len(program.works))
    of_calls, of_works = program.calls.take(calls), program.works.take(works)
    cut = replace(
        program,
        calls=of_calls.replace(awaits=_moved(of_calls.awaits, new_work), after=_moved(of_calls.after, new_call)),
        works=of_works.replace(call=_moved(of_works.call, new_call)),
    )
    columns = {name: getattr(cohort.timing, name)[calls] for name in PER_CALL}
    columns |= {name: getattr(cohort.timing, name)[works] for name in (*PER_WORK, "waits")}
    columns["gap_ns"] = _first_gaps(columns["gap_ns"], cut)
    return Cohort(cut, cohort.ranks, replace(cohort.timing, **columns), cohort.members), late_ns[works]


def _inside(program: Program) -> npt.NDArray[np.bool_]:
    """Calls from the first step's begin to the last one's end, on every thread."""
    calls = program.calls
    begins = calls.start_ns[calls.kind == CallKind.STEP_BEGIN]
    ends = calls.start_ns[calls.kind == CallKind.STEP_END]
    if not len(begins) or not len(ends):
        return np.ones(len(calls), dtype=bool)
    return np.asarray((calls.start_ns >= begins.min()) & (calls.start_ns <= ends.max()))


def _first_gaps(gap_ns: Nanoseconds, program: Program) -> Nanoseconds:
    """The first step follows the last as the others follow each other: the recording does not say how."""
    begins = np.flatnonzero(program.calls.kind == CallKind.STEP_BEGIN)
    gap_ns = gap_ns.copy()
    if len(begins):
        gap_ns[begins[0]] = np.median(gap_ns[begins[1:]], axis=0).astype(np.int64) if len(begins) > 1 else 0
    return gap_ns


def _positions(rows: Rows, length: int) -> Rows:
    """Per old row its index among these, or -1; one more entry so that -1 maps to -1."""
    positions = np.full(length + 1, -1, dtype=np.int64)
    positions[rows] = np.arange(len(rows))
    return positions


def _moved(column: npt.NDArray[np.int32], positions: Rows) -> npt.NDArray[np.int32]:
    return positions[column].astype(np.int32)


def played(inputs: Recorded) -> Steady:
    """Play the recorded steps over and over."""
    return steady(repeatable(inputs).cohorts, queue_depth=inputs.queue_depth)


def period_ms(inputs: Recorded) -> float:
    """The period of the recorded steps."""
    return float(played(inputs).period_ns[0]) / NS_PER_MS


def ops_begun(program: Program, gap_ns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Per call, how many ops began in the gap before it: a profiler does most of its work where an op begins.

    On its own thread, and on the one that hands over to it.
    """
    ops, calls = program.ops, program.calls
    result = np.zeros(len(calls), dtype=np.int64)
    handing = np.where(calls.after >= 0, calls.thread[calls.after], -1)
    for thread in range(len(program.threads)):
        starts = np.sort(ops.start_ns[ops.thread == thread])
        rows = np.flatnonzero((calls.thread == thread) | (handing == thread))
        until = np.searchsorted(starts, calls.start_ns[rows], side="right")
        begun = until - np.searchsorted(starts, calls.start_ns[rows] - gap_ns[rows], side="left")
        result[rows] += np.maximum(begun, 0)
    return result


# Nobody measures steps of a day.
_LONGEST_MS = 86_400_000


class _Measured(msgspec.Struct):
    measured_step_ms_unprofiled: list[float]


def read_measured(file: Path) -> tuple[float, ...]:
    """The unprofiled step times in a file, one per repeat."""
    expected = "expected measured_step_ms_unprofiled"
    try:
        times = msgspec.json.decode(read_whole(file), type=_Measured).measured_step_ms_unprofiled
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error}); {expected}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: no unprofiled step times ({error}); {expected}") from error
    if not times or not 0 < min(times) <= max(times) < _LONGEST_MS:
        raise InputError(f"{file}: measured_step_ms_unprofiled is {times}; expected one or more positive step times")
    return tuple(times)
