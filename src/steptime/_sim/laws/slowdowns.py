"""Durations that depend on what runs beside: the laws, and a fixed point around the simulation.

How long a work takes depends on what overlaps it, and what overlaps it on how long everything takes. So: play, see at every
moment what runs beside what, give every work the duration that leaves it, play again. After the first round durations move half
of the way. Rounds end when what is wanted and what was played agree, or after `ROUNDS`. Nothing is random, so the same input
gives the same timeline.

`CollectivesBesideKernels`: a rank's collectives and the kernels beside them slow each other, where a fabric's pairs were
measured. A collective holds SMs from its own start, waiting included, so a kernel is slower for the part of its time that one
is there; moving is slower for the part of it that kernels run beside. A host that trains issues work or waits for room to do
so, and keeps one of its rank's cores busy either way.

`CollectivesBesideCollectives`: on sockets a thread of each communicator of a rank moves the data of all its collectives, which
share it evenly while they overlap. Threads of several communicators hardly slow each other while each has a core beside the
host's; where there are fewer cores they and the host take turns. Nothing was measured of other fabrics, on which all are
played as if each were alone.

`KernelsBesideIdleParts`: stages of a pipeline on parts of one GPU wait for each other, and a kernel is faster while other parts
idle: by as much as the kernel models say, which were fitted beside parts that do the same and beside idle ones.

`KernelsBesideKernels`: kernels that a script launches on several streams take turns on the SMs.

`LookupsBesideLookups`: lookups of ranks on shares of one GPU slow each other while they overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from steptime._models.collectives.overlap import ANALYTIC, Overlap, is_persistent
from steptime._models.lookups.contention import MemoryUse
from steptime._program.program import WorkKind
from steptime._sim.core.sections import SectionLayout
from steptime._sim.core.simulate import Departures
from steptime._sim.core.steady import Steady, steady
from steptime._sim.core.timing import Cohort, CohortTimeline, Nanoseconds, Timeline

Factors = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# Wire-bound steps settle in 2; ranks that want 1.5 times what the memory gives need 10 to 17, but their end moves by less than
# 0.1 % after 8. Four made-up ranks that want nearly everything and never meet still want 0.3 % after 20: `Settling` says so.
ROUNDS = 12
_POINT_TO_POINT = ("send", "recv")
# How far durations move towards what is wanted, after the first round. At 0.7 and above crowded timelines oscillate.
LATER_STEP = 0.5
# Times that steps which are laid out from samples are played for a guess.
_ROUGH_ROUNDS = 2
# Settled: what works of these want to change, or their step from round to round.
_SECTIONS_SETTLED = 3e-3
# Settled: what the works want to change, as a fraction of all their time.
SETTLED = 1e-3


class Law(Protocol):
    """What runs beside a work makes it take longer."""

    def slowdowns(self, timeline: Timeline, period_ns: Nanoseconds) -> list[Factors]:
        """Per cohort (work, rank, scenario): how many times as long as alone a work takes in a timeline that repeats itself."""


@dataclass(frozen=True)
class Settling:
    """How a fixed point was reached."""

    rounds: int  # times the window was played
    change: float  # what the works still want to change, as a fraction of all their time
    settled: bool


def steady_settled(
    cohorts: Sequence[Cohort],
    laws: Sequence[Law],
    departures: Departures | None = None,
    guess: Sequence[Factors] | None = None,
    *,
    rough: bool = False,
) -> tuple[Steady, Settling]:
    """The steady state of cohorts whose durations are those of works alone; the slowdowns of several laws multiply.

    Of a step that is laid out from samples: `guess` are slowdowns of nearly the same step, to begin with; `rough`: it is
    played for such a guess.
    """
    steps = max(1, *(len(cohort.program.steps) for cohort in cohorts))
    alone = [cohort.timing.duration_ns for cohort in cohorts]
    layouts = [SectionLayout.of(cohort) for cohort in cohorts] if departures is None else [None]
    known = [layout for layout in layouts if layout is not None]
    if len(known) == len(cohorts):
        return _settled_sections(cohorts, laws, known, guess, _ROUGH_ROUNDS if rough else ROUNDS)
    durations, rounds = alone, 0
    while True:
        played = steady(_with_durations(cohorts, durations), departures=departures)
        rounds += 1
        wanted = _wanted(alone, laws, played.timeline, np.rint(played.period_ns * steps).astype(np.int64))
        change = _change(durations, wanted)
        if change <= SETTLED or rounds >= ROUNDS:
            return played, Settling(rounds, change, change <= SETTLED)
        durations = _moved(durations, wanted, 1.0 if rounds == 1 else LATER_STEP)


def _settled_sections(
    cohorts: Sequence[Cohort],
    laws: Sequence[Law],
    layouts: Sequence[SectionLayout],
    guess: Sequence[Factors] | None,
    most: int,
) -> tuple[Steady, Settling]:
    """The same for steps that are laid out from samples: equal sections take equal times, the mean of what rounds want.

    Which of many micro-batches waits for which changes from round to round; what a step takes does not.
    """
    alone = [cohort.timing.duration_ns for cohort in cohorts]
    pairs = zip(alone, guess or [np.ones(1)] * len(alone), strict=True)
    durations = [np.rint(duration * factor).astype(np.int64) for duration, factor in pairs]
    rounds, change, period = 0, 1.0, 0.0
    while True:
        played = steady(_with_durations(cohorts, durations))
        rounds += 1
        wanted = _wanted(alone, laws, played.timeline, np.rint(played.period_ns).astype(np.int64))
        wanted = [layout.evened(want) for layout, want in zip(layouts, wanted, strict=True)]
        now = float(played.period_ns[0])
        change, period = min(_change(durations, wanted), abs(now / period - 1.0) if period else 1.0), now
        if change <= _SECTIONS_SETTLED or rounds >= most:
            return played, Settling(rounds, change, change <= _SECTIONS_SETTLED)
        first = 1.0 if guess is None else LATER_STEP
        durations = _moved(durations, wanted, (first, LATER_STEP, LATER_STEP)[rounds - 1] if rounds < 4 else 1.0 / (rounds - 1))


def _with_durations(cohorts: Sequence[Cohort], durations: Sequence[Nanoseconds]) -> list[Cohort]:
    pairs = zip(cohorts, durations, strict=True)
    return [replace(cohort, timing=replace(cohort.timing, duration_ns=duration)) for cohort, duration in pairs]


def _moved(durations: Sequence[Nanoseconds], wanted: Sequence[Nanoseconds], step: float) -> list[Nanoseconds]:
    return [was + np.rint(step * (want - was)).astype(np.int64) for was, want in zip(durations, wanted, strict=True)]


def _wanted(alone: Sequence[Nanoseconds], laws: Sequence[Law], timeline: Timeline, period_ns: Nanoseconds) -> list[Nanoseconds]:
    results = [duration.astype(np.float64) for duration in alone]
    for law in laws:
        results = [duration * factor for duration, factor in zip(results, law.slowdowns(timeline, period_ns), strict=True)]
    return [np.rint(duration).astype(np.int64) for duration in results]


def _change(durations: Sequence[Nanoseconds], wanted: Sequence[Nanoseconds]) -> float:
    moved = sum(float(np.abs(want - was).sum()) for was, want in zip(durations, wanted, strict=True))
    total = sum(float(want.sum()) for want in wanted)
    return moved / total if total else 0.0


@dataclass(frozen=True, eq=False)
class _Works:
    """What the law wants to know of a cohort's works."""

    alone_ns: Nanoseconds  # (work, rank or 1, scenario or 1)
    collective: Flags  # (work,)
    kernel: Flags  # (work,)
    persistent: Flags  # (work,)
    members: Nanoseconds  # (work,) ranks that take part; 1 for what is no collective

    @classmethod
    def of(cls, cohort: Cohort, law: Overlap) -> _Works:
        program = cohort.program
        kinds = program.works.kind
        # On paper a block for each connection of a pair, two of them (nccl.toml): too few SMs for kernels to notice.
        passed = [law.source == ANALYTIC and collective.kind in _POINT_TO_POINT for collective in program.collectives]
        sizes = [*(max(1, len(collective.ranks)) for collective in program.collectives), 1]  # the last where there is none
        return cls(
            cohort.timing.duration_ns,
            (kinds == WorkKind.COLLECTIVE) & ~np.array([*passed, False], dtype=np.bool_)[program.works.collective],
            kinds == WorkKind.KERNEL,
            np.array([is_persistent(name) for name in program.names], dtype=np.bool_)[program.works.name],
            np.array(sizes, dtype=np.int64)[program.works.collective],
        )


