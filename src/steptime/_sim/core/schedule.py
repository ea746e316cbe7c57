"""Finds an order in which all lanes of all ranks can be played: stretches of lanes, returns of blocking copies, meetings."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from steptime._sim.core.compile import LaneGraph, lane_graph, structure
from steptime._sim.core.deadlock import Stuck, deadlock
from steptime._sim.core.division import divide
from steptime._sim.core.lanes import Stretch, stretch
from steptime._sim.core.meetings import Meeting, Part, Party, meetings
from steptime._sim.core.timing import Cohort

# Up to this many stuck ranks are taken one by one even where that cannot help, so that the error names the right ones.
NAMED_RANKS = 256


@dataclass(frozen=True, slots=True)
class Play:
    """Play a stretch of a lane of one part."""

    part: int
    stretch: Stretch


@dataclass(frozen=True, slots=True)
class Return:
    """A blocking copy has finished: its call returns. All three are rows of the part's graph."""

    part: int
    call: int
    half: int
    copy: int


@dataclass(frozen=True, slots=True)
class Depart:
    """Everybody at a meeting has arrived: these parties go on."""

    meeting: Meeting
    leaving: tuple[Party, ...]
    alone: bool  # without looking at the others


Step = Play | Return | Depart
_Key = tuple[Hashable, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The order in which to play everything."""

    parts: tuple[Part, ...]
    graphs: tuple[LaneGraph, ...]  # per part
    meetings: tuple[Meeting, ...]
    steps: tuple[Step, ...]


# Plans that are kept: fixed points, samples and variants of a step play alike programs with other durations.
_MOST_KEPT = 8
_kept: dict[_Key, Schedule] = {}


def schedule(cohorts: Sequence[Cohort], *, queue_depth: int | None, repeated: bool = False) -> Schedule:
    """The order in which to play these programs on these ranks, found once; durations have no part in it."""
    key = (tuple(map(_meeting_structure, cohorts)), queue_depth, repeated)
    if key not in _kept:
        plan = _schedule(cohorts, queue_depth=queue_depth, repeated=repeated)
        while len(_kept) >= _MOST_KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[key] = plan
    return _kept[key]


def _meeting_structure(cohort: Cohort) -> _Key:
    """What the order depends on."""
    program = cohort.program
    met = (program.works.collective.tobytes(), program.collectives, cohort.timing.waits.tobytes())
    return structure(program), *met, cohort.ranks, cohort.members


def _schedule(cohorts: Sequence[Cohort], *, queue_depth: int | None, repeated: bool) -> Schedule:
    """Order everything, or raise `DeadlockError`.

    Ranks of one cohort advance together as long as that works. Equal stages of a pipeline wait for each other, which looks
    like a deadlock until they are taken apart: so cohorts that get stuck are divided, down to single ranks, before giving up.
    """
    parts = [Part(number, 0, len(cohort.ranks)) for number, cohort in enumerate(cohorts)]
    while True:
        attempt = _Attempt(cohorts, parts, queue_depth, repeated)
        stuck = attempt.run()
        if not stuck:
            return Schedule(tuple(parts), tuple(attempt.graphs), attempt.meetings, tuple(attempt.steps))
        names = {each.part for each in stuck}
        hopeless = any(each.meeting is not None and each.meeting.missing for each in stuck)
        hopeless &= sum(parts[part].high - parts[part].low for part in names) > NAMED_RANKS
        if hopeless or all(parts[part].high - parts[part].low == 1 for part in names):
            raise deadlock(cohorts, parts, stuck)
        parts = divide(cohorts, parts, names)


class _Attempt:
    """One try to order everything for a given division into parts."""

    def __init__(self, cohorts: Sequence[Cohort], parts: Sequence[Part], queue_depth: int | None, repeated: bool) -> None:
        programs = [cohorts[part.cohort].program for part in parts]
        self.graphs = [lane_graph(program, queue_depth=queue_depth, repeated=repeated) for program in programs]
        self.meetings = meetings(cohorts, parts)
        self.at = {(p.part, int(self.graphs[p.part].work_row[p.work])): (m, p) for m in self.meetings for p in m.parties}
        self.expected = {id(m): len(m.parties) for m in self.meetings}
        self.lanes = [_Progress(graph) for graph in self.graphs]
        self.ready = deque((part, lane) for part, graph in enumerate(self.graphs) for lane in range(graph.lanes))
        self.steps: list[Step] = []

    def run(self) -> list[Stuck]:
        """Play as far as possible; what could not be played."""
        while self.ready:
            self._advance(*self.ready.popleft())
        return [
            Stuck(part, lane, progress.graph, progress.next[lane], *self._meeting_of(part, progress, lane))
            for part, progress in enumerate(self.lanes)
            for lane in range(progress.graph.lanes)
            if progress.next[lane] < progress.stop[lane]
        ]

    def _meeting_of(self, part: int, progress: _Progress, lane: int) -> tuple[Meeting | None, Party | None]:
        return self.at.get((part, progress.next[lane]), (None, None)) if progress.half_done(lane) else (None, None)

    def _advance(self, part: int, lane: int) -> None:
        progress = self.lanes[part]
        first = progress.next[lane]
        if progress.half_done(lane):
            self._return(part, lane, first)
            return
        half = progress.advance(lane)
        stop = progress.next[lane] + (half >= 0)
        if stop > first:
            self.steps.append(Play(part, stretch(progress.graph, lane, first, stop, half)))
            self._wake(part)
        if half >= 0:
            row = progress.next[lane]
            if row in progress.graph.copied:
                self._return(part, lane, row)
            else:
                self._arrive(part, row)

    def _return(self, part: int, lane: int, row: int) -> None:
        progress = self.lanes[part]
        half, copy = progress.graph.half[row], progress.graph.copied[row]
        if not progress.done[copy]:
            progress.waiting.setdefault(copy, []).append(lane)
            return
        self.steps.append(Return(part, row, half, copy))
        self._finish(part, row)

    def _arrive(self, part: int, row: int) -> None:
        meeting, party = self.at[part, row]
        if not party.waits:
            self._depart(Depart(meeting, (party,), alone=True))
        self.expected[id(meeting)] -= 1
        waiting = tuple(each for each in meeting.parties if each.waits)
        if self.expected[id(meeting)] == 0 and not meeting.missing and waiting:
            self._depart(Depart(meeting, waiting, alone=False))

    def _depart(self, step: Depart) -> None:
        self.steps.append(step)
        for party in step.leaving:
            self._finish(party.part, int(self.graphs[party.part].work_row[party.work]))

    def _finish(self, part: int, row: int) -> None:
        """The second half of a node is done: its lane goes on, and so do those that wait for it."""
        progress = self.lanes[part]
        lane = progress.lane_of(row)
        progress.done[row] = 1
        progress.next[lane] = row + 1
        self.ready.append((part, lane))
        self._wake(part)

    def _wake(self, part: int) -> None:
        progress = self.lanes[part]
        for row in [row for row in progress.waiting if progress.done[row]]:
            self.ready.extend((part, lane) for lane in progress.waiting.pop(row))


class _Progress:
    """How far the lanes of one part have come."""

    def __init__(self, graph: LaneGraph) -> None:
        self.graph = graph
        self.start = graph.edge_start.tolist()
        self.source = graph.edge_source.tolist()
        self.next = [row + 1 for row in graph.opening.tolist()]
        self.stop = graph.stop.tolist()
        self.done = bytearray(graph.rows)
        for row in [*graph.opening.tolist(), *range(graph.carried_row, graph.rows)]:
            self.done[row] = 1
        self.waiting: dict[int, list[int]] = {}  # row -> lanes that wait for it

    def lane_of(self, row: int) -> int:
        """The lane a row lies in."""
        return next(lane for lane, stop in enumerate(self.stop) if row < stop)

    def half_done(self, lane: int) -> bool:
        """Whether the lane stands between the two halves of a node."""
        half = self.graph.half.get(self.next[lane], -1)
        return half >= 0 and bool(self.done[half])

    def advance(self, lane: int) -> int:
        """Move the lane on over everything whose sources are done; the first half reached, or -1."""
        done, start, source, half = self.done, self.start, self.source, self.graph.half
        row, stop = self.next[lane], self.stop[lane]
        result = -1
        while row < stop:
            blocked = next((s for s in source[start[row] : start[row + 1]] if not done[s]), None)
            if blocked is not None:
                self.waiting.setdefault(blocked, []).append(lane)
                break
            if row in half:
                result = half[row]
                break
            done[row] = 1
            row += 1
        self.next[lane] = row
        if result >= 0:
            done[result] = 1
        return result
