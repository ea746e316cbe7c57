"""How much a gated stream accepts: by kind of entry, by size of arguments, over several streams.

A gate (a kernel that spins long enough) holds a stream while calls behind it are timed one by one. A call that takes more than
`BLOCKED_NS` was blocked by a full queue; `accepted` counts the calls before it, the gate not included.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from ctypes import c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np
from driver import ARGUMENT_BYTES, Enqueue, Gpu, now

GATE_NS = 150_000_000
SHORT_GATE_NS = 30_000_000
BLOCKED_NS = 5_000_000
MOST = 6000
JSON = dict[str, Any]


def fill(gpu: Gpu, *calls: Enqueue, most: int = MOST) -> JSON:
    """Makes the calls in turn until one blocks; says how many were accepted. The caller has closed the gate."""
    took: list[int] = []
    while len(took) < most:
        call = calls[len(took) % len(calls)]
        begun = now()
        status = call()
        took.append(now() - begun)
        if status:
            raise RuntimeError(f"call {len(took)} returned CUDA error {status}")
        if took[-1] > BLOCKED_NS:
            break
    blocked = took[-1] > BLOCKED_NS
    before = np.array(took[:-1] if blocked else took) / 1e3
    gpu.synchronize()
    gpu.drop_streams()
    return {
        "accepted": len(before),
        "blocked": blocked,
        "blocked_ms": round(took[-1] / 1e6, 3) if blocked else None,
        "median_call_us": round(float(np.median(before)), 2),
        "slowest_call_us": round(float(before.max()), 1),
        "slowest_call_at": int(before.argmax()),
    }


def gated(gpu: Gpu, streams: list[c_void_p], gate_ns: int = GATE_NS) -> c_void_p:
    """Holds the streams behind an event that comes after a running gate on a stream of its own; returns the event."""
    holder, event = gpu.stream(), gpu.event()
    gpu.spin(holder, gate_ns)()
    gpu.call("cuEventRecord", event, holder)
    for stream in streams:
        gpu.call("cuStreamWaitEvent", stream, event, c_uint(0))
    return event


def entries(gpu: Gpu) -> dict[str, Callable[[c_void_p], Enqueue]]:
    """Kinds of queue entries, each a function from a stream to the call that enqueues one."""
    host, device = gpu.pinned(1 << 20), gpu.memory(2 << 20)
    pageable = ctypes.create_string_buffer(1 << 20)
    done, scratch = gpu.event(), gpu.event()
    gpu.call("cuEventRecord", done, gpu.stream())
    kinds: dict[str, Callable[[c_void_p], Enqueue]] = {
        "kernel": lambda s: gpu.spin(s, 0),
        "event_record": lambda s: gpu.bind("cuEventRecord", scratch, s),
        "wait_for_finished_event": lambda s: gpu.bind("cuStreamWaitEvent", s, done, c_uint(0)),
        "wait_for_pending_event": lambda s: gpu.bind("cuStreamWaitEvent", s, gated(gpu, []), c_uint(0)),
    }
    for label, size in (("1KiB", 1 << 10), ("1MiB", 1 << 20)):
        n = c_size_t(size)
        kinds |= {
            f"memset_{label}": lambda s, n=n: gpu.bind("cuMemsetD8Async", c_uint64(device), c_ubyte(0), n, s),
            f"copy_h2d_pinned_{label}": lambda s, n=n: gpu.bind("cuMemcpyHtoDAsync_v2", c_uint64(device), c_void_p(host), n, s),
            f"copy_d2h_pinned_{label}": lambda s, n=n: gpu.bind("cuMemcpyDtoHAsync_v2", c_void_p(host), c_uint64(device), n, s),
            f"copy_d2d_{label}": lambda s, n=n: gpu.bind(
                "cuMemcpyDtoDAsync_v2", c_uint64(device), c_uint64(device + (1 << 20)), n, s
            ),
            f"copy_h2d_pageable_{label}": lambda s, n=n: gpu.bind("cuMemcpyHtoDAsync_v2", c_uint64(device), pageable, n, s),
        }
    return kinds


def capacity(gpu: Gpu) -> JSON:
    """What one stream accepts behind a running gate, by kind of entry, by pairs of kinds, and by size of arguments."""
    kinds = entries(gpu)
    found: JSON = {}

    def trial(name: str, *makers: Callable[[c_void_p], Enqueue]) -> None:
        stream = gpu.stream()
        calls = [make(stream) for make in makers]
        gpu.spin(stream, GATE_NS)()
        found[name] = fill(gpu, *calls)

    for name, make in kinds.items():
        trial(name, make)
    for name in sorted(set(kinds) - {"kernel", "copy_h2d_pageable_1MiB"}):
        trial(f"kernel+{name}", kinds["kernel"], kinds[name])
    for size in ARGUMENT_BYTES:
        block = (c_ubyte * size)()
        trial(f"kernel_arguments_{size}B", lambda s, size=size, block=block: gpu.kernel(s, f"args{size}", block))
    stream = gpu.stream()
    call = kinds["kernel"](stream)
    gated(gpu, [stream])
    found["kernel_behind_waiting_event"] = fill(gpu, call)
    default = kinds["kernel"](c_void_p(0))
    gpu.spin(c_void_p(0), GATE_NS)()
    found["kernel_on_default_stream"] = fill(gpu, default)
    return found


def streams(gpu: Gpu) -> JSON:
    """Whether the limit is per stream or per context."""
    found: JSON = {}
    for count in (1, 2, 3, 4, 8, 16, 32, 64):
        several = [gpu.stream() for _ in range(count)]
        calls = [gpu.spin(stream, 0) for stream in several]
        gated(gpu, several, 600_000_000)
        found[f"round_robin_over_{count}"] = fill(gpu, *calls, most=80_000)
    several = [gpu.stream() for _ in range(2)]
    block = (c_ubyte * 16384)()
    calls = [gpu.kernel(stream, "args16384", block) for stream in several]
    gated(gpu, several)
    found["round_robin_over_2_with_16KiB_of_arguments"] = fill(gpu, *calls)
    for name, priority in (("", 0), ("_of_high_priority", -5)):
        a, b = gpu.stream(), gpu.stream(priority)
        calls = [gpu.spin(stream, 0) for stream in (a, b)]
        gated(gpu, [a, b])
        for _ in range(500):
            calls[0]()
        found[f"500_on_a_then_b{name}"] = fill(gpu, calls[1])
    found["idle_b_while_a_is_full"] = beside_full(gpu, other_thread=False)
    found["idle_b_while_a_blocks_another_thread"] = beside_full(gpu, other_thread=True)
    return found


def beside_full(gpu: Gpu, *, other_thread: bool) -> JSON:
    """Launches on an idle stream while another stream's queue is full: call time, and when the kernel is done."""
    a = gpu.stream()
    gpu.spin(a, GATE_NS)()
    room = int(fill(gpu, gpu.spin(a, 0))["accepted"])
    a, b = gpu.stream(), gpu.stream()
    call, probe = gpu.spin(a, 0), gpu.spin(b, 0)
    begun = now()
    gpu.spin(a, GATE_NS)()
    for _ in range(room):
        call()

    def block() -> None:
        gpu.enter()
        call()

    thread = threading.Thread(target=block)
    if other_thread:
        thread.start()
        time.sleep(0.02)
    asked = now()
    probe()
    returned = now()
    gpu.call("cuStreamSynchronize", b)
    done = now()
    if other_thread:
        thread.join()
    gpu.synchronize()
    return {
        "call_ms": (returned - asked) / 1e6,
        "done_after_ms": (done - asked) / 1e6,
        "gate_had_left_ms": (GATE_NS - (asked - begun)) / 1e6,
    }


