"""The launch queue as PyTorch meets it (no profiler), then latencies, gaps and returns as a Kineto trace shows them.

python3 launch_latency.py --file FILE [--unprofiled]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from queue_costs import spread
from results_file import recipe, store
from torch.profiler import ProfilerActivity, profile, record_function

# 0.15 s at 1.98 GHz
GATE_CYCLES = 300_000_000
BLOCKED_NS = 5_000_000
JSON = dict[str, Any]
Event = dict[str, Any]


def accepted(enqueue: Callable[[], object], most: int = 4000) -> JSON:
    """How many calls pass behind a gate before one blocks."""
    enqueue()
    torch.cuda.synchronize()
    torch.cuda._sleep(GATE_CYCLES)
    took: list[int] = []
    while len(took) < most:
        begun = time.perf_counter_ns()
        enqueue()
        took.append(time.perf_counter_ns() - begun)
        if took[-1] > BLOCKED_NS:
            break
    torch.cuda.synchronize()
    blocked = took[-1] > BLOCKED_NS
    return {"accepted": len(took) - blocked, "blocked": blocked, "call_us": spread([t / 1e3 for t in took[:-1]])}


def graph_of(x: torch.Tensor, kernels: int, branches: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of that many kernels on one tensor, in a chain or in parallel branches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for _ in range(branches):
            side = torch.cuda.Stream() if branches > 1 else main
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(kernels // branches):
                    x.add_(1)
            main.wait_stream(side)
    return graph


def queue_of_torch() -> JSON:
    """What a gated stream accepts, by PyTorch call."""
    x = torch.ones(256, device="cuda")
    many = [torch.ones(256, device="cuda") for _ in range(100)]
    a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: x.add_(1),
        "matmul": lambda: torch.mm(a, a, out=out),
        "foreach_add_of_100_tensors": lambda: torch._foreach_add_(many, 1.0),
    }
    for kernels, branches in ((1, 1), (10, 1), (100, 1), (1000, 1), (100, 4)):
        graph = graph_of(x, kernels, branches)
        calls[f"graph_of_{kernels}_kernels_in_{branches}_branches"] = graph.replay
    return {name: accepted(call) for name, call in calls.items()}


def sharing_of_torch() -> JSON:
    """Which streams of PyTorch's pools wait for work of the default stream that they have no reason to wait for."""
    driver = ctypes.CDLL("libcuda.so.1")
    x = torch.ones(256, device="cuda")
    found: JSON = {"default_stream_id": _stream_id(driver, torch.cuda.default_stream())}
    for priority in (0, -1):
        streams = [torch.cuda.Stream(priority=priority) for _ in range(32)]
        ended = [torch.cuda.Event(enable_timing=True) for _ in streams]
        begun = torch.cuda.Event(enable_timing=True)
        for stream in streams:
            with torch.cuda.stream(stream):
                x.add(1)
        torch.cuda.synchronize()
        begun.record()
        torch.cuda._sleep(60_000_000)
        x.add_(1)
        for stream, event in zip(streams, ended, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1000)
                event.record(stream)
        torch.cuda.synchronize()
        late = [s for s, e in zip(streams, ended, strict=True) if begun.elapsed_time(e) > 10]
        ids = [[_stream_id(driver, stream) for stream in group] for group in (streams, late)]
        found[f"priority_{priority}"] = {"streams": ids[0], "delayed": ids[1]}
    return found


def _stream_id(driver: ctypes.CDLL, stream: torch.cuda.Stream) -> int:
    number = ctypes.c_ulonglong()
    driver.cuStreamGetId(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(number))
    return number.value


def repeat(count: int, *steps: Callable[[], object], gate: bool = False) -> Callable[[], None]:
    """A scene that takes the steps in turn, from an idle device or behind a gate of about 5 ms."""

    def run() -> None:
        torch.cuda.synchronize()
        if gate:
            torch.cuda._sleep(10_000_000)
        for _ in range(count):
            for step in steps:
                step()

    return run


def work() -> None:
    """A kernel of about 0.2 ms."""
    torch.cuda._sleep(400_000)


def gap_scenes() -> dict[str, Callable[[], None]]:
    """Launches on an idle stream, and kernels that follow each other closely."""
    x = torch.ones(1024, device="cuda")
    big = torch.randn(16 << 20, device="cuda")
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()

    def add() -> object:
        return x.add_(1)

    def mm() -> object:
        return torch.mm(a, a, out=out)

    def cross() -> None:
        side.wait_stream(here)
        with torch.cuda.stream(side):
            mm()
        here.wait_stream(side)
        mm()

    return {
        "idle_launch": repeat(100, add, torch.cuda.synchronize),
        "gap_add": repeat(200, add, gate=True),
        "gap_mul_64MiB": repeat(50, lambda: big.mul_(1.0001), gate=True),
        "gap_mm": repeat(100, mm, gate=True),
        "gap_mm_add": repeat(100, mm, add, gate=True),
        "gap_zero_add": repeat(100, x.zero_, add, gate=True),
        "gap_d2d_add": repeat(100, lambda: x.copy_(big[:1024]), add, gate=True),
        "cross_stream": repeat(50, cross, gate=True),
    }


