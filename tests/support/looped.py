"""A call in a loop, as benchmarks run it: at the clock that the power cap of its card leaves."""

from __future__ import annotations

import numpy as np

from steptime._models.estimate import Estimate
from steptime._models.kernels.question import Question
from steptime._models.power.card import Draws, Load
from steptime._platforms.device import Device


def looped(device: Device, question: Question) -> Estimate:
    """What each call takes after a second of them."""
    (found,) = device.estimates([question])
    alone = found.estimate
    if device.power is None or found.draw is None:
        return alone
    draws, once = Draws.of([alone.time_ns], [found.draw], 1), np.ones(1)
    full = alone.time_ns * float(draws.slowdown(device.power, once)[0, 0])
    clock, _ = Load((draws,), (once,), full, 1.0, 0.0).solved(device.power, once)
    slower = float(draws.slowdown(device.power, clock)[0, 0])
    return Estimate(slower * alone.time_ns, slower * alone.low_ns, slower * alone.high_ns, alone.source, alone.inside)