@dataclass(frozen=True, eq=False)
class CollectivesBesideKernels:
    """A `Law`, for ranks on one of `share` shares of a GPU."""

    law: Overlap
    works: tuple[_Works, ...]  # of every cohort
    share: int = 1

    @classmethod
    def of(cls, cohorts: Sequence[Cohort], law: Overlap, *, share: int = 1) -> CollectivesBesideKernels:
        """Of cohorts whose durations are those of works alone."""
        return cls(law, tuple(_Works.of(cohort, law) for cohort in cohorts), share)

    def slowdowns(self, timeline: Timeline, period_ns: Nanoseconds) -> list[Factors]:
        """As `Law` has it."""
        results = []
        for played, works in zip(timeline.cohorts, self.works, strict=True):
            factors = np.ones(played.work_end_ns.shape)
            if self.law.known:
                for rank, scenario in np.ndindex(factors.shape[1:]):
                    factors[:, rank, scenario] = 1.0 / self._speeds(played, works, (rank, scenario), int(period_ns[scenario]))
            results.append(factors)
        return results

    def _speeds(self, played: CohortTimeline, works: _Works, at: tuple[int, int], period_ns: int) -> Factors:
        """How fast each work of a rank went on the average, beside what it met in this timeline; 1 for alone."""
        begin, moving, end = (values[:, *at] for values in (played.work_start_ns, played.moving_ns, played.work_end_ns))
        alone = works.alone_ns[:, at[0] % works.alone_ns.shape[1], at[1] % works.alone_ns.shape[2]]
        ours, theirs = works.kernel, works.collective
        speeds = np.ones(len(begin))
        held = _share(begin[ours], end[ours], _repeated(begin[theirs], end[theirs], period_ns))
        most = self.law.compute_factor(alone[ours], self.share, persistent=works.persistent[ours])
        # Of the time that it took, not of the time alone: the mean of its speed then and of its speed else.
        speeds[ours] = held / most + (1.0 - held)
        covered = _share(moving[theirs], end[theirs], _repeated(begin[ours], end[ours], period_ns))
        speeds[theirs] = 1.0 / self.law.moving_factor(works.members[theirs], beside=covered, busy=True)
        return speeds


