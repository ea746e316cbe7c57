"""How sure a predicted step is: the same step with durations drawn from what its models are known to be off by.

One draw per group of estimates that err together (a model about calls of one op and size), one per kind of collective and one
for the host: a box is slow or fast as a whole. Draws depend on the group's name alone, so that the same input gives the same
interval and two configurations of one model are compared under the same errors.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steptime._platforms.calibration import Calibration
from steptime._sim.core.steady import Steady, steady
from steptime._sim.core.timing import Cohort
from steptime._sim.modelled.issue import Issued
from steptime._sim.modelled.step import ModelledStep

Floats = npt.NDArray[np.float64]

SAMPLES = 64
LEVELS = (0.05, 0.95)
# Estimates' intervals hold nine of ten: so many standard deviations of a normal to either side.
_NINE_OF_TEN = 1.645


def interval_ns(step: ModelledStep, found: Steady, calibration: Calibration) -> tuple[float, float]:
    """The interval that should hold nine of ten measured steps; `found` is the step without draws."""
    cohorts = [
        _drawn(program, played.cohort, calibration)
        for program, played in zip(step.programs, found.timeline.cohorts, strict=True)
    ]
    periods = steady(cohorts, iterations_at_most=24).period_ns
    low, high = np.quantile(periods, LEVELS)
    return min(float(low), float(found.period_ns[0])), max(float(high), float(found.period_ns[0]))


def _drawn(one: Issued, cohort: Cohort, calibration: Calibration) -> Cohort:
    """The cohort with a scenario per draw, around durations that have settled already."""
    factors = _factors(one) if one.groups else np.ones((1, SAMPLES))
    collectives = len(one.program.collectives)
    if collectives:
        factors[-collectives:] *= np.exp(
            np.stack([calibration.wire_error * _normal(f"wire {each.kind}") for each in one.program.collectives])
        )
    host = np.exp(calibration.host_error * _normal("host"))
    timing = cohort.timing
    places = np.array(one.estimate, dtype=np.int64)
    duration = timing.duration_ns[:, :, :1] * factors[places][:, None, :]
    return replace(
        cohort,
        timing=replace(
            timing,
            duration_ns=np.rint(duration).astype(np.int64),
            gap_ns=np.rint(timing.gap_ns[:, :, :1] * host).astype(np.int64),
            call_ns=np.rint(timing.call_ns[:, :, :1] * host).astype(np.int64),
        ),
    )


def _logs(one: Issued, place: int) -> tuple[float, float]:
    """Standard deviations of the logarithm below and above an estimate."""
    given = one.estimates[place]
    if given.time_ns <= 0:
        return 0.0, 0.0
    below, above = max(given.low_ns, 1e-3) / given.time_ns, given.high_ns / given.time_ns
    return -float(np.log(min(below, 1.0))) / _NINE_OF_TEN, float(np.log(max(above, 1.0))) / _NINE_OF_TEN


def _factors(one: Issued) -> Floats:
    """Per estimate a factor for each draw of its group."""
    draws = np.stack([_normal(group) for group in one.groups])
    below, above = np.array([_logs(one, index) for index in range(len(one.groups))]).T[:, :, None]
    result: Floats = np.exp(np.where(draws < 0, below, above) * draws)
    return result


@lru_cache(maxsize=1 << 14)
def _normal(group: str) -> Floats:
    return np.random.default_rng(zlib.crc32(group.encode())).standard_normal(SAMPLES)
