"""From a recorded window to one that can follow itself: only what belongs to its steps, not how the recording began or ended.

A profiler waits for the device when it stops, and a window opens with a backlog. Neither is part of a step; repeated, they
would keep the host from running ahead.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from steptime._program.program import CallKind, Program
from steptime._sim.core.timing import Cohort, Nanoseconds, Timing
from steptime._sim.recorded.timing import Recorded

Rows = npt.NDArray[np.int64]

_PER_CALL = ("gap_ns", "call_ns", "return_ns")
_PER_WORK = ("latency_ns", "spacing_ns", "release_ns", "duration_ns", "waits", "absent_ns")


def repeatable(recorded: Recorded) -> Recorded:
    """The same timings without calls outside the steps and without backlog."""
    return replace(recorded, cohorts=tuple(_cut(c) for c in recorded.cohorts))


def _cut(cohort: Cohort) -> Cohort:
    program = cohort.program
    calls = np.flatnonzero(_inside(program))
    kept_call = _positions(calls, len(program.calls))
    works = np.flatnonzero((program.works.call >= 0) & (kept_call[program.works.call] >= 0)) if len(calls) else calls
    kept_work = _positions(works, len(program.works))
    table = program.calls.take(calls)
    cut = replace(
        program,
        calls=table.replace(awaits=_moved(table.awaits, kept_work), after=_moved(table.after, kept_call)),
        works=(taken := program.works.take(works)).replace(call=_moved(taken.call, kept_call)),
    )
    return Cohort(cut, cohort.ranks, _timing(cohort.timing, cut, calls, works), cohort.members)


def _inside(program: Program) -> npt.NDArray[np.bool_]:
    """Calls from the first step's begin to the last one's end, on every thread."""
    calls = program.calls
    begins = calls.start_ns[calls.kind == CallKind.STEP_BEGIN]
    ends = calls.start_ns[calls.kind == CallKind.STEP_END]
    if not len(begins) or not len(ends):
        return np.ones(len(calls), dtype=bool)
    return np.asarray((calls.start_ns >= begins.min()) & (calls.start_ns <= ends.max()))


def _timing(timing: Timing, program: Program, calls: Rows, works: Rows) -> Timing:
    changes = {
        f.name: getattr(timing, f.name)[calls if f.name in _PER_CALL else works]
        for f in fields(timing)
        if f.name in _PER_CALL + _PER_WORK
    }
    return replace(timing, **{**changes, "gap_ns": _first_gaps(changes["gap_ns"], program)})


def _first_gaps(gap_ns: Nanoseconds, program: Program) -> Nanoseconds:
    """The first step follows the last as the others follow each other: the recording does not say how."""
    begins = np.flatnonzero(program.calls.kind == CallKind.STEP_BEGIN)
    gap_ns = gap_ns.copy()
    if len(begins):
        gap_ns[begins[0]] = np.median(gap_ns[begins[1:]], axis=0).astype(np.int64) if len(begins) > 1 else 0
    return gap_ns


def _positions(kept: Rows, length: int) -> Rows:
    """Per old row its new one, or -1; one more entry so that -1 maps to -1."""
    positions = np.full(length + 1, -1, dtype=np.int64)
    positions[kept] = np.arange(len(kept))
    return positions


def _moved(column: npt.NDArray[np.int32], positions: Rows) -> npt.NDArray[np.int32]:
    return positions[column].astype(np.int32)