# Pairs near and far among 4 ranks with 4 cores each, all at once, take so many times as long as the slower of them: .97 to 1.23
# for gathers and all_reduces of 256 KiB to 16 MiB (benchmarks/h200/divided_parts.py, 2026-11-18).
_OTHER_THREADS = 1.10
# Threads that spin, on fewer cores than there are of them, wait for a turn of the scheduler (2.8 ms with 8 cores or more in
# Linux 6.18): of 8 ranks with 2 cores each, pairs and fours at once take 3.4 to 4.0 ms more for gathers of 256 KiB and twice
# that for all_reduces, which go round twice; from 4 MiB as long as one after the other (the same, 2026-11-18).
_TURN_NS = 3.5e6
# Nothing was measured of messages and exchanges.
_GOES_ROUND = {"all_reduce": 2.0, **dict.fromkeys(("all_gather", "reduce_scatter", "broadcast", "reduce"), 1.0)}
# Beside a host that trains on one of those two cores: 1.1 to 1.9 for all_reduces and exchanges of 256 KiB to 16 MiB
# (benchmarks/h200/collectives_beside_hosts.py, 2026-11-16); with four cores nothing was seen.
_HOST_WORKS = 1.41
# Of a rank, for that to be no matter: the host's, and those of a communicator's thread and of what the kernel moves for it.
_ENOUGH_CORES = 3.0


