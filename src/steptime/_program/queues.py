"""Streams that share a hardware queue.

A GPU takes work from a few queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 by default; clients of MPS were seen to have 2). Streams
beyond that number share one, and then work starts in the order it was enqueued across those streams, although no event ties
them: it may not start before the work enqueued before it has started. Seen with FSDP on two ranks sharing an H200: an
all_gather that was ready waited through a whole layer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from steptime._program.issued import launch_times, ready_times
from steptime._program.program import Program
from steptime._program.table import IntColumn
from steptime._program.waits import CAUSED_WITHIN_NS

# Starts of two works of one queue may be recorded this much out of order.
ORDER_SLACK_NS = 2_000
# A start this close behind the start of the work before it in the queue was caused by it.
RELEASED_WITHIN_NS = 30_000
# So many unexplained late starts must be explained before streams count as sharing a queue.
EXPLAINED_AT_LEAST = 3
# Only so many streams, those with most work, are compared with each other: twice what the most queues of a GPU would serve.
STREAMS_AT_MOST = 64


def with_shared_queues(program: Program) -> Program:
    """The program with the hardware queues of its streams, where sharing was found."""
    queues = shared_queues(program)
    shared = {q for q in queues if queues.count(q) > 1}
    if not shared:
        return program
    streams = tuple(replace(s, queue=q if q in shared else None) for s, q in zip(program.streams, queues, strict=True))
    return replace(program, streams=streams)


def shared_queues(program: Program) -> tuple[int, ...]:
    """Per stream the number of its hardware queue; streams nothing speaks for sharing keep queues of their own."""
    queues = list(range(len(program.streams)))
    count = min(len(queues), STREAMS_AT_MOST)
    if count < 3 or not len(program.calls):
        return tuple(queues)
    broken, explained = _evidence(program, count)
    pairs = [(int(explained[a, b] + explained[b, a]), a, b) for a in range(count) for b in range(a + 1, count)]
    for weight, a, b in sorted(pairs, key=lambda p: (-p[0], p[1], p[2])):
        if weight < EXPLAINED_AT_LEAST or queues[a] == queues[b]:
            continue
        together = [s for s in range(count) if queues[s] in (queues[a], queues[b])]
        if not broken[np.ix_(together, together)].any():
            for stream in together:
                queues[stream] = min(queues[a], queues[b])
    return tuple(queues)


def _evidence(program: Program, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For (earlier stream, later stream): how often enqueue order was broken, and how many late starts it would explain."""
    works = program.works
    launch_ns = launch_times(program)
    order = np.lexsort((np.arange(len(works)), launch_ns))
    order = order[works.call[order] >= 0]
    ready, _ = ready_times(program)
    broken = np.zeros((count, count), dtype=np.int64)
    explained = np.zeros((count, count), dtype=np.int64)
    stream = works.stream[order]
    for earlier in range(count):
        before = _latest(order, stream == earlier)
        for later in range(count):
            rows = np.flatnonzero((stream == later) & (before >= 0)) if later != earlier else np.zeros(0, dtype=np.int64)
            follower, leader = order[rows], before[rows]
            behind = works.start_ns[follower] - works.start_ns[leader]
            broken[earlier, later] = int((behind < -ORDER_SLACK_NS).sum())
            late = works.start_ns[follower] > ready[follower] + CAUSED_WITHIN_NS
            waited = works.start_ns[leader] > ready[follower] + CAUSED_WITHIN_NS
            explained[earlier, later] = int((late & waited & (behind <= RELEASED_WITHIN_NS)).sum())
    return broken, explained


def _latest(order: IntColumn, chosen: npt.NDArray[np.bool_]) -> IntColumn:
    """Per place in the order, the latest chosen work up to there, or -1."""
    places = np.maximum.accumulate(np.where(chosen, np.arange(len(order)), -1)) if len(order) else order
    return np.where(places >= 0, order[np.maximum(places, 0)], -1)
