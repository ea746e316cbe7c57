"""Why the end is when it is: the chain of calls, works and waits that leads up to it, and that chain summed up."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from steptime._program.host_code import CALLING_NS, HOST_CODE, outside_ops
from steptime._program.program import Program, WorkKind
from steptime._sim.core.graph import FROM_START, EdgeKind, LaneGraph, lane_graph
from steptime._sim.core.meetings import Meeting, Party, meetings, whole_cohorts
from steptime._sim.core.timing import CohortTimeline, Nanoseconds, Timeline
from steptime._units import ms
from steptime._values import value_class

Reason = Literal[
    "host",  # host work: the gap before a call and the call
    "device",  # a kernel, copy or memset runs
    "collective",  # a collective moves data
    "hand-over",  # a thread takes over from another
    "queue full",  # a launch waits for a slot
    "sync",  # a synchronising call returns after what it waited for
    "launch latency",  # from the launching call to the start of the work
    "stream order",  # from the work before in the stream
    "stream wait",  # a stream waits for work on another
    "queue order",  # behind the start of work of another stream in the same hardware queue
    "collective wait",  # on to the rank that arrives last
    "absent peer",  # waiting for a rank without a program, which arrives last
    "earlier window",  # what decided lies before the window
]

_EDGE_REASONS: dict[int, Reason] = {
    EdgeKind.LAUNCH: "launch latency",
    EdgeKind.HAND_OVER: "hand-over",
    EdgeKind.SYNC: "sync",
    EdgeKind.QUEUE: "queue full",
    EdgeKind.WAIT: "stream wait",
    EdgeKind.START: "queue order",
    EdgeKind.ARRIVAL: "queue order",
    EdgeKind.QUEUE_ARRIVAL: "queue full",
}


_ALL_BUT_SYNC = tuple(kind for kind in EdgeKind if kind != EdgeKind.SYNC)


@value_class
class PathSegment:
    """A piece of the critical path. `row` is in `Program.calls` (host) or `Program.works` (stream), -1 before the window.

    Segments of no length mark where the path changes lanes or ranks. A work that starts before its launching call returns
    shares one segment with its launch.
    """

    rank: int
    lane: Literal["host", "stream"]
    row: int
    start_ns: int
    end_ns: int
    reason: Reason


@value_class
class _PathNode:
    """A row of a cohort's graph, on one of its ranks."""

    cohort: int
    rank: int
    row: int


def critical_path(timeline: Timeline, *, scenario: int = 0) -> tuple[PathSegment, ...]:
    """The critical path of one scenario, from the opening of the window to the end of everything."""
    found = _FOUND.setdefault(timeline, {})
    if scenario not in found:
        found[scenario] = _walked(timeline, scenario)
    return found[scenario]


# Per timeline, as long as it lives: what an answer says of its path and what a page draws of it are one walk.
_FOUND: WeakKeyDictionary[Timeline, dict[int, tuple[PathSegment, ...]]] = WeakKeyDictionary()


def same_path(timeline: Timeline, of: Timeline) -> Timeline:
    """A timeline with more ranks that do as those of another do, whose critical path is then its own."""
    _FOUND[timeline] = _FOUND.get(of, {})
    return timeline


def _walked(timeline: Timeline, scenario: int) -> tuple[PathSegment, ...]:
    if any(len(t.call_end_ns) != len(t.call_start_ns) for t in timeline.cohorts):
        raise ValueError('a critical path needs starts: simulate with keep="all"')
    walk = _WalkBack(timeline, scenario)
    node: _PathNode | None = walk.latest()
    segments: list[PathSegment] = []
    while node is not None:
        result, node = walk.back(node)
        segments.extend(result)
    return tuple(reversed(segments))


_Back = tuple[list[PathSegment], _PathNode | None]


