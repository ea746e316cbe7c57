"""Durations that depend on what runs beside: a fixed point around the simulation.

How long a work takes depends on what overlaps it, and what overlaps it on how long everything takes. So: play, see at every
moment what runs beside what, give every work the duration that leaves it, play again. After the first round durations move half
of the way. Rounds end when what is wanted and what was played agree, or after `ROUNDS`. Nothing is random, so the same input
gives the same timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from steptime._program.queues import QUEUE_DEPTH
from steptime._sim.core.simulate import Departures
from steptime._sim.core.steady import Steady, steady
from steptime._sim.core.timing import Cohort, Nanoseconds, Timeline

Factors = npt.NDArray[np.float64]

# Wire-bound steps settle in 2; ranks that want 1.5 times what the memory gives need 10 to 17, but their end moves by less than
# 0.1 % after 8. Four made-up ranks that want nearly everything and never meet still want 0.3 % after 20: `Settling` says so.
ROUNDS = 12
# How far durations move towards what is wanted, after the first round. At 0.7 and above crowded timelines oscillate.
LATER_STEP = 0.5
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
    *,
    departures: Departures | None = None,
    queue_depth: int | None = QUEUE_DEPTH,
    rounds_at_most: int = ROUNDS,
) -> tuple[Steady, Settling]:
    """The steady state of cohorts whose durations are those of works alone; the slowdowns of several laws multiply."""
    steps = max(1, *(len(cohort.program.steps) for cohort in cohorts))
    alone = [cohort.timing.duration_ns for cohort in cohorts]
    durations, rounds = alone, 0
    while True:
        timings = [replace(cohort.timing, duration_ns=duration) for cohort, duration in zip(cohorts, durations, strict=True)]
        slowed = [replace(cohort, timing=timing) for cohort, timing in zip(cohorts, timings, strict=True)]
        played = steady(slowed, queue_depth=queue_depth, departures=departures)
        rounds += 1
        wanted = _wanted(alone, laws, played.timeline, np.rint(played.period_ns * steps).astype(np.int64))
        change = _change(durations, wanted)
        if change <= SETTLED or rounds >= rounds_at_most:
            return played, Settling(rounds, change, change <= SETTLED)
        step = 1.0 if rounds == 1 else LATER_STEP
        moves = (np.rint(step * (want - was)).astype(np.int64) for was, want in zip(durations, wanted, strict=True))
        durations = [was + move for was, move in zip(durations, moves, strict=True)]


def _wanted(alone: Sequence[Nanoseconds], laws: Sequence[Law], timeline: Timeline, period_ns: Nanoseconds) -> list[Nanoseconds]:
    results = [item.astype(np.float64) for item in alone]
    for law in laws:
        results = [item * factor for item, factor in zip(results, law.slowdowns(timeline, period_ns), strict=True)]
    return [np.rint(item).astype(np.int64) for item in results]


def _change(durations: Sequence[Nanoseconds], wanted: Sequence[Nanoseconds]) -> float:
    moved = sum(float(np.abs(want - was).sum()) for was, want in zip(durations, wanted, strict=True))
    total = sum(float(want.sum()) for want in wanted)
    return moved / total if total else 0.0
