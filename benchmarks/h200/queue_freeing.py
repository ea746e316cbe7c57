"""What ends the wait of a blocked launch."""

from __future__ import annotations

from ctypes import c_uint
from typing import Any

import numpy as np
from driver import Gpu, now
from queue_costs import spread

JSON = dict[str, Any]


def freeing(gpu: Gpu) -> JSON:
    """What a blocked launch waits for: equal kernels of a known length behind a full queue, stamped on the device."""
    steady = {f"kernels_of_{us}us": _steady(gpu, us * 1000, count) for us, count in ((5, 6000), (50, 4000), (500, 1600))}
    return {**steady, "start_or_end": start_or_end(gpu)}


def start_or_end(gpu: Gpu) -> JSON:
    """Whether a slot is freed when its kernel starts or when it ends.

    The stream runs a gate (0 to 10 ms), waits for another stream (until 60 ms), runs a long kernel (60 to 100 ms), then short
    ones. Blocked launches that return at 10 and 100 ms say "end", at 60 and 100 ms "start".
    """
    stream, other, event = gpu.stream(), gpu.stream(), gpu.event()
    gate, hold, long = gpu.spin(stream, 10_000_000), gpu.spin(other, 60_000_000), gpu.spin(stream, 40_000_000)
    short = gpu.spin(stream, 0)
    begun = now()
    hold()
    gpu.call("cuEventRecord", event, other)
    gate()
    gpu.call("cuStreamWaitEvent", stream, event, c_uint(0))
    long()
    blocked = []
    for i in range(1100):
        called = now()
        short()
        returned = now()
        if returned - called > 1_000_000:
            blocked.append({"accepted_before": i, "call_ms": (called - begun) / 1e6, "return_ms": (returned - begun) / 1e6})
    gpu.synchronize()
    gpu.drop_streams()
    return {"blocked": blocked}


def _steady(gpu: Gpu, kernel_ns: int, count: int) -> JSON:
    stream, board = gpu.stream(), gpu.memory(16 * count)
    calls = [gpu.spin(stream, kernel_ns, board + 16 * i) for i in range(count)]
    before = gpu.clocks()
    times = np.zeros((count, 2), dtype=np.int64)
    gpu.spin(stream, 20_000_000)()
    for i, call in enumerate(calls):
        begun = now()
        call()
        times[i] = begun, now()
    gpu.synchronize()
    after = gpu.clocks()
    gpu.drop_streams()
    stamps = before.to_host(after, gpu.read(board, 2 * count).reshape(count, 2))
    took = times[:, 1] - times[:, 0]
    # A launch by itself costs 4 to 9 us here.
    blocked = np.flatnonzero(took > max(12_000, kernel_ns // 5))
    later = blocked[blocked > np.argmax(took)]  # the launch that met the gate took longest
    returned = times[later, 1]
    ended = np.searchsorted(stamps[:, 1], returned)
    started = np.searchsorted(stamps[:, 0], returned)
    last_end = stamps[np.maximum(ended - 1, 0), 1]
    return {
        "blocked_calls": len(later),
        "first_blocked_at": later[:5].tolist(),
        "calls_from_one_blocked_to_the_next": spread(np.diff(later)),
        "blocked_us": spread(took[later] / 1e3),
        "unblocked_us_while_full": spread(np.delete(took, blocked)[1100:] / 1e3),
        "not_ended_at_return_this_one_included": spread(later + 1 - ended),
        "not_started_at_return_this_one_included": spread(later + 1 - started),
        "return_after_last_end_us": spread((returned - last_end) / 1e3),
        "kernel_us": spread((stamps[:, 1] - stamps[:, 0]) / 1e3),
        "gap_us": spread((stamps[1:, 0] - stamps[:-1, 1]) / 1e3),
        "clock_round_trip_ns": before.round_trip_ns,
        "sample_blocked_us": [[int(i), round(float(took[i]) / 1e3, 1)] for i in later[:60]],
    }
