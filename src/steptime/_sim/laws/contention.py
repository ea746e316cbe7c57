"""Lookups of ranks on shares of one GPU slow each other while they overlap: a `settling.Law`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.lookups.contention import MemoryUse
from steptime._sim.core.timing import Nanoseconds, Timeline
from steptime._sim.laws.settling import Factors

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Spans:
    """Lookups in a timeline, one row each."""

    cohort: Rows
    work: Rows
    place: Rows  # of the rank in its cohort
    rank: Rows
    taken: Factors
    slowed: Factors


@dataclass(frozen=True, eq=False)
class LookupsBesideLookups:
    """The law, for what every work of every cohort takes of the memory."""

    works: tuple[tuple[MemoryUse | None, ...], ...]

    @property
    def holds(self) -> bool:
        """Whether any work takes something of the memory."""
        return any(use is not None for works in self.works for use in works)

    def slowdowns(self, timeline: Timeline, period_ns: Nanoseconds) -> list[Factors]:
        """As `settling.Law` has it."""
        factors = [np.ones(played.work_end_ns.shape) for played in timeline.cohorts]
        spans = self._spans([len(played.cohort.ranks) for played in timeline.cohorts])
        for scenario, period in enumerate(period_ns.tolist()):
            begin, end = (
                np.array([
                    getattr(timeline.cohorts[cohort], name)[work, index, scenario]
                    for cohort, work, index in zip(spans.cohort, spans.work, spans.place, strict=True)
                ], dtype=np.float64)
                for name in ("work_start_ns", "work_end_ns")
            )  # fmt: skip
            for row, factor in enumerate(_slowdowns(spans, begin, end, float(period)).tolist()):
                factors[spans.cohort[row]][spans.work[row], spans.place[row], scenario] = factor
        return factors

    def _spans(self, ranks: Sequence[int]) -> _Spans:
        first = np.cumsum([0, *ranks])
        rows = [
            (cohort, work, place, int(first[cohort]) + place, use.taken, use.slowed)
            for cohort, uses in enumerate(self.works)
            for work, use in enumerate(uses)
            if use is not None
            for place in range(ranks[cohort])
        ]
        columns = np.array(rows, dtype=np.float64).reshape(-1, 6).T
        places = columns[:4].astype(np.int64)
        return _Spans(places[0], places[1], places[2], places[3], columns[4], columns[5])


def _slowdowns(spans: _Spans, begin: Factors, end: Factors, period: float) -> Factors:
    """How many times as long as alone each lookup takes, from what the other ranks take of the memory meanwhile."""
    shifts = np.array([-period, 0.0, period])
    starts, ends = ((column[:, None] + shifts).ravel() for column in (begin, end))
    taken, rank = np.repeat(spans.taken, len(shifts)), np.repeat(spans.rank, len(shifts))
    moments = np.unique(np.concatenate([starts, ends]))
    middle = (moments[1:] + moments[:-1]) / 2
    running = (starts[:, None] <= middle) & (middle < ends[:, None])
    by_rank = ((np.arange(spans.rank.max(initial=0) + 1)[:, None] == rank) * taken) @ running.astype(np.float64)
    others = by_rank.sum(axis=0) - by_rank[spans.rank]
    common = np.clip(np.minimum(end[:, None], moments[1:]) - np.maximum(begin[:, None], moments[:-1]), 0.0, None)
    alone = (common / (1.0 + spans.slowed[:, None] * others)).sum(axis=1)
    return np.where(alone > 0, (end - begin) / np.maximum(alone, 1e-9), 1.0)
