"""Whom the others wait for: at every collective, the rank that arrives last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._sim.core.meetings import Part, meetings
from steptime._sim.core.timeline import Timeline
from steptime._sim.core.timing import Nanoseconds
from steptime._units import ms

# A rank that makes each of the others wait for less than this share of the step is no straggler.
NOISE = 0.01


@dataclass(frozen=True)
class Straggler:
    """The rank whose late arrivals cost the others most."""

    rank: int
    caused_ms: float  # per step, summed over the ranks that wait for it
    share: float  # of all waiting inside collectives


@dataclass(frozen=True)
class Waiting:
    """Who the waiting inside collectives is for."""

    straggler: Straggler | None  # None: what any one rank causes is small
    absent_share: float  # of all waiting: for ranks without a program


def waiting(timeline: Timeline, *, steps: int, step_ns: float, scenario: int = 0) -> Waiting:
    """Who ranks wait for in one scenario. Waiting for ranks without a program is nobody's here."""
    arrivals = _arrivals(timeline, scenario)
    total = int(arrivals.waited_ns.sum())
    if not total:
        return Waiting(None, 0.0)
    last, caused = arrivals.last()
    absent = 1 - float(caused.sum() / total)
    totals = np.bincount(last, weights=caused, minlength=1)
    worst = int(totals.argmax())
    others = sum(len(c.cohort.ranks) for c in timeline.cohorts) - 1
    if totals[worst] < NOISE * step_ns * steps * max(others, 1):
        return Waiting(None, absent)
    return Waiting(Straggler(worst, ms(totals[worst]) / steps, float(totals[worst] / total)), absent)


@dataclass(frozen=True, eq=False)
class _Arrivals:
    """Every rank's arrival at every collective, one row each."""

    meeting: Nanoseconds  # number of the meeting
    rank: Nanoseconds
    start_ns: Nanoseconds
    moving_ns: Nanoseconds

    @property
    def waited_ns(self) -> Nanoseconds:
        """How long each waited."""
        return np.asarray(np.maximum(self.moving_ns - self.start_ns, 0), dtype=np.int64)

    def last(self) -> tuple[Nanoseconds, Nanoseconds]:
        """Per meeting that its last arrival set going: who that was (the lowest of several), how long the others waited."""
        order = np.lexsort((self.rank, -self.start_ns, self.meeting))
        first = np.flatnonzero(np.diff(self.meeting[order], prepend=-1))  # never empty: nobody waits without a meeting
        caused = np.add.reduceat(self.waited_ns[order], first)
        set_going = self.start_ns[order[first]] >= np.maximum.reduceat(self.moving_ns[order], first)
        return self.rank[order[first]][set_going], caused[set_going]


def _arrivals(timeline: Timeline, scenario: int) -> _Arrivals:
    cohorts = [t.cohort for t in timeline.cohorts]
    columns: list[tuple[Nanoseconds, ...]] = [(np.zeros(0, dtype=np.int64),) * 4]
    number = 0
    for meeting in meetings(cohorts, [Part(n, 0, len(cohort.ranks)) for n, cohort in enumerate(cohorts)]):
        for party in meeting.parties:
            at = timeline.cohorts[party.part]
            ranks = np.array(at.cohort.ranks, dtype=np.int64)
            group = np.zeros(len(ranks), dtype=np.int64) if party.group is None else party.group
            start, moving = at.work_start_ns[party.work, :, scenario], at.moving_ns[party.work, :, scenario]
            columns.append((number + group, ranks, start, moving))
        number += meeting.groups
    return _Arrivals(*(np.concatenate(column) for column in zip(*columns, strict=True)))
