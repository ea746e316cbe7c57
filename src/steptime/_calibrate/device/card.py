"""What this machine's card does in a few seconds: a product from rest and for long, a pass over memory, power and clock."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from steptime._calibrate.device.meter import Meter
from steptime._files import write_whole
from steptime._platforms.machine_costs import MEMORY_CALL, PRODUCT_CALL
from steptime._units import NS_PER_MS

# Of all seconds, those in which products run without a pause; the second half of them counts.
_SUSTAINED = 0.6
_FROM_REST, _REST_S = 5, 1.0
_AHEAD = 16


def measure_card(file: Path, gpu: str, seconds: float) -> None:
    """Writes what the current device does, as `MachineCosts` takes it, to a file."""
    left, right = (torch.randn(tensor.shape, device="cuda").to(torch.bfloat16) for tensor in PRODUCT_CALL.tensors())
    product = torch.empty((left.shape[0], right.shape[1]), dtype=left.dtype, device="cuda")
    (shape,) = (tensor.shape for tensor in MEMORY_CALL.tensors())
    read, written = torch.randn(shape, device="cuda"), torch.empty(shape, device="cuda")
    meter = Meter(gpu)

    def multiply() -> None:
        torch.mm(left, right, out=product)

    def move() -> None:
        torch.abs(read, out=written)

    for run in (multiply, move):
        run()
    rested = _times_ns(multiply, _FROM_REST, rest_s=_REST_S)
    moved = _times_ns(move, 20, rest_s=0.0)
    with meter.watching() as watch:
        begun = time.perf_counter()
        times_ns = _loop(multiply, seconds * _SUSTAINED)
        torch.cuda.synchronize()
        ended = time.perf_counter()
        drawn = watch.between((begun + ended) / 2, ended)
    content: dict[str, Any] = {
        # The first of them wakes the card up.
        "product_ns": statistics.median(rested[1:]),
        "sustained_ns": statistics.median(times_ns[len(times_ns) // 2 :]),
        "memory_ns": statistics.median(moved),
        "power_w": drawn.power_w,
        "clock_hz": drawn.clock_hz,
        "capped": drawn.capped,
        "temperature_c": drawn.temperature_c,
        "limit_w": meter.limit_w,
        "uuid": meter.uuid,
    }
    write_whole(file, json.dumps(content))


def _mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _times_ns(run: Callable[[], None], count: int, rest_s: float) -> list[float]:
    torch.cuda.synchronize()
    time.sleep(rest_s)
    marks = [_mark()]
    for _ in range(count):
        run()
        marks.append(_mark())
    torch.cuda.synchronize()
    return [float(first.elapsed_time(second)) * NS_PER_MS for first, second in pairwise(marks)]


def _loop(run: Callable[[], None], seconds: float) -> list[float]:
    """Without a pause, queued a little ahead."""
    marks, ends = [_mark()], time.perf_counter() + seconds
    while time.perf_counter() < ends:
        run()
        marks.append(_mark())
        if len(marks) > _AHEAD:
            marks[-_AHEAD].synchronize()
    torch.cuda.synchronize()
    return [float(first.elapsed_time(second)) * NS_PER_MS for first, second in pairwise(marks)]
