"""The one guess about device work that no model answers: a roofline at the device's limits, labelled, and known to a factor."""

from __future__ import annotations

from steptime._hardware.device import DeviceLimits
from steptime._models.estimate import Estimate, Source
from steptime._units import dtype_bytes, dtype_name

# How far off a guess may be, to either side.
FACTOR = 4.0
# Tensor cores multiply these at the rate of each other; where a data sheet has no rate, at that of two bytes.
_ONE_BYTE, _TWO_BYTES = "float8", "bfloat16"


def guess(limits: DeviceLimits, flop: float, nbytes: float, precision: str) -> Estimate:
    """What computing and moving so much takes at least, beside what the shortest kernel takes."""
    return guessed(limits.reach.start_ns.value + limits.roofline_ns(flop, nbytes, _rated(limits, precision)))


def guessed(time_ns: float) -> Estimate:
    """A time that is no more than a guess."""
    return Estimate(time_ns, time_ns / FACTOR, time_ns * FACTOR, Source.FALLBACK, inside=False)


def _rated(limits: DeviceLimits, precision: str) -> str:
    name = dtype_name(precision)
    if dtype_bytes(name) != 1:
        return name if name else precision
    return _ONE_BYTE if _ONE_BYTE in limits.peak_flop_per_s else _TWO_BYTES
