"""Events of a Kineto trace that cannot be true: a day away from all others, a day long, ending before they start, or twice.

One such event makes a step of days, numbers that wrap around, or work that is counted double; it comes from damage.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from steptime._program.formats.kineto.events import KinetoEvents, Rows
from steptime._program.table import IntColumn
from steptime._units import NS_PER_S

# Profilers record seconds to minutes.
WINDOW_AT_MOST_NS = 24 * 3600 * NS_PER_S
# Sums of durations stay below this, which leaves the simulator's arithmetic room before it wraps around.
TOTAL_AT_MOST_NS = 2**59


def leave_out_implausible(events: KinetoEvents) -> None:
    """Leave out what cannot be true and say so; what ends before it starts ends as it starts."""
    tables = (events.ops, events.calls, events.works)
    marks = np.array([s[2] for s in events.steps], dtype=np.int64)
    starts = np.concatenate([*(t.arrays()["start"] for t in tables), marks])
    if not len(starts):
        return
    middle = int(np.partition(starts, len(starts) // 2)[len(starts) // 2])
    negative = sum(_plausible(events, table, middle) for table in tables) + sum(s[3] < 0 for s in events.steps)
    near = [
        (name, tid, start, max(duration, 0))
        for name, tid, start, duration in events.steps
        if abs(start - middle) <= WINDOW_AT_MOST_NS and duration <= WINDOW_AT_MOST_NS
    ]
    events.steps = list(dict.fromkeys(near))
    far = len(starts) - sum(t.length for t in tables) - len(near)
    # Only these have ids that tell a copy from the same thing done again; a step is marked once.
    twins = sum(_single(events, table) for table in (events.calls, events.works)) + len(near) - len(events.steps)
    for count, what in (
        (far, "lie a day away from the others or last a day, and were left out"),
        (negative, "end before they start; they count as taking no time"),
        (twins, "occur twice, alike in everything; they count once"),
    ):
        if count:
            events.warnings.append(f"{events.source}: {count} events {what}")


def _plausible(events: KinetoEvents, table: Rows, middle: int) -> int:
    """Keep the plausible rows of a table; how many of them had a negative duration."""
    columns = table.arrays()
    start, duration = columns["start"], columns["dur"]
    near = (start >= middle - WINDOW_AT_MOST_NS) & (start <= middle + WINDOW_AT_MOST_NS)
    kept = np.flatnonzero(near & (duration <= WINDOW_AT_MOST_NS))
    negative = int((duration[kept] < 0).sum())
    columns["dur"] = np.maximum(duration, 0)
    # The longest are left out where all of them together would not fit: no run is 18 years long.
    while float(columns["dur"][kept].sum(dtype=np.float64)) > TOTAL_AT_MOST_NS:
        kept = kept[columns["dur"][kept] < columns["dur"][kept].max()]
    _keep(events, table, columns, kept)
    return negative


def _single(events: KinetoEvents, table: Rows) -> int:
    """Keep one of several equal rows of a table; how many were too many."""
    columns = table.arrays()
    correlation = columns["correlation"]
    key = columns["start"] * 1_000_003 + correlation  # wraps around, which does no harm: equal rows have equal keys
    order = np.argsort(key, kind="stable")
    close = np.flatnonzero(np.diff(key[order]) == 0)
    item, other = order[close], order[close + 1]
    twin = other[(correlation[other] >= 0) & np.all([c[item] == c[other] for c in columns.values()], axis=0)]
    kept = np.delete(np.arange(table.length), twin)
    # The kernels of one graph launch share their id, and a coarse clock may not tell them apart.
    shared = np.sort(correlation[kept])
    alone = np.searchsorted(shared, correlation[twin], "right") - np.searchsorted(shared, correlation[twin], "left") == 1
    if not alone.any():
        return 0
    _keep(events, table, columns, np.delete(np.arange(table.length), twin[alone]))
    return int(alone.sum())


def _keep(events: KinetoEvents, table: Rows, columns: dict[str, IntColumn], kept: IntColumn) -> None:
    table.chunks, table.length = [tuple(column[kept] for column in columns.values())], len(kept)
    if table is events.ops:
        events.communication = _moved(events.communication, kept)
    elif table is events.works:
        events.work_communication = _moved(events.work_communication, kept)


def _moved(by_row: dict[int, Any], kept: IntColumn) -> dict[int, Any]:
    """The entries of the kept rows under their new numbers."""
    at = np.searchsorted(kept, list(by_row)) if len(kept) else np.zeros(len(by_row), dtype=np.int64)
    places = zip(by_row.items(), at.tolist(), strict=True)
    return {index: value for (row, value), index in places if index < len(kept) and kept[index] == row}
