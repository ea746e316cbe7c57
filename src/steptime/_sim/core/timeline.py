"""`Timeline`: when everything happened, for all ranks and scenarios."""

from __future__ import annotations

from dataclasses import dataclass

from steptime._program.queues import QUEUE_DEPTH
from steptime._sim.core.timing import Cohort, Nanoseconds


@dataclass(frozen=True, eq=False)
class CohortTimeline:
    """Start and end of every call and every work of one cohort, as (row, rank, scenario)."""

    cohort: Cohort
    call_start_ns: Nanoseconds  # the host enters the call
    call_end_ns: Nanoseconds  # the host leaves it, blocking included
    work_start_ns: Nanoseconds  # for a collective: this rank's arrival
    work_end_ns: Nanoseconds
    moving_ns: Nanoseconds  # per work: for a collective, the last arrival (waiting is moving - start); else its start


@dataclass(frozen=True, eq=False)
class Timeline:
    """The cohorts' timelines. `end_ns` is the end of everything, per scenario."""

    cohorts: tuple[CohortTimeline, ...]
    end_ns: Nanoseconds  # (scenario,)
    queue_depth: int | None = QUEUE_DEPTH  # what it was played with
