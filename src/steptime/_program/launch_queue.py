"""The finite launch queue, as seen in a recording: how much was outstanding, and which launches it held up.

A launch blocks while `QUEUE_DEPTH` launches before it in the same hardware queue have not started (measured:
docs/decisions/0004-launch-queue.md). A launch counts once, however much work it enqueues: a graph launch enqueues thousands.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime._program.issued import launch_times
from steptime._program.program import CallKind, Program
from steptime._program.table import IntColumn

# H200, driver 580, CUDA 13.0, 2026-11-15, benchmarks/h200/launch_queue.py: the same on four machines, with and without MPS.
QUEUE_DEPTH = 1021
# A launch counts as held up when all but this many places are taken: the count is read off two clocks.
_FREE_PLACES = 3


def unstarted(program: Program) -> IntColumn:
    """Per call, how many launches in the queue it launches into had not started as it began; 0 where it launches nothing."""
    calls, works = program.calls, program.works
    counts = np.zeros(len(calls), dtype=np.int64)
    queues, launch_ns = program.hardware_queues, launch_times(program)
    for queue in np.unique(queues):
        mine = np.flatnonzero(queues[works.stream] == queue)
        _, first = np.unique(works.call[mine], return_index=True)
        launched = mine[np.unique(np.concatenate([first, np.flatnonzero(works.call[mine] < 0)]))]
        call = works.call[launched]
        began = np.sort(launch_ns[launched])
        started = np.sort(works.start_ns[launched])
        own = call[call >= 0]
        waiting = np.searchsorted(began, calls.start_ns[own]) - np.searchsorted(started, calls.start_ns[own], side="right")
        counts[own] = np.maximum(counts[own], waiting)
    return counts


def queue_depth(program: Program) -> int:
    """The depth of the queue: as measured, unless the recording shows more unstarted launches (other makers' GPUs)."""
    most = int(unstarted(program).max(initial=0))
    return most if most > QUEUE_DEPTH + _FREE_PLACES else QUEUE_DEPTH


def held_up(program: Program, depth: int | None = None) -> npt.NDArray[np.bool_]:
    """Per call, whether it is a launch that found its queue full."""
    full = depth or queue_depth(program)
    return np.asarray((program.calls.kind == CallKind.LAUNCH) & (unstarted(program) >= full - _FREE_PLACES))
