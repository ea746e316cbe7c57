"""Which host calls waited for the device instead of working."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime.graph.program import CallKind, Program
from steptime.graph.table import IntColumn

# About this many launches can be outstanding in one context (seen on H200; the simulator uses the same depth).
QUEUE_DEPTH = 1024
# The most ever outstanding in a recording is its queue's depth if it reaches this share of the usual one.
DEPTH_SHARE = 0.9
# A launch counts as held up when all but this many places are taken. The edge is sharp: in a GPU-bound recording on H200,
# launches with 900 to 1,019 outstanding took 5 us like any other, those with 1,020 to 1,022 up to 100 us.
FREE_PLACES = 4


def blocked_calls(program: Program) -> npt.NDArray[np.bool_]:
    """Per call: whether it is a blocking copy, a launch into a full queue, or a synchronisation that had to wait."""
    calls, works = program.calls, program.works
    blocked = np.asarray(calls.kind == CallKind.BLOCKING_COPY)
    issued = _issued(program)
    blocked |= (calls.kind == CallKind.LAUNCH) & (_outstanding(calls.start_ns, issued, works.end_ns) >= _full(program, issued))
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


def _issued(program: Program) -> IntColumn:
    """Per work, when its launching call began; long ago for what was launched before the window."""
    calls, works = program.calls, program.works
    if not len(calls):
        return np.full(len(works), -(2**60), dtype=np.int64)
    return np.where(works.call >= 0, calls.start_ns[np.maximum(works.call, 0)], -(2**60))


def _outstanding(moment: IntColumn, issued: IntColumn, finished: IntColumn) -> IntColumn:
    begun = np.searchsorted(np.sort(issued), moment, side="left")
    return np.asarray(begun - np.searchsorted(np.sort(finished), moment, side="right"), dtype=np.int64)


def _full(program: Program, issued: IntColumn) -> int:
    """How much outstanding work means a full queue: the most ever seen, if that is about the usual depth or more."""
    seen = _outstanding(program.calls.start_ns, issued, program.works.end_ns)
    most = int(seen.max(initial=0))
    return (most if most >= DEPTH_SHARE * QUEUE_DEPTH else QUEUE_DEPTH) - FREE_PLACES


def _unfinished(moment: IntColumn, issued: IntColumn, finished: IntColumn) -> npt.NDArray[np.bool_]:
    """Whether anything issued before each moment was still to finish after it."""
    order = np.argsort(issued, kind="stable")
    latest = np.maximum.accumulate(finished[order]) if len(order) else finished
    before = np.searchsorted(issued[order], moment, side="left") - 1
    if not len(order):
        return np.zeros(len(moment), dtype=bool)
    return (before >= 0) & (latest[np.maximum(before, 0)] > moment)
