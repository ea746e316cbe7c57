"""What a change does to a cohort: pieces of time made shorter, taken out, or waited for elsewhere.

Works keep their rows: one that is taken out lasts no time and holds up nothing. Calls may be added (waits on a stream).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._program.program import CallKind
from steptime._sim.core.timing import PER_CALL, Cohort, Nanoseconds

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Before anything: a work that is taken out starts as soon as what is before it on its stream has ended.
_AT_ONCE_NS = -(10**15)
SYNCHRONISING = (CallKind.EVENT_SYNC, CallKind.STREAM_SYNC, CallKind.DEVICE_SYNC)


def scaled_works(cohort: Cohort, works: Mask, factor: float | Floats) -> Cohort:
    """Works take so many times as long; one factor, or one of every work (1 where a work is not meant)."""
    factors = np.where(works, factor, 1.0)[:, None, None]
    return _with(cohort, duration_ns=_whole(cohort.timing.duration_ns * factors))


def set_works(cohort: Cohort, works: Mask, time_ns: float) -> Cohort:
    """Each of these works takes so long."""
    return _with(cohort, duration_ns=np.where(works[:, None, None], round(time_ns), cohort.timing.duration_ns))


def without_works(cohort: Cohort, works: Mask) -> Cohort:
    """Works are not there, nor are the launches that launched nothing else."""
    calls = cohort.program.calls
    kept = np.zeros(len(calls) + 1, dtype=bool)  # one more for works without a call
    launching = kept.copy()
    launching[cohort.program.works.call[works]] = True
    kept[cohort.program.works.call[~works]] = True
    return scaled_host(emptied_works(cohort, works), np.zeros(len(calls), dtype=bool), (launching & ~kept)[:-1], 0.0)


def emptied_works(cohort: Cohort, works: Mask) -> Cohort:
    """Works last no time and hold up nothing. Nobody meets at a collective that is not there."""
    timing, gone = cohort.timing, works[:, None, None]
    return _with(
        cohort,
        duration_ns=np.where(gone, 0, timing.duration_ns),
        spacing_ns=np.where(gone, 0, timing.spacing_ns),
        release_ns=np.where(gone, 0, timing.release_ns),
        latency_ns=np.where(gone, _AT_ONCE_NS, timing.latency_ns),
        waits=timing.waits & ~works,
    )


def scaled_host(cohort: Cohort, gaps: Mask | Floats, calls: Mask, factor: float) -> Cohort:
    """Host work before some calls (or so much of it) and some calls themselves take so many times as long."""
    timing = cohort.timing
    gap = (1.0 + gaps * (factor - 1.0))[:, None, None]
    call = np.where(calls, factor, 1.0)[:, None, None]
    return _with(cohort, gap_ns=_whole(timing.gap_ns * gap), call_ns=_whole(timing.call_ns * call))


def without_synchronisations(cohort: Cohort, calls: Mask) -> Cohort:
    """The host goes on where it waited: calls that only wait are gone, copies are enqueued like any other."""
    kinds = cohort.program.calls.kind
    waiting = calls & np.isin(kinds, SYNCHRONISING)
    kind = np.where(waiting, CallKind.HOST, np.where(calls & (kinds == CallKind.BLOCKING_COPY), CallKind.LAUNCH, kinds))
    program = replace(cohort.program, calls=cohort.program.calls.replace(kind=kind))
    return scaled_host(replace(cohort, program=program), np.zeros(len(kinds), dtype=bool), waiting, 0.0)


def with_calls(cohort: Cohort, before: Sequence[int], columns: Sequence[Mapping[str, int]]) -> Cohort:
    """The cohort with one more call before each of these rows, in order; it costs nothing and begins when that row does.

    `columns` are those of the new calls, where they are not the same as in the row that comes next.
    """
    if not before:
        return cohort
    program, timing = cohort.program, cohort.timing
    calls, count = program.calls, len(program.calls)
    order = np.argsort(before, kind="stable")
    rows = np.array(before, dtype=np.int64)[order]
    new_row = np.arange(count) + np.searchsorted(rows, np.arange(count), side="right")
    next_row = np.minimum(rows, count - 1)
    added = {name: getattr(calls, name)[next_row].copy() for name in calls.TYPES}
    added["end_ns"] = added["start_ns"].copy()
    added["after"][:] = -1
    for position, at in enumerate(order.tolist()):
        for name, value in columns[at].items():
            added[name][position] = value
    inserted = rows + np.arange(len(rows))
    table = {}
    for name in calls.TYPES:
        values = np.empty(count + len(rows), dtype=getattr(calls, name).dtype)
        values[new_row], values[inserted] = getattr(calls, name), added[name]
        table[name] = values
    moved = np.append(new_row, -1)
    table["after"] = moved[table["after"]]
    works = program.works.replace(call=moved[program.works.call])
    times: dict[str, Any] = {name: _spread(getattr(timing, name), new_row, count + len(rows)) for name in PER_CALL}
    changed = replace(program, calls=type(calls).from_columns(table), works=works)
    return replace(cohort, program=changed, timing=replace(timing, **times))


def _spread(values: Nanoseconds, rows: Rows, count: int) -> Nanoseconds:
    result = np.zeros((count, *values.shape[1:]), dtype=np.int64)
    result[rows] = values
    return result


def _with(cohort: Cohort, **changes: Any) -> Cohort:
    return replace(cohort, timing=replace(cohort.timing, **changes))


def _whole(values: npt.NDArray[Any]) -> Nanoseconds:
    return np.asarray(np.rint(values), dtype=np.int64)