class _WalkBack:
    """Walks back through one scenario of a timeline, always to what attained the maximum."""

    def __init__(self, timeline: Timeline, scenario: int) -> None:
        cohorts = [t.cohort for t in timeline.cohorts]
        self.timelines = timeline.cohorts
        self.scenario = scenario
        self.graphs = [lane_graph(cohort.program, queue_depth=timeline.queue_depth) for cohort in cohorts]
        result = meetings(cohorts, whole_cohorts(cohorts))
        self.meeting_of: dict[tuple[int, int], tuple[Meeting, Party]] = {
            (p.block, p.work): (m, p) for m in result for p in m.parties
        }
        self.whole = [{half: row for row, half in graph.half.items()} for graph in self.graphs]
        # Columns of graphs as Python has them: one value at a time is read from lists in a fraction of the time.
        self.opening = [set(graph.opening.tolist()) for graph in self.graphs]
        self.stop: list[list[int]] = [graph.stop.tolist() for graph in self.graphs]
        self.table_row: list[list[int]] = [graph.table_row.tolist() for graph in self.graphs]
        self.host_rows = [int(graph.stop[graph.threads - 1]) if graph.threads else 0 for graph in self.graphs]

    def latest(self) -> _PathNode | None:
        """What ends last."""
        best: tuple[int, _PathNode] | None = None
        for cohort, (timeline, graph) in enumerate(zip(self.timelines, self.graphs, strict=True)):
            for ends, rows in ((timeline.work_end_ns, graph.work_row), (timeline.call_end_ns, graph.call_row)):
                if not len(rows):
                    continue
                row, rank = np.unravel_index(int(ends[:, :, self.scenario].argmax()), ends.shape[:2])
                end = int(ends[row, rank, self.scenario])
                if best is None or end > best[0]:
                    best = (end, _PathNode(cohort, int(rank), int(rows[row])))
        return best[1] if best else None

    def back(self, node: _PathNode) -> _Back:
        """The segments that end here, latest first, and where the path comes from."""
        graph = self.graphs[node.cohort]
        whole = self.whole[node.cohort].get(node.row)
        if whole is not None:
            return self._begin(node, whole, self._end(node))
        if node.row in self.opening[node.cohort]:
            return [], None
        if node.row in graph.copied:
            return self._copy(node)
        if node.row in graph.half:
            return self._collective(node)
        end = self._end(node)
        start = end - self._own(node)
        if self._host(node):
            synced = self._edge(node, node.row, end, (EdgeKind.SYNC,))
            if synced is not None:
                return [self._segment(node, self._end(synced[0]), end, "sync")], synced[0]
        return self._after_own(node, start, end, "host" if self._host(node) else "device")

    def _after_own(self, node: _PathNode, start: int, end: int, reason: Reason) -> _Back:
        """The node's own time, and before it what let it begin."""
        before, source = self._begin(node, node.row, start)
        if before and before[0].end_ns < before[0].start_ns:
            return [self._segment(node, before[0].start_ns, end, before[0].reason), *before[1:]], source
        itself = [self._segment(node, start, end, reason)] if end != start else []
        return itself + before, source

    def _copy(self, node: _PathNode) -> _Back:
        graph, end = self.graphs[node.cohort], self._end(node)
        half = _PathNode(node.cohort, node.rank, graph.half[node.row])
        begin = self._end(half)
        if begin + self._own(node) == end:
            return [self._segment(node, begin, end, "host")], half
        copy = _PathNode(node.cohort, node.rank, graph.copied[node.row])
        return [self._segment(node, self._end(copy), end, "sync")], copy

    def _collective(self, node: _PathNode) -> _Back:
        end, half = self._end(node), self.graphs[node.cohort].half[node.row]
        moving = end - self._own(node)
        itself = self._segment(node, moving, end, "collective")
        arrived = _PathNode(node.cohort, node.rank, half)
        if self._end(arrived) == moving:
            return [itself], arrived
        for other in self._peers(node):
            if self._end(other) == moving:
                return [itself, self._segment(node, moving, moving, "collective wait")], other
        # What the absent peer did before is not known: the path goes on with what led this rank here.
        return [itself, self._segment(node, self._end(arrived), moving, "absent peer")], arrived

    def _peers(self, node: _PathNode) -> Iterator[_PathNode]:
        """Arrivals of the others at a collective, in order of cohort and rank."""
        work = int(self.graphs[node.cohort].table_row[node.row])
        meeting, mine = self.meeting_of[node.cohort, work]
        group = 0 if mine.group is None else int(mine.group[node.rank])
        for party in meeting.parties:
            graph = self.graphs[party.block]
            half = graph.half[int(graph.work_row[party.work])]
            ranks = len(self.timelines[party.block].cohort.ranks)
            for rank in range(ranks) if party.group is None else np.flatnonzero(party.group == group).tolist():
                yield _PathNode(party.block, rank, half)

    def _begin(self, node: _PathNode, row: int, start: int) -> _Back:
        """What let the node at `row` begin at `start`: the node before it, or an edge."""
        timing = self.timelines[node.cohort].cohort.timing
        begun, previous = _PathNode(node.cohort, node.rank, row), _PathNode(node.cohort, node.rank, row - 1)
        before = self._at(timing.gap_ns if self._host(begun) else timing.spacing_ns, begun)
        lags = {before, 0} if not self._host(begun) and row - 1 in self.opening[node.cohort] else {before}
        at = self._end(previous)
        if any(at + lag == start for lag in lags):
            reason: Reason = "host" if self._host(begun) else "stream order"
            return [self._segment(begun, at, start, reason)] if at != start else [], previous
        result = self._edge(begun, row, start, _ALL_BUT_SYNC)
        if result is None:
            return [self._segment(begun, start, start, "earlier window")], None
        source, kind = result
        reason = _EDGE_REASONS[kind]
        if kind in FROM_START:
            further, source_before = self._begin(source, source.row, start)
            return [self._segment(begun, start, start, reason), *further], source_before
        return [self._segment(begun, self._end(source), start, reason)], source

    def _edge(self, node: _PathNode, row: int, reached: int, kinds: tuple[EdgeKind, ...]) -> tuple[_PathNode, EdgeKind] | None:
        """The first edge of these kinds that explains the time `reached`: its source and kind."""
        graph, timing = self.graphs[node.cohort], self.timelines[node.cohort].cohort.timing
        lags = {
            EdgeKind.LAUNCH: timing.latency_ns,
            EdgeKind.WAIT: timing.release_ns,
            EdgeKind.HAND_OVER: timing.gap_ns,
            EdgeKind.SYNC: timing.return_ns,
        }
        for edge in range(int(graph.edge_start[row]), int(graph.edge_start[row + 1])):
            kind = EdgeKind(int(graph.edge_kind[edge]))
            source = _PathNode(node.cohort, node.rank, int(graph.edge_source[edge]))
            lag = -self._own(source) if kind in FROM_START else self._at(lags[kind], node) if kind in lags else 0
            if kind in kinds and self._end(source) + lag == reached:
                return source, kind
            later = self._later(source, reached - lag) if kind == EdgeKind.WAIT and kind in kinds else None
            if later is not None:
                return later, kind
        return None

    def _later(self, node: _PathNode, end: int) -> _PathNode | None:
        """What comes behind in the lane and ends then: sections of a step wait for all that a stream was given before them."""
        stop = self.stop[node.cohort]
        rows = range(node.row + 1, stop[bisect_right(stop, node.row)])
        place = bisect_left(rows, end, key=lambda row: self._end(_PathNode(node.cohort, node.rank, row)))
        found = None if place == len(rows) else _PathNode(node.cohort, node.rank, rows[place])
        return found if found is not None and self._end(found) == end else None

    def _end(self, node: _PathNode) -> int:
        """When the node, half or opening at a row is over."""
        timeline, graph = self.timelines[node.cohort], self.graphs[node.cohort]
        whole = self.whole[node.cohort].get(node.row)
        if whole is not None:
            return self._half_end(node, timeline, graph, whole)
        lane = bisect_right(self.stop[node.cohort], node.row)
        if node.row in self.opening[node.cohort]:
            opened = timeline.cohort.timing.thread_start_ns if lane < graph.threads else timeline.cohort.timing.stream_start_ns
            rank, scenario = self._pick(opened, node)
            return int(opened[lane if lane < graph.threads else lane - graph.threads, rank, scenario])
        ends = timeline.call_end_ns if lane < graph.threads else timeline.work_end_ns
        return int(ends[self.table_row[node.cohort][node.row], node.rank, self.scenario])

    def _half_end(self, node: _PathNode, timeline: CohortTimeline, graph: LaneGraph, whole: int) -> int:
        row = int(graph.table_row[whole])
        if whole not in graph.copied:
            return int(timeline.work_start_ns[row, node.rank, self.scenario])
        sources = range(int(graph.edge_start[whole]), int(graph.edge_start[whole + 1]))
        freed = [
            self._freed(node, edge) for edge in sources if graph.edge_kind[edge] in (EdgeKind.QUEUE, EdgeKind.QUEUE_ARRIVAL)
        ]
        return max([int(timeline.call_start_ns[row, node.rank, self.scenario]), *freed])

    def _freed(self, node: _PathNode, edge: int) -> int:
        """When the place in the queue that an edge tells of became free."""
        graph = self.graphs[node.cohort]
        source = _PathNode(node.cohort, node.rank, int(graph.edge_source[edge]))
        return self._end(source) - (self._own(source) if graph.edge_kind[edge] == EdgeKind.QUEUE else 0)

    def _own(self, node: _PathNode) -> int:
        timing = self.timelines[node.cohort].cohort.timing
        return self._at(timing.call_ns if self._host(node) else timing.duration_ns, node)

    def _at(self, values: Nanoseconds, node: _PathNode) -> int:
        rank, scenario = self._pick(values, node)
        return int(values[self.table_row[node.cohort][node.row], rank, scenario])

    def _pick(self, values: Nanoseconds, node: _PathNode) -> tuple[int, int]:
        return (node.rank if values.shape[1] > 1 else 0), (self.scenario if values.shape[2] > 1 else 0)

    def _host(self, node: _PathNode) -> bool:
        return self.whole[node.cohort].get(node.row, node.row) < self.host_rows[node.cohort]

    def _segment(self, node: _PathNode, start: int, end: int, reason: Reason) -> PathSegment:
        row = self.table_row[node.cohort][self.whole[node.cohort].get(node.row, node.row)]
        rank = self.timelines[node.cohort].cohort.ranks[node.rank]
        return PathSegment(rank, "host" if self._host(node) else "stream", row, start, end, reason)