@dataclass(frozen=True, eq=False)
class CollectivesBesideCollectives:
    """A `Law`, for ranks on sockets that have so many cores each."""

    communicators: tuple[tuple[Flags, ...], ...]  # of every cohort and each of its communicators: which of its works are its
    turns: tuple[Factors, ...]  # of every cohort: what a work may wait for turns, over its time alone, as that has axes
    cores: float

    @classmethod
    def of(cls, cohorts: Sequence[Cohort], cores: float) -> CollectivesBesideCollectives:
        """Of these cohorts."""
        found, turns = [], []
        for cohort in cohorts:
            called, works = cohort.program.collectives, cohort.program.works
            names = np.array([*(_communicator(each.group) for each in called), ""])[works.collective]
            moves = works.kind == WorkKind.COLLECTIVE
            found.append(tuple(moves & (names == name) for name in np.unique(names[moves])))
            rounds = np.array([*(_GOES_ROUND.get(each.kind, 0.0) for each in called), 0.0])[works.collective]
            turns.append(_TURN_NS * rounds[:, None, None] / np.maximum(cohort.timing.duration_ns, 1))
        return cls(tuple(found), tuple(turns), cores)

    @property
    def holds(self) -> bool:
        """Whether any rank has two that could overlap."""
        return any(sum(int(flags.sum()) for flags in each) > 1 for each in self.communicators)

    def slowdowns(self, timeline: Timeline, period_ns: Nanoseconds) -> list[Factors]:
        """As `Law` has it."""
        results = []
        for played, communicators, turns in zip(timeline.cohorts, self.communicators, self.turns, strict=True):
            factors = np.ones(played.work_end_ns.shape)
            for rank, scenario in np.ndindex(factors.shape[1:]):
                begin, moving, end = (
                    times[:, rank, scenario] for times in (played.work_start_ns, played.moving_ns, played.work_end_ns)
                )
                period = int(period_ns[scenario])
                for number, own in enumerate(communicators):
                    alone = 1.0 / _even_shares(moving[own], end[own], period)
                    # A thread spins for as long as its collective is there, waiting included.
                    beside = np.zeros(len(alone))
                    for other in (*communicators[:number], *communicators[number + 1 :]):
                        beside += _share(moving[own], end[own], _repeated(begin[other], end[other], period))
                    if self.cores >= _ENOUGH_CORES:
                        factors[own, rank, scenario] = alone * (1.0 + (_OTHER_THREADS - 1.0) * np.minimum(beside, 1.0))
                        continue
                    waits = turns[own, rank % turns.shape[1], scenario % turns.shape[2]] * np.minimum(beside, 1.0)
                    works = _share(moving[own], end[own], _repeated(*_host_works(played, rank, scenario), period))
                    slowed = np.maximum(alone * (1.0 + beside), alone + waits)
                    factors[own, rank, scenario] = slowed * (1.0 + (_HOST_WORKS - 1.0) * works)
            results.append(factors)
        return results


def _host_works(played: CohortTimeline, rank: int, scenario: int) -> tuple[Nanoseconds, Nanoseconds]:
    """Stretches in which the host of a rank works, and neither waits nor is held up."""
    timing = played.cohort.timing
    gap, cost = (each[:, rank % each.shape[1], scenario % each.shape[2]] for each in (timing.gap_ns, timing.call_ns))
    entered, left = played.call_start_ns[:, rank, scenario], played.call_end_ns[:, rank, scenario]
    return entered - gap, np.minimum(left, entered + cost)


def _communicator(group: str) -> str:
    """Messages of a group (`name:0->1`) go over its one communicator."""
    return group.partition(":")[0].partition(" ")[0]


