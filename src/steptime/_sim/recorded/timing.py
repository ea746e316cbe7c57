"""Recorded programs -> timings: what the run itself took, with everything that was waiting taken out.

Kept as recorded: host work between calls, launch costs, kernel durations. One typical value per trace and kind of work: the
distance from a launch to its start on an idle stream, from one kernel to the next on a busy one, and from what a stream waited
for to what it runs next. Never kept: how long a synchronising call blocked, how long a launch was held up by a full queue,
how long a collective waited for its peers, how long work queued behind other work. Those come out of the simulation or they
are wrong.

How ranks met at collectives is read with their clocks aligned at the ends of collectives, moving separated from waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._program.program import CallKind, Collective, Program, WorkKind
from steptime._program.queues import held_up, queue_depth
from steptime._program.workload import Workload
from steptime._sim.core.graph import Order, blocking_copies, stream_waits, synchronisations
from steptime._sim.core.timing import Cohort, Nanoseconds, Timing
from steptime._units import LONG_AGO, NS_PER_S
from steptime.errors import InputError

Column = npt.NDArray[np.int64]
MeetingKey = tuple[str, tuple[int, ...], int]

Spans = Mapping[MeetingKey, Mapping[int, tuple[int, int]]]

# Collectives end on all ranks within microseconds (1-7 us on eight V100s); clocks that agree better than this are left alone,
CLOCK_TRUSTED_NS = 1_000_000
# unless more than this share of the collectives would have ended on one rank before they began on another.
IMPOSSIBLE_SHARE = 0.1
# Nobody leaves these before everybody has arrived; the root of a broadcast or the sender of a message may.
_ALL_WAIT_FOR_ALL = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter", "barrier")
# Distances beyond this are no dispatch cost of the device: something unrecorded happened, and the typical distance is used.
DISPATCH_AT_MOST_NS = 20_000
# Traces of one run begin within minutes of each other; without collectives in common, clocks further apart cannot be aligned.
CLOCKS_APART_AT_MOST_NS = 24 * 3600 * NS_PER_S
# A launch this close before the stream is free did not wait for the stream.
CAUSE_MARGIN_NS = 500
# Used where a trace holds no case to learn from (1-2 us in every trace of a recent GPU seen so far).
DEFAULT_LATENCY_NS = 1_500
DEFAULT_SPACING_NS = 1_000
DEFAULT_RELEASE_NS = 1_500
DEFAULT_RETURN_NS = 5_000


@dataclass(frozen=True)
class Recorded:
    """One cohort per rank, ready to be simulated, on the common clock of all ranks."""

    cohorts: tuple[Cohort, ...]
    queue_depth: int
    origin_ns: int  # absolute time of the common zero
    offsets_ns: tuple[int, ...]  # per rank: what was added to its own times
    # Per rank and work: how much later than all ranks with a trace those without one came to a collective.
    late_ns: tuple[Column, ...]


def _check(program: Program) -> None:
    """A program that was only half recorded has no timings: what is missing would silently count as nothing."""
    calls, where = program.calls, program.source or f"rank {program.rank}"
    if not program.recorded:
        told = next((f" ({w.removeprefix(f'{where}: ')})" for w in program.warnings), "")
        raise InputError(f"{where}: has no device times; a Kineto trace of the run is needed{told}")
    untimed = int((calls.start_ns < 0).sum()) + int((program.works.start_ns < 0).sum())
    if untimed:
        total = len(calls) + len(program.works)
        raise InputError(
            f"{where}: {untimed} of {total} host calls and device events have no times; give a Kineto trace of the run"
        )
    for kind, what in ((CallKind.STEP_BEGIN, "begins"), (CallKind.STEP_END, "ends")):
        unmarked = sorted(set(program.steps) - set(calls.step[calls.kind == kind].tolist()))
        if unmarked or not program.steps:
            which = f"where step {unmarked[0]} {what}" if unmarked else "where its steps begin and end"
            raise InputError(f"{where}: does not say {which}; give a Kineto trace of the run")


def timed(program: Program) -> bool:
    """Whether a program was recorded with all that its timings need."""
    try:
        _check(program)
    except InputError:
        return False
    return True


def _check_clocks(workload: Workload, offsets_ns: Sequence[int]) -> None:
    early, late = int(np.argmin(offsets_ns)), int(np.argmax(offsets_ns))
    apart_ns = offsets_ns[late] - offsets_ns[early]
    if apart_ns > CLOCKS_APART_AT_MOST_NS:
        first, second = workload.programs[early].source, workload.programs[late].source
        raise InputError(
            f"{second}: begins {apart_ns / NS_PER_S:.0f} s after {first}, and no collective ties them; are they of one run?"
        )


def recorded(workload: Workload) -> Recorded:
    """The timings of every rank as recorded."""
    for program in workload.programs:
        _check(program)
    meetings = recorded_meetings(workload)
    offsets = tuple(p.origin_ns - meetings.origin_ns - meetings.clock_ns[p.rank] for p in workload.programs)
    _check_clocks(workload, offsets)
    depth = max(queue_depth(p) for p in workload.programs)
    cohorts = tuple(
        Cohort(p, (p.rank,), _Extract(p, offset, meetings, depth).timing())
        for p, offset in zip(workload.programs, offsets, strict=True)
    )
    late = tuple(_late(cohort, offset, meetings) for cohort, offset in zip(cohorts, offsets, strict=True))
    return Recorded(cohorts, depth, meetings.origin_ns, offsets, late)


def _late(cohort: Cohort, offset: int, meetings: Meetings) -> Column:
    """Per work, how much later than the last rank with a trace the absent ones came; typical of its place in a step."""
    program, absent = cohort.program, cohort.timing.absent_ns[:, 0, 0]
    late = np.zeros(len(program.works), dtype=np.int64)
    rows = np.flatnonzero((absent > LONG_AGO) & cohort.timing.waits & (program.works.call >= 0))
    for row in rows.tolist():
        spans = meetings.spans.get(key_of(program.collectives[program.works.collective[row]]), {})
        last = max((start for start, _ in spans.values()), default=int(program.works.start_ns[row]) + offset)
        late[row] = max(int(absent[row]) - last, 0)
    by_step = [rows[program.works.step[rows] == step] for step in program.steps]
    if len(by_step) > 1 and len({len(each) for each in by_step}) == 1:
        # The first waits for what ranks did before the window.
        late[np.concatenate(by_step)] = np.tile(np.median(late[np.array(by_step[1:])], axis=0), len(by_step))
    elif len(by_step) == 1:
        late[rows[:1]] = 0  # where ranks that began apart meet
    return late


class _Extract:
    """Takes one program's durations apart."""

    def __init__(self, program: Program, offset_ns: int, meetings: Meetings, depth: int) -> None:
        self.program, self.offset, self.meetings, self.depth = program, offset_ns, meetings, depth
        self.calls, self.works = program.calls, program.works
        self.order = Order.of(program)
        self.thread_calls = [np.flatnonzero(program.calls.thread == thread) for thread in range(len(program.threads))]
        self.awaited_end = self._awaited_ends()
        self.of_graph = inside_graphs(program)
        self.left_ns = self._left()

    def timing(self) -> Timing:
        gap = self._gaps()
        call, back = self._calls()
        latency, spacing, release = self._dispatch(call)
        duration, waits, absent = self._durations()
        return Timing(
            gap_ns=_axes(gap),
            call_ns=_axes(call),
            return_ns=_axes(back),
            latency_ns=_axes(latency),
            spacing_ns=_axes(spacing),
            release_ns=_axes(release),
            duration_ns=_axes(duration),
            waits=waits,
            absent_ns=_axes(absent),
            thread_start_ns=_axes(self._openings(self.thread_calls, self.calls.after, self.calls.start_ns)),
            stream_start_ns=_axes(self._openings(self.order.stream_works, self.works.call, self.works.start_ns)),
        )

    def _left(self) -> Column:
        """Per call, from when on what it launches may start: its end, of a graph sooner where its first work starts sooner.

        Large graphs are handed to the device while it runs their first works; what the host does after that is no part of
        what those wait for, and counts as host work after the call.
        """
        calls, works = self.calls, self.works
        left_ns = calls.end_ns.copy()
        first_ns = np.full(len(calls), np.iinfo(np.int64).max)
        np.minimum.at(first_ns, works.call[self.of_graph], works.start_ns[self.of_graph])
        early = first_ns - DEFAULT_LATENCY_NS < left_ns
        left_ns[early] = np.maximum(first_ns[early] - DEFAULT_LATENCY_NS, calls.start_ns[early])
        return left_ns

    def _gaps(self) -> Column:
        calls, previous = self.calls, _before(self.thread_calls, len(self.calls))
        after = calls.after.astype(np.int64)
        since = np.where(previous >= 0, self.left_ns[previous], calls.start_ns)
        handed = np.where(after >= 0, self.left_ns[after], LONG_AGO)
        first = (previous < 0) & (after >= 0)
        since = np.where(first, handed, np.maximum(since, handed))
        return np.maximum(calls.start_ns - since, 0)

    def _openings(self, lanes: Sequence[Column], cause: npt.NDArray[np.int32], start_ns: Column) -> list[int]:
        """Per lane, when its first row started if nothing within the window caused it, else LONG_AGO."""
        return [int(start_ns[rows[0]]) + self.offset if len(rows) and cause[rows[0]] < 0 else LONG_AGO for rows in lanes]

    def _awaited_ends(self) -> Column:
        """Per call, the recorded end of what a synchronisation waited for, or LONG_AGO."""
        ends = np.full(len(self.calls), LONG_AGO, dtype=np.int64)
        for call, _, work in synchronisations(self.program, self.order):
            if work >= 0:
                ends[call] = max(ends[call], self.works.end_ns[work])
        copies = blocking_copies(self.program)
        ends[list(copies)] = self.works.end_ns[list(copies.values())]
        return ends

    def _calls(self) -> tuple[Column, Column]:
        """The cost of every call when nothing holds it up, and how long a synchronisation takes to return once it may."""
        calls = self.calls
        duration = self.left_ns - calls.start_ns
        cost = duration.copy()
        launching = calls.kind == CallKind.LAUNCH
        blocked_launch = held_up(self.program, self.depth)
        usual = launching & ~blocked_launch
        cost[blocked_launch] = np.minimum(duration, self._typical(duration, usual))[blocked_launch]
        blocked = self.awaited_end > calls.start_ns
        back = np.clip(calls.end_ns - self.awaited_end, 0, None)
        typical = int(np.median(back[blocked])) if blocked.any() else DEFAULT_RETURN_NS
        synchronising = np.isin(calls.kind, (CallKind.STREAM_SYNC, CallKind.EVENT_SYNC, CallKind.DEVICE_SYNC))
        free = synchronising & ~blocked
        unblocked = int(np.median(duration[free])) if free.any() else DEFAULT_RETURN_NS
        cost[synchronising & blocked] = np.minimum(duration, unblocked)[synchronising & blocked]
        copying = calls.kind == CallKind.BLOCKING_COPY
        cost[copying] = np.minimum(duration, self._typical(duration, usual))[copying]
        return cost, np.full(len(calls), typical, dtype=np.int64)

    def _typical(self, duration: Column, usual: npt.NDArray[np.bool_]) -> Column:
        """Per call, the median duration of usual calls of the same kind."""
        typical = np.full(len(duration), DEFAULT_RETURN_NS, dtype=np.int64)
        if usual.any():
            typical[:] = int(np.median(duration[usual]))
        for api in np.unique(self.calls.api):
            same = self.calls.api == api
            if (same & usual).any():
                typical[same] = int(np.median(duration[same & usual]))
        return typical

    def _dispatch(self, cost: Column) -> tuple[Column, Column, Column]:
        """How soon work starts after its launch on an idle stream, after the work before it on a busy one, after a wait."""
        works, calls = self.works, self.calls
        launched = works.call >= 0
        call = np.maximum(works.call, 0)
        copying = launched & (calls.kind[call] == CallKind.BLOCKING_COPY) if len(calls) else launched
        issued = np.where(copying, calls.start_ns[call] + cost[call], self.left_ns[call]) if len(calls) else works.start_ns
        before = _before(self.order.stream_works, len(works))
        previous = np.where(before >= 0, works.end_ns[before], LONG_AGO)
        awaited = np.full(len(works), LONG_AGO, dtype=np.int64)
        for work, source, later in stream_waits(self.program, self.order):
            if not later:
                awaited[work] = max(awaited[work], works.end_ns[source])
        since_launch, since_previous = works.start_ns - issued, works.start_ns - previous
        since_awaited = works.start_ns - awaited
        ready = np.maximum(previous, awaited)
        by_launch = launched & (issued + CAUSE_MARGIN_NS > ready) & (since_launch <= DISPATCH_AT_MOST_NS)
        by_stream = (
            launched & (previous > np.maximum(issued + CAUSE_MARGIN_NS, awaited)) & (since_previous <= DISPATCH_AT_MOST_NS)
        )
        latency = _by_kind(since_launch, by_launch, works.kind, DEFAULT_LATENCY_NS)
        latency[copying] += cost[call[copying]]  # a blocking copy's latency counts from the beginning of its call
        spacing = _by_kind(since_previous, by_stream & ~self.of_graph, works.kind, DEFAULT_SPACING_NS)
        # Inside a graph the device goes from one to the next by itself, at distances that are the graph's own.
        within = self.of_graph & (before >= 0) & (works.call[before] == works.call) & (since_previous <= DISPATCH_AT_MOST_NS)
        spacing[within] = since_previous[within]
        first = self.of_graph & ~within
        if (first & by_stream).any():
            spacing[first] = _mean(since_previous[first & by_stream], DEFAULT_SPACING_NS)
        backlog = ~launched
        spacing[backlog] = np.where(previous[backlog] > LONG_AGO, since_previous[backlog], 0)
        by_wait = launched & (awaited > np.maximum(issued + CAUSE_MARGIN_NS, previous)) & (since_awaited <= DISPATCH_AT_MOST_NS)
        release = _by_kind(since_awaited, by_wait, works.kind, DEFAULT_RELEASE_NS)
        return latency, spacing, release

    def _durations(self) -> tuple[Column, npt.NDArray[np.bool_], Column]:
        works = self.works
        duration = works.end_ns - works.start_ns
        waits = np.zeros(len(works), dtype=bool)
        absent = np.full(len(works), LONG_AGO, dtype=np.int64)
        for row in np.flatnonzero((works.kind == WorkKind.COLLECTIVE) & (works.call >= 0)).tolist():
            moving, waited, peers = self.meetings.of(self.program, row)
            duration[row], waits[row] = moving, waited
            if peers is not None:
                absent[row] = peers + self.offset
        return duration, waits, absent


