"""What a recorded program does not say outright: blocking copies, what waits refer to, hand-overs between threads.

Kineto records that a stream waited for an event, but (before `cuda_sync` records) neither which stream nor which event. The
rules below go from structure first (a wait before a collective's launch is the communication stream waiting for the compute
stream), then check against the recorded times: a dependency that the recording contradicts is dropped, one that explains an
otherwise unexplained late start is preferred. Only the *structure* is taken from times; durations of waiting never are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

import numpy as np

from steptime.graph.program import CallKind, Calls, Program, Thread, WorkKind
from steptime.graph.table import IntColumn, SmallColumn

# Clock readings of host and device agree to about this much in a trace.
CLOCK_SLACK_NS = 1_000
# A start this close behind an end, with nothing else to explain it, was caused by it (dispatch after a wait takes 1-10 us).
CAUSED_WITHIN_NS = 15_000
# Synchronising calls return this fast when there is nothing to wait for.
UNBLOCKED_NS = 10_000

_COMMUNICATION_OPS = ("record_param_comms", "nccl:", "c10d::")


@dataclass(frozen=True, slots=True)
class WaitHint:
    """What the source says about one wait: its stream, the stream waited for, when the event was recorded."""

    call: int
    stream: int
    source_stream: int
    recorded_ns: int | None


def infer_dependencies(program: Program, hints: tuple[WaitHint, ...] = ()) -> Program:
    """The program with blocking copies marked, waits and synchronisations resolved, and threads handing over to each other."""
    program = _launch_the_unlaunched(program)
    calls = _mark_blocking_copies(program)
    resolver = _Resolver(replace(program, calls=calls), {h.call: h for h in hints})
    stream, awaits = resolver.resolve()
    calls = calls.replace(stream=stream, awaits=awaits)
    return replace(program, calls=calls.replace(after=hand_overs(calls, program.threads, max(len(program.steps), 1))))


def _launch_the_unlaunched(program: Program) -> Program:
    """Work in mid-window whose launch was not recorded gets a launch on a thread of its own, where it was seen to start.

    Work without a launch at the head of a stream is backlog from before the window and stays as it is.
    """
    works, calls = program.works, program.calls
    launched = works.call >= 0
    seen = np.zeros(len(works), dtype=bool)
    for index in range(len(program.streams)):
        rows = np.flatnonzero(works.stream == index)
        seen[rows] = np.maximum.accumulate(launched[rows]) if len(rows) else False
    lost = np.flatnonzero(seen & ~launched)
    if not len(lost):
        return program
    lost = lost[np.argsort(works.start_ns[lost], kind="stable")]
    first = len(calls)
    new = {
        "kind": np.full(len(lost), CallKind.LAUNCH),
        "api": works.name[lost],
        "thread": np.full(len(lost), len(program.threads)),
        "op": np.full(len(lost), -1),
        "step": _step_at(program, works.start_ns[lost]),
        "start_ns": works.start_ns[lost],
        "end_ns": works.start_ns[lost],
        "stream": np.full(len(lost), -1),
        "awaits": np.full(len(lost), -1),
        "after": np.full(len(lost), -1),
    }
    call = works.call.copy()
    call[lost] = first + np.arange(len(lost))
    step = works.step.copy()
    step[lost] = new["step"]
    return replace(
        program,
        calls=Calls.from_columns({k: np.concatenate([v, new[k]]) for k, v in calls.columns().items()}),
        works=works.replace(call=call, step=step),
        threads=(*program.threads, Thread(-1, "unrecorded")),
        warnings=(
            *program.warnings,
            f"{program.source}: {len(lost)} of {len(works)} device events have no launch in the trace (filtered?); "
            "they start when they were seen to start",
        ),
    )


def _step_at(program: Program, times: IntColumn) -> SmallColumn:
    calls = program.calls
    begins = np.flatnonzero(calls.kind == CallKind.STEP_BEGIN)
    if not len(begins):
        return np.full(len(times), -1, dtype=np.int32)
    at = np.searchsorted(calls.start_ns[begins], times, side="right") - 1
    return np.where(at >= 0, calls.step[begins[np.maximum(at, 0)]], -1).astype(np.int32)


def _mark_blocking_copies(program: Program) -> Calls:
    """Copies between host and pageable memory whose call returned only after the copy had finished."""
    calls, works = program.calls, program.works
    synchronous = np.array(
        ["Memcpy" in n and "Async" not in n and not n.startswith("Memcpy") for n in program.names], dtype=bool
    )
    crossing = np.array(["Pageable" in n or "DtoH" in n for n in program.names], dtype=bool)
    copies = np.flatnonzero((works.kind == WorkKind.COPY) & (works.call >= 0))
    call = works.call[copies]
    returned_after = calls.end_ns[call] + CLOCK_SLACK_NS >= works.end_ns[copies]
    blocking = returned_after & (crossing[works.name[copies]] | synchronous[calls.api[call]])
    kind = calls.kind.copy()
    kind[call[blocking]] = CallKind.BLOCKING_COPY
    return calls.replace(kind=kind)


class _Resolver:
    """Finds, for every wait and synchronisation, the stream and the work it refers to."""

    def __init__(self, program: Program, hints: dict[int, WaitHint]) -> None:
        self.program, self.hints = program, hints
        self.calls, self.works = program.calls, program.works
        works, calls = self.works, self.calls
        rows = np.flatnonzero(works.call >= 0)
        launch_ns = calls.start_ns[works.call[rows]]
        order = rows[np.lexsort((rows, launch_ns))]
        self.first_work = np.full(len(calls), -1, dtype=np.int64)
        self.first_work[works.call[order[::-1]]] = order[::-1]
        self.streams: list[tuple[list[int], list[int]]] = []  # per stream: launch times, works, in launch order
        for index in range(len(program.streams)):
            mine = order[works.stream[order] == index]
            self.streams.append((calls.start_ns[works.call[mine]].tolist(), mine.tolist()))
        self.threads: list[tuple[list[int], list[int]]] = []  # per thread: launch times, calls
        launching = np.flatnonzero(self.first_work >= 0)
        for index in range(len(program.threads)):
            own = launching[calls.thread[launching] == index]
            self.threads.append((calls.start_ns[own].tolist(), own.tolist()))
        collective = order[works.kind[order] == WorkKind.COLLECTIVE]
        self.collectives: list[int] = collective.tolist()
        self.collective_ns = calls.start_ns[works.call[collective]].tolist()
        self.awaited: set[tuple[int, int]] = set()  # (waiting stream, awaited work)
        self.held_back: dict[int, list[int]] = {}  # collective -> what its waits refer to, not yet assigned

    def resolve(self) -> tuple[SmallColumn, SmallColumn]:
        """The `stream` and `awaits` columns."""
        stream = np.full(len(self.calls), -1, dtype=np.int32)
        awaits = np.full(len(self.calls), -1, dtype=np.int32)
        kinds = self.calls.kind
        targets = (CallKind.STREAM_WAIT, CallKind.STREAM_SYNC, CallKind.EVENT_SYNC)
        rows = np.flatnonzero(np.isin(kinds, targets))
        for row in rows[np.argsort(self.calls.start_ns[rows], kind="stable")].tolist():
            if kinds[row] == CallKind.STREAM_WAIT:
                stream[row], awaits[row] = self._wait(row)
            elif kinds[row] == CallKind.STREAM_SYNC:
                stream[row] = self._synchronised_stream(row)
            else:
                awaits[row] = self._synchronised_work(row)
        return stream, awaits

    def _tail(self, stream: int, before_ns: int) -> int:
        """The last work enqueued on a stream before a time, or -1."""
        times, works = self.streams[stream]
        at = bisect_left(times, before_ns)
        return works[at - 1] if at else -1

    def _wait(self, row: int) -> tuple[int, int]:
        start = int(self.calls.start_ns[row])
        hint = self.hints.get(row)
        if hint is not None and hint.stream >= 0 and hint.source_stream >= 0:
            when = start if hint.recorded_ns is None else hint.recorded_ns
            return hint.stream, self._tail(hint.source_stream, when)
        inside = self._collective_around(row)
        if inside is not None:
            return self._before_collective(row, inside)
        times, calls = self.threads[self.calls.thread[row]]
        at = bisect_left(times, start)
        if at == len(calls):
            return -1, -1
        following = int(self.first_work[calls[at]])
        waiter = int(self.works.stream[following])
        awaited = self._cause(row, following, waiter)
        if awaited >= 0:
            self.awaited.add((waiter, awaited))
        return (waiter, awaited) if awaited >= 0 else (-1, -1)

    def _collective_around(self, row: int) -> int | None:
        """The collective launched inside the communication op around a call, if there is one."""
        ops, names = self.program.ops, self.program.names
        op, outermost = int(self.calls.op[row]), -1
        while op >= 0:
            if names[ops.name[op]].startswith(_COMMUNICATION_OPS):
                outermost = op
            op = int(ops.parent[op])
        if outermost < 0:
            return None
        at = bisect_left(self.collective_ns, int(ops.start_ns[outermost]))
        while at < len(self.collectives) and self.collective_ns[at] <= ops.end_ns[outermost]:
            work = self.collectives[at]
            if self.calls.thread[self.works.call[work]] == self.calls.thread[row]:
                return work
            at += 1
        return None

    def _before_collective(self, row: int, work: int) -> tuple[int, int]:
        """Waits before a collective's launch hold its stream back behind what was computed and the communicator's last use.

        NCCL plays the collectives of one communicator one after the other, whatever streams they are on. Waits after the
        launch are internal to it.
        """
        if self.calls.start_ns[row] > self.calls.start_ns[self.works.call[work]]:
            return -1, -1
        if work not in self.held_back:
            start = int(self.calls.start_ns[row])
            self.held_back[work] = [w for w in (self._computed(row, work, start), self._used_before(work)) if w >= 0]
        sources = self.held_back[work]
        return (int(self.works.stream[work]), sources.pop(0)) if sources else (-1, -1)

    def _computed(self, row: int, work: int, start: int) -> int:
        """The last work this thread enqueued on another stream than the collective's."""
        stream = self.works.stream[work]
        times, calls = self.threads[self.calls.thread[row]]
        for index in range(bisect_left(times, start) - 1, -1, -1):
            candidate = int(self.first_work[calls[index]])
            if self.works.stream[candidate] != stream:
                return self._tail(int(self.works.stream[candidate]), start)
            if self.works.kind[candidate] != WorkKind.COLLECTIVE:
                return -1  # this thread computes on the collective's own stream: nothing to wait for
        return -1

    def _used_before(self, work: int) -> int:
        """The collective that used the same communicator last, if it is on another stream."""
        group = self._group(work)
        for index in range(bisect_left(self.collective_ns, int(self.calls.start_ns[self.works.call[work]])) - 1, -1, -1):
            candidate = self.collectives[index]
            if self._group(candidate) == group:
                return candidate if self.works.stream[candidate] != self.works.stream[work] else -1
        return -1

    def _group(self, work: int) -> tuple[str, tuple[int, ...]]:
        collective = self.program.collectives[self.works.collective[work]]
        return collective.group, collective.ranks

    def _cause(self, row: int, following: int, waiter: int) -> int:
        """The work on another stream that the next work of `waiter` waited for."""
        works, start = self.works, int(self.calls.start_ns[row])
        begun = int(works.start_ns[following])
        pending = [
            w for w in self.collectives[: bisect_right(self.collective_ns, start)]
            if works.stream[w] != waiter and (waiter, w) not in self.awaited
        ]  # fmt: skip
        tails = [self._tail(s, start) for s in range(len(self.streams)) if s != waiter]
        possible = [w for w in (*pending, *tails) if w >= 0 and works.end_ns[w] <= begun + CLOCK_SLACK_NS]
        if not possible:
            return -1
        ready = max(int(self.calls.end_ns[works.call[following]]), self._previous_end(following))
        if begun > ready + CAUSED_WITHIN_NS:
            close = [w for w in possible if begun - works.end_ns[w] <= CAUSED_WITHIN_NS]
            if close:
                return max(close, key=lambda w: (int(works.end_ns[w]), -w))
        oldest = next((w for w in pending if w in possible), None)
        if oldest is not None:
            return oldest
        return max(possible, key=lambda w: (int(self.calls.start_ns[works.call[w]]), w))

    def _previous_end(self, work: int) -> int:
        same = work > 0 and self.works.stream[work - 1] == self.works.stream[work]
        return int(self.works.end_ns[work - 1]) if same else -(2**60)

    def _synchronised_stream(self, row: int) -> int:
        hint = self.hints.get(row)
        if hint is not None and hint.stream >= 0:
            return hint.stream
        start, end = int(self.calls.start_ns[row]), int(self.calls.end_ns[row])
        times, calls = self.threads[self.calls.thread[row]]
        at = bisect_left(times, start)
        guess = int(self.works.stream[self.first_work[calls[at - 1]]]) if at else -1
        ends = {s: int(self.works.end_ns[t]) for s in range(len(self.streams)) if (t := self._tail(s, start)) >= 0}
        if guess in ends and ends[guess] <= end + CLOCK_SLACK_NS:
            return guess
        finished = [s for s in ends if ends[s] <= end + CLOCK_SLACK_NS]
        return max(finished, key=lambda s: (ends[s], -s)) if finished else -1

    def _synchronised_work(self, row: int) -> int:
        hint = self.hints.get(row)
        if hint is not None and hint.source_stream >= 0 and hint.recorded_ns is not None:
            return self._tail(hint.source_stream, hint.recorded_ns)
        works, start, end = self.works, int(self.calls.start_ns[row]), int(self.calls.end_ns[row])
        limit = end + CLOCK_SLACK_NS if end - start > UNBLOCKED_NS else start
        best = -1
        for times, enqueued in self.streams:
            for index in range(bisect_left(times, start) - 1, -1, -1):
                if works.end_ns[enqueued[index]] <= limit:
                    if best < 0 or works.end_ns[enqueued[index]] > works.end_ns[best]:
                        best = enqueued[index]
                    break
        return best


