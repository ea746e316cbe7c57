"""Durations that depend on what runs beside: a fixed point around the simulation.

How long a work takes depends on what overlaps it, and what overlaps it on how long everything takes. So: play, see at every
moment what runs beside what, give every work the duration its company leaves it, play again. After the first round durations
move half of the way. Rounds end when what is wanted and what was played agree, or after `ROUNDS`. Nothing is random, so the
same input gives the same timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from steptime._program.launch_queue import QUEUE_DEPTH
from steptime._sim.core.schedule import schedule
from steptime._sim.core.simulate import Stage
from steptime._sim.core.steady import Steady, steady
from steptime._sim.core.timeline import Timeline
from steptime._sim.core.timing import Cohort, Nanoseconds

Fractions = npt.NDArray[np.float64]
Played = TypeVar("Played")

Rates = Callable[[Timeline, Nanoseconds | None], list[Fractions]]
"""Per cohort and (work, rank, scenario): how fast a work went on the average, 1 for alone.

With a period (scenario,) the timeline repeats itself.
"""

# Wire-bound steps settle in 2; ranks that want 1.5 times what the memory gives need 10 to 17, but their end moves by less than
# 0.1 % after 8. Four made-up ranks that want nearly everything and never meet still want 0.3 % after 20: `Settling` says so.
ROUNDS = 12
# How far durations move towards what is wanted, after the first round. At 0.7 and above crowded timelines oscillate.
LATER_STEP = 0.5
# Settled: what the works want to change, as a fraction of all their time.
SETTLED = 1e-3


@dataclass(frozen=True)
class Settling:
    """How a fixed point was reached."""

    rounds: int  # times the window was played
    change: float  # what the works still want to change, as a fraction of all their time
    settled: bool


def together(*laws: Rates) -> Rates:
    """Several reasons to be slower at once: each takes its part of the speed."""

    def rates(timeline: Timeline, period_ns: Nanoseconds | None) -> list[Fractions]:
        found = [law(timeline, period_ns) for law in laws]
        return [np.prod(np.stack(each), axis=0) for each in zip(*found, strict=True)]

    return rates


def simulate_settled(
    cohorts: Sequence[Cohort], rates: Rates, *, queue_depth: int | None = QUEUE_DEPTH, rounds_at_most: int = ROUNDS
) -> tuple[Timeline, Settling]:
    """Play one window; durations are those of works alone."""
    plan = schedule(cohorts, queue_depth=queue_depth)

    def play(changed: Sequence[Cohort]) -> tuple[Timeline, Timeline, None]:
        stage = Stage(changed, plan)
        for number, cohort in enumerate(changed):
            stage.open(number, cohort.timing.thread_start_ns, cohort.timing.stream_start_ns)
        stage.play(continued=False)
        timeline = stage.timeline(queue_depth=queue_depth, keep="all")
        return timeline, timeline, None

    return _settle(cohorts, rates, play, rounds_at_most)


def steady_settled(
    cohorts: Sequence[Cohort], rates: Rates, *, queue_depth: int | None = QUEUE_DEPTH, rounds_at_most: int = ROUNDS
) -> tuple[Steady, Settling]:
    """Repeat the window until it repeats itself; what overlaps its ends are the windows before and after."""
    steps = max(1, *(len(cohort.program.steps) for cohort in cohorts))

    def play(changed: Sequence[Cohort]) -> tuple[Steady, Timeline, Nanoseconds]:
        found = steady(changed, queue_depth=queue_depth)
        return found, found.timeline, np.rint(found.period_ns * steps).astype(np.int64)

    return _settle(cohorts, rates, play, rounds_at_most)


def _settle(
    cohorts: Sequence[Cohort],
    rates: Rates,
    play: Callable[[Sequence[Cohort]], tuple[Played, Timeline, Nanoseconds | None]],
    rounds_at_most: int,
) -> tuple[Played, Settling]:
    alone = [cohort.timing.duration_ns for cohort in cohorts]
    durations, done = alone, 0
    while True:
        timings = [replace(cohort.timing, duration_ns=own) for cohort, own in zip(cohorts, durations, strict=True)]
        played, timeline, period = play([replace(c, timing=timing) for c, timing in zip(cohorts, timings, strict=True)])
        done += 1
        speeds = rates(timeline, period)
        wanted = [np.rint(own / speed).astype(np.int64) for own, speed in zip(alone, speeds, strict=True)]
        change = _change(durations, wanted)
        if change <= SETTLED or done >= rounds_at_most:
            return played, Settling(done, change, change <= SETTLED)
        step = 1.0 if done == 1 else LATER_STEP
        moves = (np.rint(step * (want - was)).astype(np.int64) for was, want in zip(durations, wanted, strict=True))
        durations = [was + move for was, move in zip(durations, moves, strict=True)]


def _change(durations: Sequence[Nanoseconds], wanted: Sequence[Nanoseconds]) -> float:
    moved = sum(float(np.abs(want - was).sum()) for was, want in zip(durations, wanted, strict=True))
    total = sum(float(want.sum()) for want in wanted)
    return moved / total if total else 0.0
