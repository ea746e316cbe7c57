"""What the host of a recorded program issued into which queue, when it was ready, and what the queues held up.

A launch blocks while `QUEUE_DEPTH` launches before it in the same hardware queue have not started (measured:
docs/decisions/0004-launch-queue.md). A launch counts once, however much work it enqueues: a graph launch enqueues thousands.

A GPU takes work from a few queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 by default; clients of MPS were seen to have 2). Streams
beyond that number share one, and then work starts in the order it was enqueued across those streams, although no event ties
them: it may not start before the work enqueued before it has started. Seen with FSDP on two ranks sharing an H200: an
all_gather that was ready waited through a whole layer.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from steptime._program.program import CallKind, IntColumn, Program, WorkKind
from steptime._units import LONG_AGO

# H200, driver 580, CUDA 13.0, 2026-11-15, benchmarks/h200/launch_queue.py: the same on four machines, with and without MPS.
QUEUE_DEPTH = 1021
# A launch counts as held up when all but this many places are taken: the count is read off two clocks.
_FREE_PLACES = 3
# A start this close behind an end, with nothing else to explain it, was caused by it (dispatch after a wait takes 1-10 us).
CAUSED_WITHIN_NS = 15_000
# Starts of two works of one queue may be recorded this much out of order.
ORDER_SLACK_NS = 2_000
# A start this close behind the start of the work before it in the queue was caused by it.
RELEASED_WITHIN_NS = 30_000
# So many unexplained late starts must be explained before streams count as sharing a queue.
EXPLAINED_AT_LEAST = 3
# Only so many streams, those with most work, are compared with each other: twice what the most queues of a GPU would serve.
STREAMS_AT_MOST = 64

Listed = tuple[list[int], list[int]]  # launch times, and what was launched, in order


@dataclass(frozen=True, eq=False)
class IssueOrder:
    """The works of a program in the order in which they were launched; backlog first."""

    launch_ns: IntColumn  # per work
    first_work: IntColumn  # per call: the first work it launched, or -1
    streams: tuple[Listed, ...]  # per stream: its works
    threads: tuple[Listed, ...]  # per thread: the calls that launch work
    collective_ns: list[int]
    collectives: list[int]  # works launched in the window, with the times above

    @classmethod
    def of(cls, program: Program) -> IssueOrder:
        """Sort the works and launches of one program."""
        works, calls = program.works, program.calls
        launch_ns = launch_times(program)
        enqueued = np.lexsort((np.arange(len(works)), launch_ns))
        order = enqueued[works.call[enqueued] >= 0]
        first_work = np.full(len(calls), -1, dtype=np.int64)
        first_work[works.call[order[::-1]]] = order[::-1]
        streams = [enqueued[works.stream[enqueued] == index] for index in range(len(program.streams))]
        launching = np.flatnonzero(first_work >= 0)
        threads = [launching[calls.thread[launching] == index] for index in range(len(program.threads))]
        collectives = order[works.kind[order] == WorkKind.COLLECTIVE]
        return cls(
            launch_ns=launch_ns,
            first_work=first_work,
            streams=tuple((launch_ns[rows].tolist(), rows.tolist()) for rows in streams),
            threads=tuple((calls.start_ns[rows].tolist(), rows.tolist()) for rows in threads),
            collective_ns=launch_ns[collectives].tolist(),
            collectives=collectives.tolist(),
        )

    def tail(self, stream: int, before_ns: int) -> int:
        """The last work enqueued on a stream before a time, or -1."""
        times, works = self.streams[stream]
        at = bisect_left(times, before_ns)
        return works[at - 1] if at else -1

    def head(self, stream: int, after_ns: int) -> int:
        """The first work enqueued on a stream from a time on, or -1."""
        times, works = self.streams[stream]
        at = bisect_left(times, after_ns)
        return works[at] if at < len(works) else -1


def launch_times(program: Program) -> IntColumn:
    """Per work, when its launching call began; long ago for backlog."""
    calls, works = program.calls, program.works
    if not len(calls):
        return np.full(len(works), LONG_AGO, dtype=np.int64)
    return np.where(works.call >= 0, calls.start_ns[np.maximum(works.call, 0)], LONG_AGO)


def ready_times(program: Program) -> tuple[IntColumn, IntColumn]:
    """Per work, when everything known to hold it back was over as recorded, and the work before it on its stream (or -1)."""
    calls, works = program.calls, program.works
    launched = works.call >= 0
    ready = np.where(launched, calls.end_ns[np.maximum(works.call, 0)] if len(calls) else 0, LONG_AGO)
    previous = np.full(len(works), -1, dtype=np.int64)
    launch_ns = launch_times(program)
    in_order = [np.flatnonzero(works.stream == s) for s in range(len(program.streams))]
    for rows in in_order:
        previous[rows[1:]] = rows[:-1]
    ready = np.where(previous >= 0, np.maximum(ready, works.end_ns[previous]), ready)
    for row in np.flatnonzero((calls.kind == CallKind.STREAM_WAIT) & (calls.awaits >= 0)).tolist():
        rows = in_order[calls.stream[row]]
        at = int(np.searchsorted(launch_ns[rows], calls.start_ns[row], side="right"))
        if at < len(rows):
            ready[rows[at]] = max(ready[rows[at]], works.end_ns[calls.awaits[row]])
    return ready, previous


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
        launching = call[call >= 0]
        waiting = np.searchsorted(began, calls.start_ns[launching]) - np.searchsorted(
            started, calls.start_ns[launching], side="right"
        )
        counts[launching] = np.maximum(counts[launching], waiting)
    return counts


def queue_depth(program: Program) -> int:
    """The depth of the queue: as measured, unless the recording shows more unstarted launches (other makers' GPUs)."""
    most = int(unstarted(program).max(initial=0))
    return most if most > QUEUE_DEPTH + _FREE_PLACES else QUEUE_DEPTH


def held_up(program: Program, depth: int | None = None) -> npt.NDArray[np.bool_]:
    """Per call, whether it is a launch that found its queue full."""
    full = depth or queue_depth(program)
    return np.asarray((program.calls.kind == CallKind.LAUNCH) & (unstarted(program) >= full - _FREE_PLACES))


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