def _even_shares(begin: Nanoseconds, end: Nanoseconds, period_ns: int) -> Factors:
    """Which part of what they share each of some stretches of time has in the mean, where all that overlap get as much."""
    starts, ends = _repeated(begin, end, period_ns)
    moments = np.unique(np.concatenate([starts, ends]))
    if len(moments) < 2:
        return np.ones(len(begin))
    count = np.searchsorted(np.sort(starts), moments[:-1], side="right") - np.searchsorted(
        np.sort(ends), moments[:-1], side="right"
    )
    got = np.concatenate([[0.0], np.cumsum(np.diff(moments) / np.maximum(count, 1))])  # of one that were there all the time
    mine = np.interp(end, moments, got) - np.interp(begin, moments, got)
    return np.where(end > begin, mine / np.maximum(end - begin, 1), 1.0)


def _repeated(begin: Nanoseconds, end: Nanoseconds, period_ns: int) -> tuple[Nanoseconds, Nanoseconds]:
    """Spans with those of the windows before and after."""
    shifts = (-period_ns, 0, period_ns)
    return np.concatenate([begin + shift for shift in shifts]), np.concatenate([end + shift for shift in shifts])


def _share(begin: Nanoseconds, end: Nanoseconds, spans: tuple[Nanoseconds, Nanoseconds]) -> Factors:
    """Which part of each of some stretches of time lies within any of the spans."""
    order = np.argsort(spans[0], kind="stable")
    starts, ends = spans[0][order], np.maximum.accumulate(spans[1][order]) if len(order) else spans[1]
    if not len(starts):
        return np.zeros(len(begin))
    first = np.append(True, starts[1:] > ends[:-1])
    starts, ends = starts[first], ends[np.append(np.flatnonzero(first)[1:] - 1, len(ends) - 1)]
    before = np.cumsum(ends - starts) - (ends - starts)

    def until(moments: Nanoseconds) -> Nanoseconds:
        index = np.searchsorted(starts, moments, side="right") - 1
        inside = np.minimum(moments, ends[index]) - starts[index] + before[index]
        return np.where(index >= 0, inside, 0)

    result: Factors = (until(end) - until(begin)) / np.maximum(end - begin, 1)
    return result


@dataclass(frozen=True, eq=False)
class KernelsBesideIdleParts:
    """A `Law`, for what works of every cohort take beside idle parts, of what they take beside parts that do the same."""

    ratio: tuple[Factors, ...]  # per work; 1 for what is no kernel

    def slowdowns(self, timeline: Timeline, period_ns: Nanoseconds) -> list[Factors]:
        """As `Law` has it."""
        factors: list[Factors] = [np.ones(played.work_end_ns.shape) for played in timeline.cohorts]
        kernels = [played.cohort.program.works.kind != WorkKind.COLLECTIVE for played in timeline.cohorts]
        ranks = [(cohort, rank) for cohort, factor in enumerate(factors) for rank in range(factor.shape[1])]
        for scenario, period in enumerate(period_ns.tolist()):
            spans: dict[tuple[int, int], tuple[Nanoseconds, Nanoseconds]] = {}
            for cohort, rank in ranks:
                played, ours = timeline.cohorts[cohort], kernels[cohort]
                begun, ended = played.work_start_ns[ours, rank, scenario], played.work_end_ns[ours, rank, scenario]
                spans[cohort, rank] = begun, ended
            for at, (begin, end) in spans.items():
                others = [
                    _share(begin, end, _repeated(span[0], span[1], period)) for other, span in spans.items() if other != at
                ]
                busy = np.mean(others, axis=0) if others else np.ones(len(begin))
                factors[at[0]][kernels[at[0]], at[1], scenario] = busy + (1.0 - busy) * self.ratio[at[0]][kernels[at[0]]]
        return factors


