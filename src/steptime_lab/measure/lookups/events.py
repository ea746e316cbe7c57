"""Lookups timed with events: a check of what the profiler's records say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from steptime._calibrate.harness.clock import Clock
from steptime._units import NS_PER_MS
from steptime_lab.measure.lookups.prepared import PreparedLookup

_RUNS = 3
# Long enough for the host to issue all runs before the first one starts, so that what is timed is the device alone.
_AHEAD_NS = 30 * NS_PER_MS


def event_times_ns(prepared: PreparedLookup, flush: Callable[[], None], clock: Clock) -> tuple[float, float]:
    """Median time of the forward and of the backward pass with cold caches, gaps between their kernels included."""
    clock.wait(clock.mark())
    clock.run_ahead(_AHEAD_NS)
    runs = []
    for _ in range(_RUNS):
        flush()
        begun = clock.mark()
        out = prepared.forward()
        looked_up = clock.mark()
        flush()
        turned = clock.mark()
        prepared.backward(out)
        runs.append((begun, looked_up, turned, clock.mark()))
    clock.wait(runs[-1][-1])
    times_ns = [(clock.between_ns(a, b), clock.between_ns(c, d)) for a, b, c, d in runs]
    forward, backward = np.median(np.array(times_ns), axis=0)
    return float(forward), float(backward)