# As many names as a person reads.
TOP = 10

_TEMPLATE_OR_ARGUMENTS = re.compile(r"[<(].*$", re.DOTALL)
_Key = TypeVar("_Key", str, int)
_ANONYMOUS = "(anonymous namespace)::"
_MOST = 0.5


@dataclass(frozen=True)
class PathShare:
    """Time of one kind on the critical path."""

    kind: str  # a reason of `critical_path`: host, device, collective, launch latency, ...
    ms: float  # per step
    share: float  # of the path


@dataclass(frozen=True)
class PathEntry:
    """Time on the critical path under one name: an op, a kernel, a collective."""

    name: str
    kind: str
    ms: float  # per step
    share: float  # of the path
    count: int  # ops, collectives or kernels of that name on it per step, rounded up


@dataclass(frozen=True)
class PathRank:
    """Time of one rank on the critical path."""

    rank: int
    ms: float  # per step
    share: float  # of the path


@dataclass(frozen=True)
class PathSummary:
    """The critical path, summed up."""

    length_ms: float  # per step
    kinds: tuple[PathShare, ...]
    ranks: tuple[PathRank, ...]
    top: tuple[PathEntry, ...]

    def share(self, *kinds: str) -> float:
        """The share of the path that is of these kinds."""
        return sum(k.share for k in self.kinds if k.kind in kinds)


