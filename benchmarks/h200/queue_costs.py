"""What the device and the driver add around kernels, without a profiler: latencies from stamps the kernels leave themselves."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt
from driver import Enqueue, Gpu, now

JSON = dict[str, Any]


def spread(values: Any) -> list[float] | None:
    """Minimum, 10 %, median, 90 %, maximum."""
    return [round(float(x), 2) for x in np.percentile(values, [0, 10, 50, 90, 100])] if len(values) else None


def launch_and_wait(
    gpu: Gpu,
    stream: c_void_p,
    kernel_ns: int,
    count: int,
    wait: Enqueue,
    before: Enqueue | None = None,
    pause: Callable[[], None] | None = None,
) -> JSON:
    """Launches one kernel at a time on an idle stream and waits for it; all on the host's clock, in microseconds."""
    board = gpu.memory(16 * count)
    calls = [gpu.spin(stream, kernel_ns, board + 16 * i) for i in range(count)]
    first = gpu.clocks()
    times = np.zeros((count, 3), dtype=np.int64)
    for i, call in enumerate(calls):
        if pause:
            pause()
        begun = now()
        call()
        launched = now()
        if before:
            before()
        wait()
        times[i] = begun, launched, now()
    last = gpu.clocks()
    stamps = first.to_host(last, gpu.read(board, 2 * count).reshape(count, 2))
    return {
        "call_us": spread((times[:, 1] - times[:, 0]) / 1e3),
        "call_begin_to_start_us": spread((stamps[:, 0] - times[:, 0]) / 1e3),
        "call_end_to_start_us": spread((stamps[:, 0] - times[:, 1]) / 1e3),
        "end_to_return_us": spread((times[:, 2] - stamps[:, 1]) / 1e3),
        "clock_round_trip_us": first.round_trip_ns / 1e3,
    }


def busy(duration_ns: int) -> None:
    """Keeps the host busy without touching the device."""
    until = now() + duration_ns
    while now() < until:
        pass


def latency(gpu: Gpu) -> JSON:
    """Idle launch latency after pauses of the device, gaps of queued kernels, and what a wait for another stream adds."""
    a, b = gpu.stream(), gpu.stream()
    finish = gpu.bind("cuStreamSynchronize", a)
    pauses: dict[str, Callable[[], None]] = {
        "no_pause": lambda: None,
        "1ms_host_busy": lambda: busy(1_000_000),
        "1ms_host_asleep": lambda: time.sleep(0.001),
        "20ms_host_busy": lambda: busy(20_000_000),
        "20ms_host_asleep": lambda: time.sleep(0.02),
    }
    found: JSON = {
        f"idle_after_{name}": launch_and_wait(gpu, a, 2000, 40 if "20ms" in name else 200, finish, pause=pause)
        for name, pause in pauses.items()
    }
    found["globaltimer_step_ns"] = int(np.gcd.reduce(np.diff(_stamps(gpu, [a], 1000, 300).ravel())))
    queued = _stamps(gpu, [a], 2000, 500)
    found["gap_of_queued_kernels_us"] = spread((queued[1:, 0] - queued[:-1, 1]) / 1e3)
    crossing = _stamps(gpu, [a, b], 20_000, 200)
    found["gap_across_streams_us"] = spread((crossing[1:, 0] - crossing[:-1, 1]) / 1e3)
    gpu.drop_streams()
    return found


def _stamps(gpu: Gpu, streams: list[c_void_p], kernel_ns: int, count: int) -> npt.NDArray[np.int64]:
    """Start and end of kernels behind a gate, each after the one before, in turn over the streams."""
    board = gpu.memory(16 * count)
    calls = [gpu.spin(streams[i % len(streams)], kernel_ns, board + 16 * i) for i in range(count)]
    events = [gpu.event() for _ in range(count)]
    gpu.spin(streams[0], 10_000_000)()
    for i, call in enumerate(calls):
        if len(streams) > 1 and i:
            gpu.call("cuStreamWaitEvent", streams[i % len(streams)], events[i - 1], c_uint(0))
        call()
        if len(streams) > 1:
            gpu.call("cuEventRecord", events[i], streams[i % len(streams)])
    gpu.synchronize()
    return gpu.read(board, 2 * count).reshape(count, 2)


def synchronisation(gpu: Gpu) -> JSON:
    """How long after a kernel's end each synchronising call returns."""
    stream = gpu.stream()
    plain, blocking = gpu.event(2), gpu.event(3)
    ways: dict[str, tuple[Enqueue, Enqueue | None]] = {
        "stream": (gpu.bind("cuStreamSynchronize", stream), None),
        "event": (gpu.bind("cuEventSynchronize", plain), gpu.bind("cuEventRecord", plain, stream)),
        "blocking_event": (gpu.bind("cuEventSynchronize", blocking), gpu.bind("cuEventRecord", blocking, stream)),
        "context": (gpu.bind("cuCtxSynchronize"), None),
    }
    return {
        f"{way}_after_{us}us": launch_and_wait(gpu, stream, us * 1000, count, wait, before)["end_to_return_us"]
        for way, (wait, before) in ways.items()
        for us, count in ((10, 100), (200, 100), (5000, 30))
    }


def copies(gpu: Gpu) -> JSON:
    """How long copy calls hold the host on an idle stream and behind a kernel of 3 ms, by direction, host memory and size."""
    largest = 16 << 20
    device, pinned, pageable = gpu.memory(largest), gpu.pinned(largest), ctypes.create_string_buffer(largest)
    stream, default = gpu.stream(), c_void_p(0)
    found: JSON = {}
    for memory, host in (("pinned", c_void_p(pinned)), ("pageable", ctypes.cast(pageable, c_void_p))):
        for size in (4, 4 << 10, 64 << 10, (64 << 10) + 4, 1 << 20, largest):
            n, d = c_size_t(size), c_uint64(device)
            calls: dict[str, tuple[Callable[[], int], c_void_p]] = {
                "h2d_async": (gpu.bind("cuMemcpyHtoDAsync_v2", d, host, n, stream), stream),
                "d2h_async": (gpu.bind("cuMemcpyDtoHAsync_v2", host, d, n, stream), stream),
                "h2d": (gpu.bind("cuMemcpyHtoD_v2", d, host, n), default),
                "d2h": (gpu.bind("cuMemcpyDtoH_v2", host, d, n), default),
            }
            for name, (call, behind) in calls.items():
                found[f"{name}_{memory}_{size}B"] = {
                    "idle": _held(gpu, call, None, 20),
                    "behind_3ms": _held(gpu, call, gpu.spin(behind, 3_000_000), 5),
                }
    gpu.drop_streams()
    return found


def _held(gpu: Gpu, call: Enqueue, ahead: Enqueue | None, count: int) -> JSON:
    """Median microseconds of the call, and from its begin until the device is done."""
    times = np.zeros((count, 2))
    for i in range(count):
        gpu.synchronize()
        if ahead:
            ahead()
        begun = now()
        call()
        returned = now()
        gpu.synchronize()
        times[i] = returned - begun, now() - begun
    call_us, done_us = np.median(times, axis=0) / 1e3
    return {"call_us": round(float(call_us), 1), "done_us": round(float(done_us), 1)}
