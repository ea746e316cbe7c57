"""A rank's collectives and the kernels beside them slow each other, where a fabric's pairs were measured.

A collective holds SMs from its own start, waiting included, so a kernel is slower for the part of its time that one is there;
moving is slower for the part of it that kernels run beside. A host that trains issues work or waits for room to do so, and
keeps one of its rank's cores busy either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.collectives.overlap import Overlap, is_persistent
from steptime._program.program import Program, WorkKind
from steptime._sim.core.timing import Cohort, CohortTimeline, Nanoseconds, Timeline
from steptime._sim.laws.settling import Factors

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class _Works:
    """What the law wants to know of a cohort's works."""

    alone_ns: Nanoseconds  # (work, rank or 1, scenario or 1)
    collective: Flags  # (work,)
    kernel: Flags  # (work,)
    persistent: Flags  # (work,)
    members: Nanoseconds  # (work,) ranks that take part; 1 for what is no collective

    @classmethod
    def of(cls, cohort: Cohort) -> _Works:
        program = cohort.program
        kinds = program.works.kind
        return cls(
            cohort.timing.duration_ns,
            kinds == WorkKind.COLLECTIVE,
            kinds == WorkKind.KERNEL,
            np.array([is_persistent(program.names[name]) for name in program.works.name.tolist()], dtype=np.bool_),
            _members(program),
        )


def _members(program: Program) -> Nanoseconds:
    sizes = [max(1, len(collective.ranks)) for collective in program.collectives]
    return np.array([sizes[index] if index >= 0 else 1 for index in program.works.collective.tolist()], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class CollectivesBesideKernels:
    """A `settling.Law`, for ranks on one of `share` shares of a GPU."""

    law: Overlap
    works: tuple[_Works, ...]  # of every cohort
    share: int = 1

    @classmethod
    def of(cls, cohorts: Sequence[Cohort], law: Overlap, *, share: int = 1) -> CollectivesBesideKernels:
        """Of cohorts whose durations are those of works alone."""
        return cls(law, tuple(_Works.of(cohort) for cohort in cohorts), share)

    def slowdowns(self, timeline: Timeline, period_ns: Nanoseconds) -> list[Factors]:
        """As `settling.Law` has it."""
        results = []
        for played, works in zip(timeline.cohorts, self.works, strict=True):
            factors = np.ones(played.work_end_ns.shape)
            if self.law.measured:
                for rank, scenario in np.ndindex(factors.shape[1:]):
                    factors[:, rank, scenario] = 1.0 / self._speeds(played, works, (rank, scenario), int(period_ns[scenario]))
            results.append(factors)
        return results

    def _speeds(self, played: CohortTimeline, works: _Works, place: tuple[int, int], period_ns: int) -> Factors:
        """How fast each work of a rank went on the average, beside what it met in this timeline; 1 for alone."""
        begin, moving, end = (values[:, *place] for values in (played.work_start_ns, played.moving_ns, played.work_end_ns))
        alone = works.alone_ns[:, place[0] % works.alone_ns.shape[1], place[1] % works.alone_ns.shape[2]]
        ours, theirs = works.kernel, works.collective
        speeds = np.ones(len(begin))
        held = _share(begin[ours], end[ours], _repeated(begin[theirs], end[theirs], period_ns))
        most = self.law.compute_factor(alone[ours], self.share, persistent=works.persistent[ours])
        # Of the time that it took, not of the time alone: the mean of its speed then and of its speed else.
        speeds[ours] = held / most + (1.0 - held)
        covered = _share(moving[theirs], end[theirs], _repeated(begin[ours], end[ours], period_ns))
        speeds[theirs] = 1.0 / self.law.moving_factor(works.members[theirs], beside=covered, busy=True)
        return speeds


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