def hand_overs(calls: Calls, threads: tuple[Thread, ...], steps: int) -> SmallColumn:
    """Which call on another thread each call waited for: main hands over to autograd's thread and resumes when that is done."""
    after = np.full(len(calls), -1, dtype=np.int32)
    main = np.flatnonzero(calls.thread == 0)
    main = main[np.argsort(calls.start_ns[main], kind="stable")]
    for index, thread in enumerate(threads):
        if thread.role != "backward" or index == 0:
            continue
        rows = np.flatnonzero(calls.thread == index)
        rows = rows[np.argsort(calls.start_ns[rows], kind="stable")]
        if not len(rows) or not len(main):
            continue
        before = np.searchsorted(calls.start_ns[main], calls.start_ns[rows], side="right") - 1
        edges = np.flatnonzero(np.diff(before)) + 1
        bursts = np.split(np.arange(len(rows)), edges)
        if len(bursts) > 8 * steps + 8:
            continue  # the threads run side by side: no hand-over
        for burst in bursts:
            _hand_over(calls, after, main, int(before[burst[0]]), rows[burst])
    return after


def _hand_over(calls: Calls, after: SmallColumn, main: IntColumn, at: int, burst: IntColumn) -> None:
    first, last = burst[0], burst[-1]
    if at >= 0 and calls.end_ns[main[at]] <= calls.start_ns[first]:
        after[first] = main[at]
    if at + 1 < len(main) and calls.end_ns[last] <= calls.start_ns[main[at + 1]]:
        following = main[at + 1]
        current = after[following]
        if current < 0 or calls.end_ns[current] < calls.end_ns[last]:
            after[following] = last
