"""How long a step takes: many unsynchronised steps between barriers, divided by their number; the slowest rank counts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from steptime.measure.group import Group

# A step time is flat when the last three steps agree to this; host-bound steps never do better (2-7 % within a run).
_FLAT = 0.05
_FLAT_OVER = 3
# A step this long hides its host and repeats to a tenth of a percent: three warm it up, two at a time tell its length.
_LONG_S = 0.2
_LONG_WARM, _LONG_STEPS = 3, 2
# `steps_per_time` is stored in 16 bits, and more steps than this say nothing new.
MOST_STEPS = 1000

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to warm up and to time. A repeat takes about `repeat_s`, whatever a step takes."""

    warm_least: int = 5
    warm_most: int = 15
    warm_s: float = 1.5
    repeats: int = 3
    repeat_s: float = 0.12
    least_steps: int = 5


FULL = Pace()
# To try things out: seconds in all.
SMALL = Pace(warm_least=2, warm_most=3, warm_s=0.5, repeats=3, repeat_s=0.0, least_steps=2)


def flat(step_s: Sequence[float]) -> bool:
    """Whether the last steps took the same time."""
    last = step_s[-_FLAT_OVER:]
    return len(last) == _FLAT_OVER and max(last) - min(last) <= _FLAT * max(last)


def steps_for(seconds: float, step_s: float, least: int) -> int:
    """How many steps fill that time."""
    return max(least, min(MOST_STEPS, round(seconds / max(step_s, 1e-9))))


def warm_up(step: Run, group: Group, pace: Pace) -> float:
    """Steps until the time is flat; seconds of a late one. Every rank makes the same number, as steps contain collectives."""
    taken_s: list[float] = []
    while len(taken_s) < pace.warm_most:
        # Slowest of all ranks and the same numbers everywhere, so every rank stops at the same step.
        taken_s.append(time_once(step, group, 1))
        least = _LONG_WARM if taken_s[-1] > _LONG_S else pace.warm_least
        if len(taken_s) >= least and (flat(taken_s) or sum(taken_s[1:]) >= pace.warm_s):
            break
    return min(taken_s[-_FLAT_OVER:])


def time_once(step: Run, group: Group, count: int) -> float:
    """Seconds per step over `count` unsynchronised steps between barriers, of the slowest rank, on every rank."""
    group.barrier()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    group.synchronize()
    return max(group.gather((time.perf_counter() - begun) / count))


def time_steps(step: Run, group: Group, pace: Pace) -> tuple[tuple[float, ...], int]:
    """Warms up, then nanoseconds per step of every repeat, and over how many steps each is the mean."""
    step_s = warm_up(step, group, pace)
    count = steps_for(pace.repeat_s, step_s, _LONG_STEPS if step_s > _LONG_S else pace.least_steps)
    return tuple(1e9 * time_once(step, group, count) for _ in range(pace.repeats)), count


@contextmanager
def no_collector() -> Iterator[None]:
    """The garbage collector stays out; what lives now (whole libraries) is not looked at again by later collections."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
