"""Which host calls waited for the device instead of working."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime.graph.issued import launch_times
from steptime.graph.launch_queue import held_up
from steptime.graph.program import CallKind, Program
from steptime.graph.table import IntColumn


def blocked_calls(program: Program) -> npt.NDArray[np.bool_]:
    """Per call: whether it is a blocking copy, a launch into a full queue, or a synchronisation that had to wait."""
    calls, works = program.calls, program.works
    blocked = np.asarray(calls.kind == CallKind.BLOCKING_COPY)
    blocked |= held_up(program)
    issued = launch_times(program)
    syncing = (calls.kind == CallKind.EVENT_SYNC) & (calls.awaits >= 0)
    blocked[syncing] = works.end_ns[calls.awaits[syncing]] > calls.start_ns[syncing]
    for stream in range(len(program.streams)):
        rows = np.flatnonzero((calls.kind == CallKind.STREAM_SYNC) & (calls.stream == stream))
        mine = np.flatnonzero(works.stream == stream)
        blocked[rows] = _unfinished(calls.start_ns[rows], issued[mine], works.end_ns[mine])
    everything = np.flatnonzero(
        (calls.kind == CallKind.DEVICE_SYNC) | ((calls.kind == CallKind.STREAM_SYNC) & (calls.stream < 0))
    )
    blocked[everything] = _unfinished(calls.start_ns[everything], issued, works.end_ns)
    return blocked


def _unfinished(moment: IntColumn, issued: IntColumn, finished: IntColumn) -> npt.NDArray[np.bool_]:
    """Whether anything issued before each moment was still to finish after it."""
    order = np.argsort(issued, kind="stable")
    latest = np.maximum.accumulate(finished[order]) if len(order) else finished
    before = np.searchsorted(issued[order], moment, side="left") - 1
    if not len(order):
        return np.zeros(len(moment), dtype=bool)
    return (before >= 0) & (latest[np.maximum(before, 0)] > moment)