def inside_graphs(program: Program) -> npt.NDArray[np.bool_]:
    """Per work, whether its call launched others as well: a graph."""
    works = program.works
    launched = works.call >= 0
    if not len(program.calls):
        return np.zeros(len(works), dtype=np.bool_)
    many = np.bincount(works.call[launched], minlength=len(program.calls)) > 1
    return np.asarray(launched & many[np.maximum(works.call, 0)])


def _before(lanes: Sequence[Column], count: int) -> Column:
    """Per row, the row before it on its lane, or -1."""
    previous = np.full(count, -1, dtype=np.int64)
    for rows in lanes:
        previous[rows[1:]] = rows[:-1]
    return previous


def _by_kind(values: Column, usual: npt.NDArray[np.bool_], kind: npt.NDArray[np.int8], default: int) -> Column:
    """The mean of usual values per kind of work, for every row: means, because a step adds them up."""
    typical = np.full(len(values), _mean(values[usual], default), dtype=np.int64)
    for each_kind in np.unique(kind):
        same = kind == each_kind
        if (same & usual).sum() >= 5:
            typical[same] = _mean(values[same & usual], default)
    return typical


def _mean(values: Column, default: int) -> int:
    return round(float(values.mean())) if len(values) else default


def _axes(values: Sequence[int] | Column) -> Nanoseconds:
    return np.ascontiguousarray(values, dtype=np.int64).reshape(-1, 1, 1)


