"""Ranks that share one GPU slow each other: durations by what the other ranks' works ask of the memory at that moment.

A fixed point (`settling`). At every single moment more demand makes nobody else faster. Over a whole timeline it can: a rank
that is held up may leave the company of another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steptime.graph.launch_queue import QUEUE_DEPTH
from steptime.models.contention import LEAST_SENSITIVITY, USED_AT_MOST, Contention
from steptime.sim.settling import ROUNDS, Fractions, Settling, simulate_settled, steady_settled
from steptime.sim.steady import Steady
from steptime.sim.timeline import Timeline
from steptime.sim.timing import Cohort, Nanoseconds

# Demands are added up as whole numbers of this, so that what everybody has left is exactly nothing.
_GRAIN = 2.0**-40


@dataclass(frozen=True, eq=False)
class Demand:
    """What the works of one cohort ask of the GPU's memory, as (work, rank or 1, scenario or 1); 0 where it asks nothing."""

    used: Fractions  # fraction of the whole GPU's bandwidth that a work uses while it runs alone on its part
    sensitivity: Fractions  # fraction of its alone time that it waits for memory

    def __post_init__(self) -> None:
        for name in ("used", "sensitivity"):
            values = getattr(self, name)
            if values.ndim != 3 or (values.size and not (values.min() >= 0 and values.max() <= 1)):
                raise ValueError(f"Demand.{name}: shape {values.shape}, expected fractions from 0 to 1 with 3 axes")
        if bool(((self.used > 0) & (self.sensitivity < LEAST_SENSITIVITY)).any()):
            raise ValueError(f"Demand.sensitivity: below {LEAST_SENSITIVITY} for a work that uses bandwidth")

    @classmethod
    def of(
        cls, law: Contention, nbytes: Fractions, alone_ns: Nanoseconds, share: int, factor: Fractions | float = 1.0
    ) -> Demand:
        """What the law makes of works that move so many bytes and take so long alone on one of `share` parts.

        Works that take no time ask nothing. Collectives and copies to the host wait for something else: leave them out by
        a `factor` of 0.
        """
        alone = np.asarray(alone_ns, dtype=np.float64)
        asks = (alone > 0) & (np.asarray(factor) > 0)
        used = np.minimum(law.used(nbytes, alone), law.part_bandwidth(share))
        sensitivity = law.sensitivity(used, alone, share, factor)
        return cls(np.where(asks, used, 0.0), np.where(asks, sensitivity, 0.0))


@dataclass(frozen=True, eq=False)
class Shared:
    """What the contention is between: a cohort's demand for each cohort, and who shares which GPU."""

    law: Contention
    demands: Sequence[Demand]
    gpu_of: Mapping[int, int] | None = None  # rank -> GPU; None: all on one

    def rates(self, timeline: Timeline, period_ns: Nanoseconds | None = None) -> list[Fractions]:
        """As `settling.Rates` has it."""
        return progress_rates(timeline, self, period_ns)


def simulate_shared(
    cohorts: Sequence[Cohort], shared: Shared, *, queue_depth: int | None = QUEUE_DEPTH, rounds_at_most: int = ROUNDS
) -> tuple[Timeline, Settling]:
    """Play one window; durations are those of works alone on their parts."""
    return simulate_settled(cohorts, shared.rates, queue_depth=queue_depth, rounds_at_most=rounds_at_most)


def steady_shared(
    cohorts: Sequence[Cohort], shared: Shared, *, queue_depth: int | None = QUEUE_DEPTH, rounds_at_most: int = ROUNDS
) -> tuple[Steady, Settling]:
    """Repeat the window until it repeats itself; what overlaps its ends are the windows before and after."""
    return steady_settled(cohorts, shared.rates, queue_depth=queue_depth, rounds_at_most=rounds_at_most)


def progress_rates(timeline: Timeline, shared: Shared, period_ns: Nanoseconds | None = None) -> list[Fractions]:
    """Per cohort and (work, rank, scenario): how fast a work went on the average, 1 for alone on its part.

    With a period (scenario,) the timeline repeats itself.
    """
    rates = [np.ones(t.work_end_ns.shape) for t in timeline.cohorts]
    ranks = [(c, r, rank) for c, t in enumerate(timeline.cohorts) for r, rank in enumerate(t.cohort.ranks)]
    gpu_of = shared.gpu_of if shared.gpu_of is not None else {rank: 0 for _, _, rank in ranks}
    for gpu in sorted({gpu_of[rank] for _, _, rank in ranks}):
        together = [(c, r) for c, r, rank in ranks if gpu_of[rank] == gpu]
        if len(together) < 2:
            continue
        for scenario in range(len(timeline.end_ns)):
            spans = _spans(timeline, shared.demands, together, scenario)
            if not len(spans.work):
                continue
            found = spans.rates(shared.law, None if period_ns is None else int(period_ns[scenario]))
            for place, (c, r) in enumerate(together):
                mine = spans.member == place
                rates[c][spans.work[mine], r, scenario] = found[mine]
    return rates