def sharing(gpu: Gpu) -> JSON:
    """Which of 16 streams wait for the first without being asked to, because they share its hardware queue.

    The first stream has a running gate; or a running gate and a kernel behind it; or a kernel that waits for an event.
    """
    return {case: {"delayed_streams": _delayed(gpu, case)} for case in ("running", "running+queued", "waiting_for_event")}


def _delayed(gpu: Gpu, case: str) -> list[int]:
    several, holder, event = [gpu.stream() for _ in range(16)], gpu.stream(), gpu.event()
    board = gpu.memory(16 * 17)
    gate = gpu.spin(holder if case == "waiting_for_event" else several[0], SHORT_GATE_NS, board)
    probes = [gpu.spin(stream, 0, board + 16 * (i + 1)) for i, stream in enumerate(several)]
    gate()
    if case == "waiting_for_event":
        gpu.call("cuEventRecord", event, holder)
        gpu.call("cuStreamWaitEvent", several[0], event, c_uint(0))
    for probe in probes[1:] if case == "running" else probes:
        probe()
    gpu.synchronize()
    starts = gpu.read(board, 34).reshape(17, 2)[:, 0]
    gpu.drop_streams()
    return [int(i) + 1 for i in np.flatnonzero(starts[2:] - starts[0] > SHORT_GATE_NS // 2)]