@dataclass(frozen=True, eq=False)
class KernelsBesideKernels:
    """A `Law`, for programs whose kernels are on several streams of the script's own (none: nothing of it).

    Most kernels of a training step fill the GPU: two that run at once take as long as one after the other, each at half its
    speed meanwhile. Kernels of a few blocks are left more than that.
    """

    streams: tuple[tuple[int, ...], ...]  # of every cohort

    @property
    def holds(self) -> bool:
        """Whether any program launches on several streams."""
        return any(self.streams)

    def slowdowns(self, timeline: Timeline, period_ns: Nanoseconds) -> list[Factors]:
        """As `Law` has it."""
        results = []
        for played, streams in zip(timeline.cohorts, self.streams, strict=True):
            factors = np.ones(played.work_end_ns.shape)
            works = played.cohort.program.works
            for rank, scenario in np.ndindex(factors.shape[1:]):
                begin, end = played.work_start_ns[:, rank, scenario], played.work_end_ns[:, rank, scenario]
                for stream in streams:
                    ours = (works.kind == WorkKind.KERNEL) & (works.stream == stream)
                    theirs = (works.kind == WorkKind.KERNEL) & (works.stream != stream) & np.isin(works.stream, streams)
                    beside = _share(begin[ours], end[ours], _repeated(begin[theirs], end[theirs], int(period_ns[scenario])))
                    factors[ours, rank, scenario] = 1.0 / (1.0 - beside / 2.0)
            results.append(factors)
        return results


@dataclass(frozen=True, eq=False)
class LookupsBesideLookups:
    """A `Law`, for what every work of every cohort takes of the memory."""

    works: tuple[tuple[MemoryUse | None, ...], ...]

    @property
    def holds(self) -> bool:
        """Whether any work takes something of the memory."""
        return any(use is not None for works in self.works for use in works)

    def slowdowns(self, timeline: Timeline, period_ns: Nanoseconds) -> list[Factors]:
        """As `Law` has it."""
        factors = [np.ones(played.work_end_ns.shape) for played in timeline.cohorts]
        ranks = [len(played.cohort.ranks) for played in timeline.cohorts]
        first_rank = np.cumsum([0, *ranks]).tolist()
        # A lookup of a rank each: its cohort, work and index there; its rank among all; and its use of the memory.
        spans = [
            ((cohort, work, index), first_rank[cohort] + index, use)
            for cohort, uses in enumerate(self.works)
            for work, use in enumerate(uses)
            if use is not None
            for index in range(ranks[cohort])
        ]
        rank = np.array([number for _, number, _ in spans], dtype=np.int64)
        taken, slowed = (np.array([getattr(use, name) for _, _, use in spans]) for name in ("taken", "slowed"))
        for scenario, period in enumerate(period_ns.tolist()):
            begin, end = (
                np.array([getattr(timeline.cohorts[at[0]], name)[*at[1:], scenario] for at, _, _ in spans], dtype=np.float64)
                for name in ("work_start_ns", "work_end_ns")
            )
            slowdowns = _slowdowns(begin, end, float(period), rank, taken, slowed).tolist()
            for ((cohort, work, index), _, _), factor in zip(spans, slowdowns, strict=True):
                factors[cohort][work, index, scenario] = factor
        return factors


def _slowdowns(begin: Factors, end: Factors, period: float, rank: Nanoseconds, taken: Factors, slowed: Factors) -> Factors:
    """How many times as long as alone each lookup takes, from what the other ranks take of the memory meanwhile."""
    shifts = np.array([-period, 0.0, period])
    starts, ends = ((column[:, None] + shifts).ravel() for column in (begin, end))
    moments = np.unique(np.concatenate([starts, ends]))
    middle = (moments[1:] + moments[:-1]) / 2
    running = (starts[:, None] <= middle) & (middle < ends[:, None])
    of_rank = np.arange(rank.max(initial=0) + 1)[:, None] == np.repeat(rank, len(shifts))
    by_rank = (of_rank * np.repeat(taken, len(shifts))) @ running.astype(np.float64)
    others = by_rank.sum(axis=0) - by_rank[rank]
    common = np.clip(np.minimum(end[:, None], moments[1:]) - np.maximum(begin[:, None], moments[:-1]), 0.0, None)
    alone = (common / (1.0 + slowed[:, None] * others)).sum(axis=1)
    return np.where(alone > 0, (end - begin) / np.maximum(alone, 1e-9), 1.0)
