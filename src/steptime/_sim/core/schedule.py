"""Finds an order in which all lanes of all ranks can be played: stretches of lanes, returns of blocking copies, meetings."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from steptime._sim.core.graph import LaneGraph, lane_graph, structure
from steptime._sim.core.lanes import Stretch, stretch_of
from steptime._sim.core.meetings import Meeting, Party, RankBlock, Stuck, deadlock, divide, meetings, whole_cohorts
from steptime._sim.core.timing import Cohort

# Up to this many stuck ranks are taken one by one even where that cannot help, so that the error names the right ones.
NAMED_RANKS = 256
# Schedules that are kept: fixed points, samples and variants of a step play alike programs with other durations.
_MOST_KEPT = 8
# Beyond so many ranks arrays are wide enough for each cohort to be played by itself.
_MOST_STACKED_RANKS = 64


@dataclass(frozen=True, slots=True)
class Play:
    """Play a stretch of a lane of one block."""

    block: int
    stretch: Stretch


@dataclass(frozen=True, slots=True)
class Return:
    """A blocking copy has finished: its call returns. All three are rows of the block's graph."""

    block: int
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

    blocks: tuple[RankBlock, ...]
    graphs: tuple[LaneGraph, ...]  # per block
    meetings: tuple[Meeting, ...]
    steps: tuple[Step, ...]


_kept: dict[_Key, Schedule] = {}


def find_schedule(cohorts: Sequence[Cohort], *, queue_depth: int | None, repeated: bool = False) -> Schedule:
    """The order in which to play these programs on these ranks, found once: it does not depend on durations."""
    key = (tuple(map(_meeting_structure, cohorts)), queue_depth, repeated)
    if key not in _kept:
        schedule = _ordered(cohorts, queue_depth=queue_depth, repeated=repeated)
        while len(_kept) >= _MOST_KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[key] = schedule
    return _kept[key]


def _meeting_structure(cohort: Cohort) -> _Key:
    """What the order depends on."""
    program = cohort.program
    met = (program.works.collective.tobytes(), program.collectives, cohort.timing.waits.tobytes())
    return structure(program), *met, cohort.ranks, cohort.members


def _ordered(cohorts: Sequence[Cohort], *, queue_depth: int | None, repeated: bool) -> Schedule:
    """Order everything, or raise `DeadlockError`.

    Ranks of one cohort advance together as long as that works. Equal stages of a pipeline wait for each other, which looks
    like a deadlock until they are taken apart: so cohorts that get stuck are divided, down to single ranks, before giving up.
    """
    blocks = whole_cohorts(cohorts)
    while True:
        attempt = _Attempt(cohorts, blocks, queue_depth, repeated)
        stuck = attempt.run()
        if not stuck:
            return Schedule(tuple(blocks), tuple(attempt.graphs), attempt.meetings, tuple(attempt.steps))
        numbers = {lane.block for lane in stuck}
        ranks = sum(len(blocks[number].ranks) for number in numbers)
        hopeless = ranks > NAMED_RANKS and any(lane.meeting is not None and lane.meeting.missing for lane in stuck)
        if hopeless or ranks == len(numbers):
            raise deadlock(cohorts, blocks, stuck)
        blocks = divide(cohorts, blocks, numbers)