@dataclass(frozen=True, eq=False)
class _Spans:
    """Works of the ranks of one GPU in one scenario that ask something of its memory, one row each."""

    member: Nanoseconds  # which of the ranks
    lane: Nanoseconds  # which stream of which rank, in the order of ranks
    work: Nanoseconds
    begin_ns: Nanoseconds
    end_ns: Nanoseconds
    used: Fractions
    sensitivity: Fractions
    lane_member: Nanoseconds  # per lane: which of the ranks

    def rates(self, law: Contention, period_ns: int | None) -> Fractions:
        """How fast each went on the average over its span."""
        shifts = (0,) if period_ns is None else (0, -period_ns, period_ns)
        begin = np.concatenate([self.begin_ns + shift for shift in shifts])
        end = np.concatenate([self.end_ns + shift for shift in shifts])
        times = np.concatenate([begin, end])
        order = np.argsort(times, kind="stable")
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        lane = np.tile(self.lane, len(shifts))
        width = np.diff(times[order], append=times[order[-1:]])
        running = [self._running(np.tile(v, len(shifts)), lane, place) for v in (self.used, self.sensitivity)]
        progress = np.cumsum(self._rates(law, width, *running) * width[:, None], axis=0)
        progress = np.concatenate([np.zeros((1, progress.shape[1])), progress])
        rows = np.arange(len(self.lane))
        came = progress[place[len(begin) + rows], self.lane] - progress[place[rows], self.lane]
        return np.asarray(came / (self.end_ns - self.begin_ns))

    def _running(self, value: Fractions, lane: Nanoseconds, place: Nanoseconds) -> Fractions:
        """The value of what runs, as (moment, lane): moments lie between two events in order of time."""
        change = np.zeros((len(place), len(self.lane_member)), dtype=np.int64)
        grains = np.rint(value / _GRAIN).astype(np.int64)
        change[place[: len(value)], lane] = grains
        change[place[len(value) :], lane] = -grains
        # Works of one stream may overlap a little; together they ask for no more than one that asks for everything.
        return np.asarray(np.minimum(np.cumsum(change, axis=0) * _GRAIN, 1.0))

    def _rates(self, law: Contention, width: Nanoseconds, used: Fractions, waits: Fractions) -> Fractions:
        """How fast each lane goes at each moment."""
        present, of_lane = np.unique(self.lane_member, return_inverse=True)
        firsts = np.searchsorted(self.lane_member, present)
        by_rank = np.minimum(np.add.reduceat(used, firsts, axis=1), USED_AT_MOST)
        weighed = np.add.reduceat(used * waits, firsts, axis=1)
        rates = np.ones(used.shape)
        busy = np.flatnonzero((width > 0) & ((by_rank > 0).sum(axis=1) > 0) & ((waits > 0).sum(axis=1) > 1))
        if len(busy):
            asked = by_rank[busy]
            sensitivity = np.where(asked > 0, weighed[busy] / np.maximum(asked, _GRAIN), 1.0)
            stretch = law.stretch(asked, np.minimum(sensitivity, 1.0))[:, of_lane]
            rates[busy] = 1.0 / (1.0 + waits[busy] * (stretch - 1.0))
        return rates


def _spans(timeline: Timeline, demands: Sequence[Demand], together: Sequence[tuple[int, int]], scenario: int) -> _Spans:
    columns = []
    lane_member: list[int] = []
    for place, (c, r) in enumerate(together):
        played, demand = timeline.cohorts[c], demands[c]
        used, waits = (_at(values, r, scenario) for values in (demand.used, demand.sensitivity))
        # A collective asks for something only once everybody has arrived.
        begin, end = played.moving_ns[:, r, scenario], played.work_end_ns[:, r, scenario]
        rows = np.flatnonzero((waits > 0) & (end > begin))
        streams, lane = np.unique(played.cohort.program.works.stream[rows], return_inverse=True)
        member = np.full(len(rows), place, dtype=np.int64)
        columns.append((member, lane.reshape(-1) + len(lane_member), rows, begin[rows], end[rows], used[rows], waits[rows]))
        lane_member += [place] * len(streams)
    member, lane, work, begin, end, used, waits = (np.concatenate(column) for column in zip(*columns, strict=True))
    return _Spans(member, lane, work, begin, end, used, waits, np.array(lane_member, dtype=np.int64))


def _at(values: Fractions, rank: int, scenario: int) -> Fractions:
    return values[:, rank if values.shape[1] > 1 else 0, scenario if values.shape[2] > 1 else 0]