def summarise_path(path: Sequence[PathSegment], timeline: Timeline, steps: int, since_ns: int) -> PathSummary:
    """Sum up a critical path over the steps of its window; what lies before `since_ns` belongs to the window before."""
    programs = {rank: t.cohort.program for t in timeline.cohorts for rank in t.cohort.ranks}
    kinds: dict[str, int] = {}
    ranks: dict[int, int] = {}
    names: dict[tuple[str, str], Counter[tuple[int, ...]]] = {}
    for segment in path:
        length = segment.end_ns - max(segment.start_ns, since_ns)
        if length <= 0:
            continue
        kinds[segment.reason] = kinds.get(segment.reason, 0) + length
        ranks[segment.rank] = ranks.get(segment.rank, 0) + length
        program = programs[segment.rank]
        entry = names.setdefault((name_of(segment, program), segment.reason), Counter())
        entry[segment.rank, *_occurrence(segment, program)] += length
    total = sum(kinds.values()) or 1
    top = sorted(((name, each.total(), len(each)) for name, each in names.items()), key=lambda n: (-n[1], n[0]))[:TOP]
    return PathSummary(
        ms(sum(kinds.values())) / steps,
        tuple(PathShare(kind, ms(length) / steps, length / total) for kind, length in _largest_first(kinds)),
        tuple(PathRank(rank, ms(length) / steps, length / total) for rank, length in _largest_first(ranks)),
        tuple(
            PathEntry(name, kind, ms(length) / steps, length / total, -(-count // steps)) for (name, kind), length, count in top
        ),
    )


def _largest_first(lengths: dict[_Key, int]) -> list[tuple[_Key, int]]:
    return sorted(lengths.items(), key=lambda item: (-item[1], str(item[0])))


def _occurrence(segment: PathSegment, program: Program) -> tuple[int, int]:
    """What tells an op from others of its name: a run of calls within it; or the row of a call or a work without an op."""
    works, calls = program.works, program.calls
    call = segment.row if segment.lane == "host" or segment.row < 0 else int(works.call[segment.row])
    if call < 0 or calls.op[call] < 0 or (segment.lane == "stream" and works.kind[segment.row] == WorkKind.COLLECTIVE):
        return segment.lane == "host", segment.row
    runs = program.derived.get(_occurrence)
    if runs is None:
        runs = program.derived[_occurrence] = np.cumsum(np.diff(calls.op, prepend=-1) != 0)
    return 2, int(runs[call])


def name_of(segment: PathSegment, program: Program) -> str:
    """What a person would call a segment: the op around it, the collective it is, or the kernel."""
    if segment.row < 0:
        return "before the window"
    if segment.lane == "host":
        if segment.end_ns - segment.start_ns > CALLING_NS and outside_ops(program)[segment.row] > _MOST:
            return HOST_CODE
        return _op_name(program, int(program.calls.op[segment.row])) or program.names[int(program.calls.api[segment.row])]
    works = program.works
    if works.kind[segment.row] == WorkKind.COLLECTIVE and works.collective[segment.row] >= 0:
        return program.collectives[int(works.collective[segment.row])].kind
    call = int(works.call[segment.row])
    op = _op_name(program, int(program.calls.op[call])) if call >= 0 else ""
    return op or short_kernel_name(program.names[int(works.name[segment.row])])


def short_kernel_name(name: str) -> str:
    """A kernel's name without return type, namespaces, template and arguments."""
    plain = name.removeprefix("void ").replace(_ANONYMOUS, "")
    plain = _TEMPLATE_OR_ARGUMENTS.sub("", plain).strip()
    return plain.rsplit("::", 1)[-1] or name


def _op_name(program: Program, op: int) -> str:
    return program.names[int(program.ops.name[op])] if op >= 0 else ""