def wait_scenes() -> dict[str, Callable[[], None]]:
    """Synchronisations and copies behind a kernel."""
    here, one = torch.cuda.current_stream(), torch.ones(1, device="cuda")

    def recorded(event: torch.cuda.Event) -> Callable[[], None]:
        def run() -> None:
            event.record()
            event.synchronize()

        return run

    found: dict[str, Callable[[], None]] = {
        "sync_stream": repeat(50, work, here.synchronize),
        "sync_event": repeat(50, work, recorded(torch.cuda.Event())),
        "sync_blocking_event": repeat(50, work, recorded(torch.cuda.Event(blocking=True))),
        "sync_device": repeat(50, work, torch.cuda.synchronize),
        "item": repeat(50, work, one.item),
        "cpu_4B": repeat(50, work, one.cpu),
    }
    for label, size in (("4KiB", 1 << 10), ("1MiB", 256 << 10), ("16MiB", 4 << 20)):
        device = torch.randn(size, device="cuda")
        pageable, pinned = torch.ones(size), torch.ones(size).pin_memory()
        found |= {
            f"d2h_pageable_{label}": repeat(20, work, lambda d=device, h=pageable: h.copy_(d)),
            f"d2h_pinned_async_{label}": repeat(20, work, lambda d=device, h=pinned: h.copy_(d, non_blocking=True)),
            f"h2d_pageable_{label}": repeat(20, work, lambda d=device, h=pageable: d.copy_(h)),
            f"h2d_pageable_async_{label}": repeat(20, work, lambda d=device, h=pageable: d.copy_(h, non_blocking=True)),
            f"h2d_pinned_async_{label}": repeat(20, work, lambda d=device, h=pinned: d.copy_(h, non_blocking=True)),
        }
    return found


def trace_of(found: dict[str, Callable[[], None]]) -> list[Event]:
    """Runs every scene once to warm up, then under the profiler."""
    for run in found.values():
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for name, run in found.items():
            with record_function(f"scene:{name}"):
                run()
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def read_scene(name: str, events: list[Event]) -> JSON:
    """Launch, gap and return times of one scene, from the runtime calls inside its range and the device work they launched."""
    span = next(e for e in events if e.get("cat") == "user_annotation" and e["name"] == f"scene:{name}")
    calls = [
        e for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and float(span["ts"]) <= float(e["ts"]) <= _end(span)
    ]  # fmt: skip
    calls.sort(key=lambda e: float(e["ts"]))
    work = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    pairs = [(c, work[c["args"]["correlation"]]) for c in calls if c["args"].get("correlation") in work]
    device = sorted((w for _, w in pairs), key=lambda w: float(w["ts"]))
    waits = [c for c in calls[:-1] if "Synchronize" in c["name"]]
    returns = []
    for wait in waits:
        ended = [_end(w) for c, w in pairs if float(c["ts"]) < float(wait["ts"])]
        if ended and max(ended) > float(wait["ts"]):
            returns.append(_end(wait) - max(ended))
    copies = [(c, w) for c, w in pairs if w["cat"] == "gpu_memcpy"]
    return {
        "apis": sorted({c["name"] for c in calls}),
        "call_us": spread([float(c["dur"]) for c, _ in pairs]),
        "call_begin_to_start_us": spread([float(w["ts"]) - float(c["ts"]) for c, w in pairs]),
        "call_end_to_start_us": spread([float(w["ts"]) - _end(c) for c, w in pairs]),
        "gap_us": spread([float(n["ts"]) - _end(p) for p, n in pairwise(device[1:])]),
        "sync_return_after_end_us": spread(returns),
        "copy_call_us": spread([float(c["dur"]) for c, _ in copies]),
        "copy_device_us": spread([float(w["dur"]) for _, w in copies]),
        "copy_return_after_end_us": spread([_end(c) - _end(w) for c, w in copies]),
        "copy_kinds": sorted({w["name"] for _, w in copies}),
    }


def main() -> None:
    """Reads the command line and runs both parts: the unprofiled one first, because profiling slows later launches."""
    parser = argparse.ArgumentParser(description="Measures launches as PyTorch and its profiler see them.")
    parser.add_argument("--file", type=Path, default=Path("out/launch_latency.json"))
    parser.add_argument("--unprofiled", action="store_true", help="leave out what needs the profiler")
    options = parser.parse_args()
    results: JSON = {"recipe": recipe(), "sharing_of_torch": sharing_of_torch(), "queue_of_torch": queue_of_torch()}
    store(options.file, results)
    if options.unprofiled:
        return
    found = {**gap_scenes(), **wait_scenes()}
    events = trace_of(found)
    results["profiled"] = {name: read_scene(name, events) for name in found}
    store(options.file, results)


if __name__ == "__main__":
    main()