class _Attempt:
    """One try to order everything for a given division into blocks."""

    def __init__(self, cohorts: Sequence[Cohort], blocks: Sequence[RankBlock], queue_depth: int | None, repeated: bool) -> None:
        programs = [cohorts[block.cohort].program for block in blocks]
        self.graphs = [lane_graph(program, queue_depth=queue_depth, repeated=repeated) for program in programs]
        self.meetings = meetings(cohorts, blocks)
        self.at = {(p.block, int(self.graphs[p.block].work_row[p.work])): (m, p) for m in self.meetings for p in m.parties}
        self.expected = {id(m): len(m.parties) for m in self.meetings}
        self.progress = [_Progress(graph) for graph in self.graphs]
        self.ready = deque((block, lane) for block, graph in enumerate(self.graphs) for lane in range(graph.lanes))
        self.steps: list[Step] = []

    def run(self) -> list[Stuck]:
        """Play as far as possible; what could not be played."""
        while self.ready:
            self._advance(*self.ready.popleft())
        return [
            Stuck(
                block, lane, progress.graph, row, *self.at.get((block, row if progress.half_done(lane) else -1), (None, None))
            )
            for block, progress in enumerate(self.progress)
            for lane, (row, stop) in enumerate(zip(progress.next, progress.stop, strict=True))
            if row < stop
        ]

    def _advance(self, block: int, lane: int) -> None:
        progress = self.progress[block]
        first = progress.next[lane]
        if progress.half_done(lane):
            self._return(block, lane, first)
            return
        half = progress.advance(lane)
        stop = progress.next[lane] + (half >= 0)
        if stop > first:
            self.steps.append(Play(block, stretch_of(progress.graph, lane, first, stop, half)))
            self._wake(block)
        if half >= 0:
            row = progress.next[lane]
            if row in progress.graph.copied:
                self._return(block, lane, row)
            else:
                self._arrive(block, row)

    def _return(self, block: int, lane: int, row: int) -> None:
        progress = self.progress[block]
        half, copy = progress.graph.half[row], progress.graph.copied[row]
        if not progress.done[copy]:
            progress.waiting.setdefault(copy, []).append(lane)
            return
        self.steps.append(Return(block, row, half, copy))
        self._finish(block, row)

    def _arrive(self, block: int, row: int) -> None:
        meeting, party = self.at[block, row]
        if not party.waits:
            self._depart(Depart(meeting, (party,), alone=True))
        self.expected[id(meeting)] -= 1
        waiting = tuple(each for each in meeting.parties if each.waits)
        if self.expected[id(meeting)] == 0 and not meeting.missing and waiting:
            self._depart(Depart(meeting, waiting, alone=False))

    def _depart(self, step: Depart) -> None:
        self.steps.append(step)
        for party in step.leaving:
            self._finish(party.block, int(self.graphs[party.block].work_row[party.work]))

    def _finish(self, block: int, row: int) -> None:
        """The second half of a node is done: its lane goes on, and so do those that wait for it."""
        progress = self.progress[block]
        lane = progress.lane_of(row)
        progress.done[row] = 1
        progress.next[lane] = row + 1
        self.ready.append((block, lane))
        self._wake(block)

    def _wake(self, block: int) -> None:
        progress = self.progress[block]
        for row in [row for row in progress.waiting if progress.done[row]]:
            self.ready.extend((block, lane) for lane in progress.waiting.pop(row))


class _Progress:
    """How far the lanes of one block have come."""

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


@lru_cache(maxsize=_MOST_KEPT)
def stacks(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """The cohorts of a schedule, those of one graph together.

    Ranks that issue alike are played together although their durations differ: arrays of all, each stretch once.
    """
    by_graph: dict[LaneGraph, dict[int, int]] = {}
    for block, graph in zip(schedule.blocks, schedule.graphs, strict=True):
        ranks = by_graph.setdefault(graph, {})
        ranks[block.cohort] = max(ranks.get(block.cohort, 0), block.high)
    result: list[tuple[int, ...]] = []
    for ranks in by_graph.values():
        result += [tuple(ranks)] if sum(ranks.values()) <= _MOST_STACKED_RANKS else [(cohort,) for cohort in ranks]
    return tuple(result)


@lru_cache(maxsize=_MOST_KEPT)
def fused(schedule: Schedule) -> tuple[Step, ...]:
    """The steps of a schedule, with those that all blocks of a stack do alike done once.

    Only meetings join blocks: steps of one block can be moved past those of others, and past a meeting whose arrivals are not
    among them. A step for a stack has the number of the stack, counted on from the blocks.
    """
    members = [[number for number, block in enumerate(schedule.blocks) if block.cohort in stack] for stack in stacks(schedule)]
    waiting: list[list[Play | Return]] = [[] for _ in schedule.blocks]
    result: list[Step] = []
    for step in schedule.steps:
        if not isinstance(step, Depart):
            waiting[step.block].append(step)
            continue
        arrivals = {(party.block, schedule.graphs[party.block].arrival(party.work)) for party in step.meeting.parties}
        for number, blocks in enumerate(members):
            result += _alike(waiting, blocks, len(schedule.blocks) + number)
            rest = [each for block in blocks for each in waiting[block]]
            if any(isinstance(each, Play) and (each.block, each.stretch.half) in arrivals for each in rest):
                result += rest
                for block in blocks:
                    waiting[block].clear()
        result.append(step)
    for number, blocks in enumerate(members):
        result += _alike(waiting, blocks, len(schedule.blocks) + number)
        result += [each for block in blocks for each in waiting[block]]
    return tuple(result)


def _alike(waiting: Sequence[list[Play | Return]], blocks: Sequence[int], stack: int) -> Iterator[Step]:
    """Takes what all these blocks do next from what waits, as steps of their stack."""
    while len(blocks) > 1 and all(waiting[block] for block in blocks):
        steps = [replace(waiting[block][0], block=stack) for block in blocks]
        if any(step != steps[0] for step in steps[1:]):
            return
        for block in blocks:
            waiting[block].pop(0)
        yield steps[0]
