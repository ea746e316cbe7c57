"""How long each step of a window took, as recorded or as played."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from steptime._program.program import CallKind, Program
from steptime._sim.core.timeline import Timeline
from steptime._sim.core.timing import Nanoseconds
from steptime._sim.recorded.timing import Recorded
from steptime.errors import InputError

_Times = tuple[Program, Nanoseconds, Nanoseconds, Nanoseconds]  # starts of calls, ends of calls, ends of works


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
