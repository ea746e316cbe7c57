"""Events of a Kineto trace that cannot be true: a day away from all others, longer than a day, or ending before they start.

One such event makes a step of days, or numbers that wrap around; it comes from damage, and is left out and said.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from steptime.graph.formats.kineto_events import KinetoEvents, Rows
from steptime.graph.table import IntColumn
from steptime.units import NS_PER_S

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
    before, negative = len(starts), 0
    for table in tables:
        kept, shortened = _plausible(table, middle)
        negative += shortened
        if table is events.ops:
            events.communication = _moved(events.communication, kept)
        elif table is events.works:
            events.work_communication = _moved(events.work_communication, kept)
    negative += sum(s[3] < 0 for s in events.steps)
    events.steps = [
        (name, tid, start, max(duration, 0))
        for name, tid, start, duration in events.steps
        if abs(start - middle) <= WINDOW_AT_MOST_NS and duration <= WINDOW_AT_MOST_NS
    ]
    lost = before - sum(t.length for t in tables) - len(events.steps)
    if lost:
        events.warnings.append(
            f"{events.source}: {lost} events lie a day away from the others or last a day, and were left out"
        )
    if negative:
        events.warnings.append(f"{events.source}: {negative} events end before they start; they count as taking no time")


def _plausible(table: Rows, middle: int) -> tuple[IntColumn, int]:
    """Keep the plausible rows of a table: which, and how many of them had a negative duration."""
    columns = table.arrays()
    start, duration = columns["start"], columns["dur"]
    near = (start >= middle - WINDOW_AT_MOST_NS) & (start <= middle + WINDOW_AT_MOST_NS)
    kept = np.flatnonzero(near & (duration <= WINDOW_AT_MOST_NS))
    negative = int((duration[kept] < 0).sum())
    columns["dur"] = np.maximum(duration, 0)
    # Longest first is left out where all of them together would not fit: no run is 18 years long.
    while float(columns["dur"][kept].sum(dtype=np.float64)) > TOTAL_AT_MOST_NS:
        kept = kept[columns["dur"][kept] < columns["dur"][kept].max()]
    table.chunks, table.length = [tuple(column[kept] for column in columns.values())], len(kept)
    return kept, negative


def _moved(by_row: dict[int, Any], kept: IntColumn) -> dict[int, Any]:
    """The entries of the kept rows under their new numbers."""
    at = np.searchsorted(kept, list(by_row)) if len(kept) else np.zeros(len(by_row), dtype=np.int64)
    places = zip(by_row.items(), at.tolist(), strict=True)
    return {place: value for (row, value), place in places if place < len(kept) and kept[place] == row}
