"""The finite launch queue, as seen in a recording: how much was outstanding, and which launches it held up.

A launch blocks while about `QUEUE_DEPTH` launches are outstanding in its context (docs/decisions/0004-launch-queue.md). A
launch counts once, however much work it enqueues (a graph launch enqueues thousands).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime.graph.program import CallKind, Program
from steptime.graph.table import IntColumn

QUEUE_DEPTH = 1024
# The most ever outstanding in a recording is its queue's depth if it reaches this share of the usual one.
_DEPTH_SHARE = 0.9
# A launch counts as held up when all but this many places are taken. The edge is sharp: in a GPU-bound recording on H200,
# launches with 900 to 1,019 outstanding took 5 us like any other, those with 1,020 to 1,022 up to 100 us.
_FREE_PLACES = 4


def outstanding(program: Program) -> IntColumn:
    """Per call, how many launches had not finished as it began; work from before the window counts one each."""
    calls, works = program.calls, program.works
    backlog = works.call < 0
    last_end = np.full(len(calls), -(2**62), dtype=np.int64)
    np.maximum.at(last_end, works.call[~backlog], works.end_ns[~backlog])
    launching = np.flatnonzero(last_end > -(2**62))
    launched = np.sort(calls.start_ns[launching])
    finished = np.sort(np.concatenate([last_end[launching], works.end_ns[backlog]]))
    begun = np.searchsorted(launched, calls.start_ns, side="left") + int(backlog.sum())
    return np.asarray(begun - np.searchsorted(finished, calls.start_ns, side="right"), dtype=np.int64)


def observed_depth(program: Program) -> int | None:
    """The depth of the queue, if the recording shows it nearly full at any time."""
    most = int(outstanding(program).max(initial=0))
    return most if most >= _DEPTH_SHARE * QUEUE_DEPTH else None


def held_up(program: Program, depth: int | None = None) -> npt.NDArray[np.bool_]:
    """Per call, whether it is a launch that found the queue full."""
    full = depth or observed_depth(program) or QUEUE_DEPTH
    return np.asarray((program.calls.kind == CallKind.LAUNCH) & (outstanding(program) >= full - _FREE_PLACES))
