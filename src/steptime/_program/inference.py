"""What a recorded program does not say outright: blocking copies, lost launches, hand-overs between threads, and waits.

Kineto records that a stream waited for an event, but (before `cuda_sync` records) neither which stream nor which event. The
rules, from strong to weak: what a record says; structure (a wait before a collective's launch is its stream waiting for the
compute stream); a late start that nothing else explains, right behind work of another stream; the order of calls
(collectives are awaited one after the other). A dependency that the recorded times contradict is dropped. Only the
*structure* is taken from times; how long anything waited never is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

import numpy as np

from steptime._program.program import CallKind, Calls, IntColumn, Program, SmallColumn, Thread, WorkKind
from steptime._program.queues import CAUSED_WITHIN_NS, IssueOrder, ready_times, with_shared_queues
from steptime._units import LONG_AGO

# Clock readings of host and device agree to about this much in a trace.
CLOCK_SLACK_NS = 1_000
# Synchronising calls return this fast when there is nothing to wait for.
UNBLOCKED_NS = 10_000
# How many of the latest collectives a wait may refer to: far more than anybody keeps in flight.
IN_FLIGHT = 256

_COMMUNICATION_OPS = ("record_param_comms", "nccl:", "c10d::")


@dataclass(frozen=True, slots=True)
class WaitHint:
    """What the source says about one wait: its stream, the stream waited for, when the event was recorded.

    Streams are indices into Program.streams, -1 for one on which nothing runs; None is what the source does not say.
    """

    call: int
    stream: int | None
    source_stream: int | None
    recorded_ns: int | None


def infer_dependencies(program: Program, hints: tuple[WaitHint, ...] = ()) -> Program:
    """The program with blocking copies marked, waits and synchronisations resolved, and threads handing over to each other."""
    calls = _mark_blocking_copies(program)
    stream, awaits = resolve_waits(replace(program, calls=calls), hints)
    calls = calls.replace(stream=stream, awaits=awaits)
    calls = calls.replace(after=hand_overs(calls, program.threads, max(len(program.steps), 1)))
    return with_shared_queues(replace(program, calls=calls))


def launch_the_unlaunched(program: Program) -> Program:
    """Work in mid-window whose launch was not recorded gets a launch on a thread of its own, where it was seen to start.

    Work without a launch at the head of a stream is backlog from before the window and stays as it is.
    """
    works, calls = program.works, program.calls
    lost = _lost(program)
    if not len(lost):
        return program
    step = _step_of_lost(program, lost)
    new = {column: np.full(len(lost), -1) for column in calls.columns()} | {
        "kind": np.full(len(lost), CallKind.LAUNCH),
        "api": works.name[lost],
        "thread": np.full(len(lost), len(program.threads)),
        "step": step,
        "start_ns": works.start_ns[lost],
        "end_ns": works.start_ns[lost],
    }
    work_call, work_step = works.call.copy(), works.step.copy()
    work_call[lost], work_step[lost] = len(calls) + np.arange(len(lost)), step
    message = (
        f"{program.source}: {len(lost)} of {len(works)} device events have no launch in the trace (filtered?); "
        "they start when they were seen to start"
    )
    return replace(
        program,
        calls=Calls.from_columns({k: np.concatenate([v, new[k]]) for k, v in calls.columns().items()}),
        works=works.replace(call=work_call, step=work_step),
        threads=(*program.threads, Thread(-1, "unrecorded")),
    ).with_warnings(message)


def _lost(program: Program) -> IntColumn:
    """Works without a launch behind launched work of their stream, by start; without any launch, all since the first step."""
    works = program.works
    launched, behind = works.call >= 0, np.zeros(len(works), dtype=bool)
    for index in range(len(program.streams)):
        rows = np.flatnonzero(works.stream == index)
        behind[rows] = np.logical_or.accumulate(launched[rows])
    if not launched.any():
        begins = program.calls.start_ns[program.calls.kind == CallKind.STEP_BEGIN]
        behind = works.start_ns >= begins.min(initial=np.iinfo(np.int64).max)
    lost = np.flatnonzero(behind & ~launched)
    return lost[np.argsort(works.start_ns[lost], kind="stable")]


def _step_of_lost(program: Program, lost: IntColumn) -> SmallColumn:
    """The step in which work without a launch began, but none that its neighbours on the stream rule out."""
    works = program.works
    step = _step_at(program, works.start_ns[lost])
    for index in range(len(program.streams)):
        rows = np.flatnonzero((works.stream == index) & (works.step >= 0))
        if not len(rows):
            continue
        mine = np.flatnonzero(works.stream[lost] == index)
        at = np.searchsorted(rows, lost[mine])
        low = np.where(at > 0, works.step[rows[np.maximum(at - 1, 0)]], -1)
        high = np.where(at < len(rows), works.step[rows[np.minimum(at, len(rows) - 1)]], np.iinfo(np.int32).max)
        step[mine] = np.clip(step[mine], low, np.maximum(low, high))
    return step


def _step_at(program: Program, times: IntColumn) -> SmallColumn:
    calls = program.calls
    begins = np.flatnonzero(calls.kind == CallKind.STEP_BEGIN)
    if not len(begins):
        return np.full(len(times), -1, dtype=np.int32)
    at = np.searchsorted(calls.start_ns[begins], times, side="right") - 1
    return np.where(at >= 0, calls.step[begins[np.maximum(at, 0)]], -1).astype(np.int32)


def _mark_blocking_copies(program: Program) -> Calls:
    """Copies between the device and pageable memory whose call returned only after the copy had finished."""
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


def resolve_waits(program: Program, hints: tuple[WaitHint, ...]) -> tuple[SmallColumn, SmallColumn]:
    """The `stream` and `awaits` columns of the calls."""
    resolver = _Resolver(program, {h.call: h for h in hints})
    resolver.resolve()
    resolver.explain_late_starts()
    resolver.fill_in()
    return resolver.stream, resolver.awaits


class _Resolver:
    """Finds, for every wait and synchronisation, the stream and the work it refers to."""

    def __init__(self, program: Program, hints: dict[int, WaitHint]) -> None:
        self.program, self.hints = program, hints
        self.calls, self.works = program.calls, program.works
        self.issued = IssueOrder.of(program)
        self.awaited: set[tuple[int, int]] = set()  # (waiting stream, awaited work)
        self.held_back: dict[int, list[int]] = {}  # collective -> what its waits refer to, not yet assigned
        self.outermost: dict[int, int] = {}  # op -> the outermost communication op around it, or -1
        self.idle: set[int] = set()  # waits known to hold nothing back
        self.plausible: dict[int, tuple[int, int]] = {}  # wait -> (stream, work) that only the order of calls speaks for
        self.stream = np.full(len(self.calls), -1, dtype=np.int32)
        self.awaits = np.full(len(self.calls), -1, dtype=np.int32)

    def resolve(self) -> None:
        """Fill in the columns, call by call in order of start."""
        kinds = self.calls.kind
        targets = (CallKind.STREAM_WAIT, CallKind.STREAM_SYNC, CallKind.EVENT_SYNC)
        rows = np.flatnonzero(np.isin(kinds, targets))
        for row in rows[np.argsort(self.calls.start_ns[rows], kind="stable")].tolist():
            if kinds[row] == CallKind.STREAM_WAIT:
                self.stream[row], self.awaits[row] = self._wait(row)
            elif kinds[row] == CallKind.STREAM_SYNC:
                self.stream[row] = self._synchronised_stream(row)
            else:
                self.awaits[row] = self._synchronised_work(row)

    def explain_late_starts(self) -> None:
        """Work that started late for no known reason, right behind work of another stream, claims a wait nobody has claimed."""
        waits = np.flatnonzero(self.calls.kind == CallKind.STREAM_WAIT)
        waits = waits[(self.awaits[waits] < 0) & ~np.isin(waits, sorted(self.idle))]
        waits = waits[np.argsort(self.calls.start_ns[waits], kind="stable")]
        unclaimed, times = waits.tolist(), self.calls.start_ns[waits].tolist()
        if not unclaimed:
            return
        works = self.works
        resolved = replace(self.program, calls=self.calls.replace(stream=self.stream, awaits=self.awaits))
        ready, previous = ready_times(resolved)
        late = np.flatnonzero((works.call >= 0) & (works.start_ns > ready + CAUSED_WITHIN_NS))
        by_end = np.argsort(works.end_ns, kind="stable")
        ends = works.end_ns[by_end].tolist()
        for work in late[np.argsort(works.start_ns[late], kind="stable")].tolist():
            begun = int(works.start_ns[work])
            close = by_end[bisect_left(ends, begun - CAUSED_WITHIN_NS) : bisect_right(ends, begun + CLOCK_SLACK_NS)]
            earliest = int(self.issued.launch_ns[previous[work]]) if previous[work] >= 0 else LONG_AGO
            for cause in close[::-1].tolist():
                if works.stream[cause] == works.stream[work] or self.issued.launch_ns[cause] >= self.issued.launch_ns[work]:
                    continue
                at = bisect_left(times, int(self.issued.launch_ns[work])) - 1
                if at >= 0 and times[at] > max(earliest, int(self.issued.launch_ns[cause])):
                    self.stream[unclaimed[at]], self.awaits[unclaimed[at]] = works.stream[work], cause
                    del unclaimed[at], times[at]
                    break

    def fill_in(self) -> None:
        """Waits that nothing has claimed get what is plausible by the order of calls."""
        for row, (stream, work) in self.plausible.items():
            if self.awaits[row] < 0:
                self.stream[row], self.awaits[row] = stream, work

    def _current_stream(self, row: int) -> int:
        """The stream a thread launches on next, or computed on last where it launches nothing more; -1 where it never does."""
        times, calls = self.issued.threads[self.calls.thread[row]]
        at = bisect_left(times, int(self.calls.start_ns[row]))
        if at < len(calls):
            return int(self.works.stream[self.issued.first_work[calls[at]]])
        before = (int(self.issued.first_work[call]) for call in reversed(calls))
        return next((int(self.works.stream[w]) for w in before if self.works.kind[w] != WorkKind.COLLECTIVE), -1)

    def _wait(self, row: int) -> tuple[int, int]:
        start = int(self.calls.start_ns[row])
        hint = self.hints.get(row)
        if hint is not None and hint.stream is not None and hint.source_stream is not None:
            when = start if hint.recorded_ns is None else hint.recorded_ns
            awaited = self.issued.tail(hint.source_stream, when) if min(hint.stream, hint.source_stream) >= 0 else -1
            if awaited < 0:
                self.idle.add(row)
            return hint.stream, awaited
        inside = self._collective_around(row)
        if inside is not None:
            return self._before_collective(row, inside)
        waiter = self._current_stream(row)
        following = self.issued.head(waiter, start) if waiter >= 0 else -1
        if following < 0:
            return -1, -1
        possible = self._possible(row, following, waiter)
        if not possible:
            return -1, -1
        cause = self._cause(following, possible)
        awaited = cause if cause >= 0 else self._plausible(possible)
        self.awaited.add((waiter, awaited))
        if cause < 0:
            self.plausible[row] = waiter, awaited
            return -1, -1
        return waiter, cause

    def _collective_around(self, row: int) -> int | None:
        """The collective launched inside the communication op around a call, if there is one."""
        ops, outermost = self.program.ops, self._outermost(int(self.calls.op[row]))
        if outermost < 0:
            return None
        at = bisect_left(self.issued.collective_ns, int(ops.start_ns[outermost]))
        while at < len(self.issued.collectives) and self.issued.collective_ns[at] <= ops.end_ns[outermost]:
            work = self.issued.collectives[at]
            if self.calls.thread[self.works.call[work]] == self.calls.thread[row]:
                return work
            at += 1
        return None

    def _outermost(self, op: int) -> int:
        """The outermost communication op around an op, or -1; every op on the way up is asked once."""
        ops, names, path = self.program.ops, self.program.names, []
        while op >= 0 and op not in self.outermost:
            path.append(op)
            op = int(ops.parent[op])
        result = self.outermost.get(op, -1)
        for each in reversed(path):
            if result < 0 and names[ops.name[each]].startswith(_COMMUNICATION_OPS):
                result = each
            self.outermost[each] = result
        return result

    def _before_collective(self, row: int, work: int) -> tuple[int, int]:
        """Waits before a collective's launch hold its stream back behind what was computed and the communicator's last use.

        NCCL plays the collectives of one communicator one after the other, whatever streams they are on. Waits after the
        launch are internal to it.
        """
        if self.calls.start_ns[row] > self.calls.start_ns[self.works.call[work]]:
            self.idle.add(row)
            return -1, -1
        if work not in self.held_back:
            start, begun = int(self.calls.start_ns[row]), int(self.works.start_ns[work])
            sources = (self._computed(row, work, start), self._used_before(work))
            self.held_back[work] = [w for w in sources if w >= 0 and self.works.end_ns[w] <= begun + CLOCK_SLACK_NS]
        left = self.held_back[work]
        return (int(self.works.stream[work]), left.pop(0)) if left else (-1, -1)

    def _computed(self, row: int, work: int, start: int) -> int:
        """The last work on the stream this thread computes on, if that is not the collective's own."""
        stream, other = int(self.works.stream[work]), -1
        times, calls = self.issued.threads[self.calls.thread[row]]
        for index in range(bisect_left(times, start) - 1, -1, -1):
            candidate = int(self.issued.first_work[calls[index]])
            used = int(self.works.stream[candidate])
            if self.works.kind[candidate] != WorkKind.COLLECTIVE:
                return -1 if used == stream else self.issued.tail(used, start)
            if other < 0 and used != stream:
                other = used
        return self.issued.tail(other, start) if other >= 0 else -1  # a thread that only communicates

    def _used_before(self, work: int) -> int:
        """The collective that used the same communicator last, if it is on another stream."""
        group = self._group(work)
        for index in range(bisect_left(self.issued.collective_ns, int(self.calls.start_ns[self.works.call[work]])) - 1, -1, -1):
            candidate = self.issued.collectives[index]
            if self._group(candidate) == group:
                return candidate if self.works.stream[candidate] != self.works.stream[work] else -1
        return -1

    def _group(self, work: int) -> tuple[str, tuple[int, ...]]:
        collective = self.program.collectives[self.works.collective[work]]
        return collective.group, collective.ranks

    def _possible(self, row: int, following: int, waiter: int) -> list[int]:
        """Works of other streams that a wait may refer to: those over before `following` began and not awaited yet."""
        works, start = self.works, int(self.calls.start_ns[row])
        last = bisect_right(self.issued.collective_ns, start)
        pending = [w for w in self.issued.collectives[max(0, last - IN_FLIGHT) : last] if works.stream[w] != waiter]
        tails = [w for s in range(len(self.issued.streams)) if s != waiter and (w := self.issued.tail(s, start)) >= 0]
        over = works.start_ns[following] + CLOCK_SLACK_NS
        return [w for w in dict.fromkeys((*pending, *tails)) if works.end_ns[w] <= over and (waiter, w) not in self.awaited]

    def _cause(self, following: int, possible: list[int]) -> int:
        """The work that ended right before `following` began, if nothing else explains so late a start; else -1."""
        begun = int(self.works.start_ns[following])
        ready = max(int(self.calls.end_ns[self.works.call[following]]), self._previous_end(following))
        if begun <= ready + CAUSED_WITHIN_NS:
            return -1
        close = [w for w in possible if begun - self.works.end_ns[w] <= CAUSED_WITHIN_NS]
        return max(close, key=lambda w: (int(self.works.end_ns[w]), -w), default=-1)

    def _plausible(self, possible: list[int]) -> int:
        """The collective waited for next if there is one, for they are awaited in order; else what was enqueued last."""
        if self.works.kind[possible[0]] == WorkKind.COLLECTIVE:
            return possible[0]
        return max(possible, key=lambda w: (int(self.issued.launch_ns[w]), w))

    def _previous_end(self, work: int) -> int:
        same = work > 0 and self.works.stream[work - 1] == self.works.stream[work]
        return int(self.works.end_ns[work - 1]) if same else LONG_AGO

    def _synchronised_stream(self, row: int) -> int:
        hint = self.hints.get(row)
        if hint is not None and hint.stream is not None:
            return hint.stream
        start, end = int(self.calls.start_ns[row]), int(self.calls.end_ns[row])
        times, calls = self.issued.threads[self.calls.thread[row]]
        at = bisect_left(times, start)
        guess = int(self.works.stream[self.issued.first_work[calls[at - 1]]]) if at else -1
        ends = {s: int(self.works.end_ns[t]) for s in range(len(self.issued.streams)) if (t := self.issued.tail(s, start)) >= 0}
        finished = [s for s in ends if ends[s] <= end + CLOCK_SLACK_NS]
        # A call that blocked returned because its stream was done.
        likely = [s for s in finished if end - start > UNBLOCKED_NS and ends[s] > max(start, end - CAUSED_WITHIN_NS)]
        possible = likely or finished
        if guess in possible:
            return guess
        return max(possible, key=lambda s: (ends[s], -s)) if possible else -1

    def _synchronised_work(self, row: int) -> int:
        hint = self.hints.get(row)
        if hint is not None and hint.source_stream is not None and hint.recorded_ns is not None:
            return self.issued.tail(hint.source_stream, hint.recorded_ns) if hint.source_stream >= 0 else -1
        works, start, end = self.works, int(self.calls.start_ns[row]), int(self.calls.end_ns[row])
        limit = end + CLOCK_SLACK_NS if end - start > UNBLOCKED_NS else start
        best = -1
        for times, enqueued in self.issued.streams:
            for index in range(bisect_left(times, start) - 1, -1, -1):
                if works.end_ns[enqueued[index]] <= limit:
                    if best < 0 or works.end_ns[enqueued[index]] > works.end_ns[best]:
                        best = enqueued[index]
                    break
        return best
