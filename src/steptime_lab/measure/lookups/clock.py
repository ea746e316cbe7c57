"""Lookups timed with CUDA events: a check of what the profiler's records say."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from steptime_lab.measure.lookups.prepared import Prepared

_RUNS = 3
# Long enough for the host to issue all runs before the first one starts, so that what is timed is the device alone: about
# 30 ms of an H200, whose clock is at most 2 GHz.
_WAIT_CYCLES = 60_000_000


def event_times_ns(prepared: Prepared, flush: Callable[[], None], *, cuda: bool) -> tuple[float, float]:
    """Median time of the forward and of the backward pass with cold caches, gaps between their kernels included."""
    if not cuda:
        return _host_times_ns(prepared)
    torch.cuda.synchronize()
    torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
    runs = []
    for _ in range(_RUNS):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]  # type: ignore[no-untyped-call]
        flush()
        marks[0].record()
        out = prepared.forward()
        marks[1].record()
        flush()
        marks[2].record()
        prepared.backward(out)
        marks[3].record()
        runs.append(marks)
    torch.cuda.synchronize()
    times_ms = [(marks[0].elapsed_time(marks[1]), marks[2].elapsed_time(marks[3])) for marks in runs]
    forward, backward = 1e6 * np.median(np.array(times_ms), axis=0)
    return float(forward), float(backward)


def _host_times_ns(prepared: Prepared) -> tuple[float, float]:
    start = time.perf_counter_ns()
    out = prepared.forward()
    middle = time.perf_counter_ns()
    prepared.backward(out)
    return float(middle - start), float(time.perf_counter_ns() - middle)
