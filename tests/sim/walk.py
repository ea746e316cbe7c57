"""The simulator's rules once more, written down naively: one rank, one scenario, one event at a time.

The vectorised simulator must agree with this to the nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from tests.sim.worlds import picked, single_ranks

from steptime._program.program import CallKind, Program, Stream, WorkKind
from steptime._sim import Cohort, Timing

SYNCS = (CallKind.EVENT_SYNC, CallKind.STREAM_SYNC, CallKind.DEVICE_SYNC)


@dataclass
class Rank:
    """What one rank has done so far."""

    number: int
    program: Program
    timing: Timing
    members: tuple[tuple[int, ...], ...]
    call_start: dict[int, int] = field(default_factory=dict)
    call_begin: dict[int, int] = field(default_factory=dict)  # with a slot in the queue
    call_end: dict[int, int] = field(default_factory=dict)
    work_start: dict[int, int] = field(default_factory=dict)
    work_end: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        calls = self.program.calls
        recorded = bool((calls.start_ns >= 0).all())
        rows = list(range(len(calls)))
        self.issued = sorted(rows, key=lambda c: (int(calls.start_ns[c]), c)) if recorded else rows
        self.place = {call: place for place, call in enumerate(self.issued)} | {-1: -1}

    def lane(self, stream: int) -> list[int]:
        return np.flatnonzero(self.program.works.stream == stream).tolist()

    def launched(self, work: int) -> int:
        return self.place[int(self.program.works.call[work])]

    def value(self, name: str, row: int) -> int:
        return int(getattr(self.timing, name)[row, 0, 0])


def awaited(rank: Rank, call: int) -> list[tuple[int, int]]:
    """(stream, work) a synchronising call waits for; work -1: what the stream held when the window opened."""
    calls = rank.program.calls
    kind = calls.kind[call]
    if kind == CallKind.EVENT_SYNC:
        work = int(calls.awaits[call])
        return [(int(rank.program.works.stream[work]), work)] if work >= 0 else []
    streams = range(len(rank.program.streams)) if kind == CallKind.DEVICE_SYNC else [int(calls.stream[call])]
    found = []
    for stream in streams:
        before = [work for work in rank.lane(stream) if rank.launched(work) < rank.place[call]]
        found.append((stream, before[-1] if before else -1))
    return found


def queue_slots(rank: Rank, call: int, depth: int) -> list[int]:
    """The works whose starts free the places for a launch, one per hardware queue it launches into."""
    works, streams = rank.program.works, rank.program.streams
    found = []
    for queue in sorted({_queue(streams, int(works.stream[w])) for w in np.flatnonzero(works.call == call)}):
        launches: list[int] = []
        for work in sorted(range(len(works)), key=lambda w: (rank.launched(w), w)):
            again = launches and works.call[work] >= 0 and works.call[launches[-1]] == works.call[work]
            if _queue(streams, int(works.stream[work])) == queue and not again:
                launches.append(work)
        number = next(n for n, work in enumerate(launches) if works.call[work] == call)
        found += [launches[number - depth]] if number >= depth else []
    return found


def _queue(streams: tuple[Stream, ...], stream: int) -> int:
    queue = streams[stream].queue
    return -1 - stream if queue is None else queue


def queue_neighbour(rank: Rank, work: int) -> int:
    """The work of another stream enqueued just before on the same hardware queue, or -1."""
    works, streams = rank.program.works, rank.program.streams
    queue = streams[works.stream[work]].queue
    if queue is None or works.call[work] < 0:
        return -1
    shared = [w for w in range(len(works)) if works.call[w] >= 0 and streams[works.stream[w]].queue == queue]
    shared.sort(key=lambda w: (rank.launched(w), w))
    at = shared.index(work)
    return shared[at - 1] if at and works.stream[shared[at - 1]] != works.stream[work] else -1


def try_call(rank: Rank, call: int, previous: int | None, depth: int | None) -> bool:
    """Play one call if everything it needs is known."""
    calls, works = rank.program.calls, rank.program.works
    thread = int(calls.thread[call])
    start = rank.value("thread_start_ns", thread) if previous is None else rank.call_end[previous]
    after = int(calls.after[call])
    if after >= 0:
        if after not in rank.call_end:
            return False
        start = max(start, rank.call_end[after])
    begin = rank.call_start[call] = start + rank.value("gap_ns", call)
    own = np.flatnonzero(works.call == call).tolist()
    if own and depth is not None:
        for slot in queue_slots(rank, call, depth):
            if slot not in rank.work_start:
                return False
            begin = max(begin, rank.work_start[slot])
    rank.call_begin[call] = begin
    end = begin + rank.value("call_ns", call)
    waits = [(0, own[-1])] if calls.kind[call] == CallKind.BLOCKING_COPY and own else []
    waits += awaited(rank, call) if calls.kind[call] in SYNCS else []
    for stream, work in waits:
        if work >= 0 and work not in rank.work_end:
            return False
        finished = rank.work_end[work] if work >= 0 else rank.value("stream_start_ns", stream)
        end = max(end, finished + rank.value("return_ns", call))
    rank.call_end[call] = end
    return True


def try_arrive(rank: Rank, work: int, previous: int | None) -> bool:
    """Find when a work starts (a collective: arrives) if everything it needs is known."""
    calls, works = rank.program.calls, rank.program.works
    stream, call = int(works.stream[work]), int(works.call[work])
    start = rank.value("stream_start_ns", stream)
    if previous is not None:
        start = rank.work_end[previous] + rank.value("spacing_ns", work)
    if call >= 0:
        known = rank.call_begin if calls.kind[call] == CallKind.BLOCKING_COPY else rank.call_end
        if call not in known:
            return False
        start = max(start, known[call] + rank.value("latency_ns", work))
    for wait in np.flatnonzero((calls.kind == CallKind.STREAM_WAIT) & (calls.stream == stream)).tolist():
        other = int(calls.awaits[wait])
        held = [w for w in rank.lane(stream) if rank.launched(w) > rank.place[wait]]
        if other >= 0 and int(works.stream[other]) != stream and held and held[0] == work:
            if other not in rank.work_end:
                return False
            start = max(start, rank.work_end[other] + rank.value("release_ns", work))
    before = queue_neighbour(rank, work)
    if before >= 0:
        if before not in rank.work_start:
            return False
        start = max(start, rank.work_start[before])
    rank.work_start[work] = start
    return True


def try_depart(rank: Rank, work: int, ranks: dict[int, Rank]) -> bool:
    """Find when a work that has started ends."""
    moving = rank.work_start[work]
    if rank.program.works.kind[work] == WorkKind.COLLECTIVE:
        index = int(rank.program.works.collective[work])
        mine = rank.program.collectives[index]
        for member in rank.members[index] if rank.timing.waits[work] else ():
            if member not in ranks:
                continue
            peer = ranks[member]
            arrived = [
                peer.work_start[w]
                for w in peer.work_start
                if (c := int(peer.program.works.collective[w])) >= 0
                and (peer.program.collectives[c].group, peer.program.collectives[c].sequence) == (mine.group, mine.sequence)
            ]
            if not arrived:
                return False
            moving = max(moving, arrived[0])
        moving = max(moving, rank.value("absent_ns", work))
    rank.work_end[work] = moving + rank.value("duration_ns", work)
    return True


def walk(cohorts: list[Cohort], *, scenario: int = 0, depth: int | None = None) -> dict[int, Rank]:
    """Play everything, going round all ranks and lanes until nothing moves; ranks by number."""
    ranks = {}
    for cohort in single_ranks(cohorts):
        members = cohort.members[0] if cohort.members else tuple(c.ranks for c in cohort.program.collectives)
        timing = picked(cohort.timing, scenario=scenario)
        ranks[cohort.ranks[0]] = Rank(cohort.ranks[0], cohort.program, timing, members)
    moved = True
    while moved:
        moved = False
        for rank in ranks.values():
            moved |= _go_on(rank, ranks, depth)
    return ranks


def _go_on(rank: Rank, ranks: dict[int, Rank], depth: int | None) -> bool:
    moved = False
    for thread in range(len(rank.program.threads)):
        previous = None
        for call in np.flatnonzero(rank.program.calls.thread == thread).tolist():
            known = len(rank.call_begin)
            if call not in rank.call_end:
                played = try_call(rank, call, previous, depth)
                moved |= played or len(rank.call_begin) > known
                if not played:
                    break
            previous = call
    for stream in range(len(rank.program.streams)):
        previous = None
        for work in rank.lane(stream):
            if work not in rank.work_start and not try_arrive(rank, work, previous):
                break
            if work not in rank.work_end:
                if not try_depart(rank, work, ranks):
                    break
                moved = True
            previous = work
    return moved