@dataclass(frozen=True)
class Meetings:
    """Per meeting and rank, start and end on the common clock; per rank, how much its clock is ahead."""

    spans: Spans
    clock_ns: Mapping[int, int]
    shortest_ns: Mapping[tuple[str, str, int, int], int]  # (kind, group, bytes in, out) -> least duration seen
    origin_ns: int

    def of(self, program: Program, work: int) -> tuple[int, bool, int | None]:
        """For one collective: how long it moves data, whether it waits for peers, when absent ones arrived (own clock)."""
        collective = program.collectives[program.works.collective[work]]
        own_start, own_end = int(program.works.start_ns[work]), int(program.works.end_ns[work])
        shift = program.origin_ns - self.origin_ns - self.clock_ns[program.rank]
        spans = self.spans.get(key_of(collective), {})
        last = max((s for s, _ in spans.values()), default=own_start + shift)
        missing = [r for r in collective.ranks if r not in spans]
        if missing or not collective.ranks:
            moving = max(min(own_end - own_start, self.shortest_ns[_message(collective)]), 0)
            # A rank that has a trace without this collective would never come: its window began later or ended earlier.
            waits = not any(rank in self.clock_ns for rank in missing)
            return moving, waits, own_end - moving
        if own_end + shift <= last:
            # It left before the last came, as the root of a broadcast may. Whom it waited for is not known: no waiting is kept.
            came = max(start for start, _ in spans.values() if start < own_end + shift or start == own_start + shift)
            return own_end + shift - came, False, None
        return own_end + shift - last, True, None


