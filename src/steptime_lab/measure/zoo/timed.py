"""How long a step of an architecture takes once the card is warm, with power, clock, temperature and peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from steptime._calibrate.device.meter import CardUse, Meter, Watch
from steptime._calibrate.harness.conditions import gpus
from steptime._calibrate.harness.group import Group
from steptime_lab.measure.memory import let_go
from steptime_lab.workloads.zoo import Architecture, ZooStep

# The host may be so many steps ahead.
_AHEAD = 8
# Short steps are looked at together, since the host queues them in bursts; and so many of these means are kept.
_BLOCK_MS, _KEPT = 50.0, 60
# A card that draws less than this share of its cap does not slow down as it warms: the same is then seen in less time.
_FAR_BELOW, _SHORTER = 0.8, 0.6
_FIRST = 10


class StepMarks:
    """When each step was through: on the device's time line, or on the host's where there is no device."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._marks: list[Any] = []

    def add(self) -> None:
        """Behind a step; waits where the host is too far ahead."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)
        if len(self._marks) > _AHEAD:
            self._marks[-_AHEAD].synchronize()

    def times_ms(self) -> list[float]:
        """Between each and the next; nothing may be running any more."""
        if self._cuda:
            return [first.elapsed_time(second) for first, second in pairwise(self._marks)]
        return [1e3 * (second - first) for first, second in pairwise(self._marks)]


def timed(each: Architecture, group: Group, *, small: bool, warm_up_s: float, seconds: float) -> dict[str, Any]:
    """The row of an architecture."""
    left = let_go(group)
    step = each.build(group.device.type, small=small)
    cuda = group.device.type == "cuda"
    step()
    group.synchronize()
    meter = Meter(gpus()[0]["uuid"]) if cuda else Meter("none")
    with meter.watching() as watch:
        first, share = _warmed(step, group, warm_up_s, lambda: _far_below(watch, meter))
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begun_s = time.perf_counter()
        times = _run_for(step, group, share * seconds)
        ended_s = time.perf_counter()
        drawn = watch.between(begun_s, ended_s)
    return {
        **_identity(each, step),
        **_drawn(drawn, meter),
        "warm_up_s": share * warm_up_s,
        "seconds": ended_s - begun_s,
        "steps": len(times),
        "first_ns": 1e6 * statistics.median(first[:_FIRST]),
        "allocated_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
        "left_bytes": left,
        "finite": step.finite(),
        "times_ns": [1e6 * value for value in block_means(times)],
    }


def _warmed(step: ZooStep, group: Group, warm_up_s: float, far_below: Callable[[], bool]) -> tuple[list[float], float]:
    """Warms the card up; times of the steps, and the share of the usual seconds that is enough for this architecture."""
    times = _run_for(step, group, _SHORTER * warm_up_s)
    if far_below():
        return times, _SHORTER
    return times + _run_for(step, group, (1 - _SHORTER) * warm_up_s), 1.0


def _far_below(watch: Watch, meter: Meter) -> bool:
    """Whether the card drew far less than it may in the last second."""
    now_s = time.perf_counter()
    drawn, limit_w = watch.between(now_s - 1.0, now_s), meter.limit_w
    return drawn.power_w is not None and limit_w is not None and drawn.power_w < _FAR_BELOW * limit_w


def _run_for(step: ZooStep, group: Group, seconds: float) -> list[float]:
    """Steps for so long, three at least; milliseconds from each to the next."""
    marks, begun_s, count = StepMarks(group.device.type == "cuda"), time.perf_counter(), 0
    while count < 3 or time.perf_counter() - begun_s < seconds:
        step()
        marks.add()
        count += 1
    group.synchronize()
    return marks.times_ms()


def block_means(times_ms: list[float]) -> list[float]:
    """Means over blocks of steps, evenly chosen where there are many."""
    block = max(1, min(len(times_ms), round(_BLOCK_MS / max(statistics.median(times_ms), 1e-3))))
    means = [statistics.fmean(times_ms[at : at + block]) for at in range(0, len(times_ms) - block + 1, block)]
    return means[:: max(1, -(-len(means) // _KEPT))]


def _identity(each: Architecture, step: ZooStep) -> dict[str, Any]:
    return {
        "architecture": each.name,
        "group": each.group,
        "precision": each.precision,
        "layout": each.layout,
        "optimizer": each.optimizer,
        "parameters": sum(weight.numel() for weight in step.model.parameters()),
    }


def _drawn(drawn: CardUse, meter: Meter) -> dict[str, Any]:
    return {
        "power_w": drawn.power_w,
        "clock_mhz": None if drawn.clock_hz is None else drawn.clock_hz / 1e6,
        "temperature_c": drawn.temperature_c,
        "capped": drawn.capped,
        "limit_w": meter.limit_w,
        "uuid": meter.uuid,
    }