def key_of(collective: Collective) -> MeetingKey:
    """What ranks must agree on to meet."""
    return collective.group, collective.ranks, collective.sequence


def _message(collective: Collective) -> tuple[str, str, int, int]:
    return collective.kind, collective.group, collective.bytes_in, collective.bytes_out


def recorded_meetings(workload: Workload) -> Meetings:
    """Every meeting of a recorded workload."""
    origin = min(p.origin_ns for p in workload.programs)
    spans: dict[MeetingKey, dict[int, tuple[int, int]]] = {}
    telling: set[MeetingKey] = set()
    shortest: dict[tuple[str, str, int, int], int] = {}
    for program in workload.programs:
        shift = program.origin_ns - origin
        works = program.works
        for row in np.flatnonzero((works.collective >= 0) & (works.call >= 0)).tolist():
            collective = program.collectives[works.collective[row]]
            start, end = int(works.start_ns[row]), int(works.end_ns[row])
            spans.setdefault(key_of(collective), {})[program.rank] = (start + shift, end + shift)
            if collective.kind in _ALL_WAIT_FOR_ALL:
                telling.add(key_of(collective))
            message = _message(collective)
            shortest[message] = min(shortest.get(message, end - start), end - start)
    clock = clock_offsets({key: spans[key] for key in spans if key in telling or not telling}, workload.ranks)
    aligned = {
        key: {rank: (start - clock[rank], end - clock[rank]) for rank, (start, end) in by_rank.items()}
        for key, by_rank in spans.items()
    }
    return Meetings(aligned, clock, shortest, origin)


def clock_offsets(spans: Spans, ranks: tuple[int, ...]) -> dict[int, int]:
    """How far each rank's clock is ahead, from the ends of collectives; all 0 where the clocks agree well enough."""
    ahead = _ahead(spans)
    left_early = [min(e for _, e in by_rank.values()) < max(s for s, _ in by_rank.values()) for by_rank in spans.values()]
    agree = sum(left_early) <= IMPOSSIBLE_SHARE * len(left_early)
    if agree and all(abs(value) <= CLOCK_TRUSTED_NS for value in ahead.values()):
        return dict.fromkeys(ranks, 0)
    return {rank: round(ahead.get(rank, 0)) for rank in ranks}


def _ahead(spans: Spans) -> dict[int, float]:
    """Per rank, the median distance of its ends to those of its group; groups that share ranks are tied through them."""
    ends: dict[tuple[int, ...], list[list[int]]] = {}
    for by_rank in spans.values():
        members = tuple(sorted(by_rank))
        ends.setdefault(members, []).append([by_rank[rank][1] for rank in members])
    groups = sorted((members for members in ends if len(members) > 1), key=lambda members: (-len(members), members))
    known: dict[int, float] = {}
    while groups:
        members = next((group for group in groups if known.keys() & group), groups[0])
        groups.remove(members)
        table = np.array(ends[members], dtype=np.float64)
        within = dict(zip(members, np.median(table - np.median(table, axis=1, keepdims=True), axis=0).tolist(), strict=True))
        shared = [known[rank] - within[rank] for rank in members if rank in known]
        shift = float(np.median(shared)) if shared else 0.0
        known = {**{rank: value + shift for rank, value in within.items()}, **known}
    return known
