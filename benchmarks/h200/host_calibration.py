"""Which short measurement tells how fast a host issues training steps, and what its two speeds are.

Cores are timed without a GPU first: alone, over time, beside a busy one, after sleeping, and by two threads in turns. Then, in
processes of their own (free to move, and pinned to four cores), bursts of single calls, as calibrations measured them until
then, and host-bound training steps (`host_bound_scripts`) in rounds of a fraction of a second, with the core of the thread that
issues, of the one that goes backward, and a burst of views beside every block of steps.

    PYTHONPATH=src:benchmarks/h200 python benchmarks/h200/host_calibration.py --out DIR

Needs torch, numpy, pyarrow and an NVIDIA GPU, about 100 s. `cores.jsonl` and `steps.jsonl` are written as it goes, the
calibrations' rows are in `host.parquet`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from processes import on_ranks

from steptime._calibrate.harness.ranks import Layout

PINNED_CORES = 4
CALIBRATION_S, CALIBRATION_PASSES = 3.0, 5
ROUNDS, ROUND_S, BLOCK_S = 3, 0.4, 0.02
WARM_UP, VIEWS = 12, 150
LIMIT_S = 60.0
_GO_ON = "while True: pass"


def current_core() -> int:
    """The core that this thread runs on."""
    return int(ctypes.CDLL(None).sched_getcpu())


def spin(turns: int = 4_000) -> float:
    """Nanoseconds of a fixed loop of plain Python."""
    begun = time.perf_counter_ns()
    total = 0
    for number in range(turns):
        total += number & 7
    return float(time.perf_counter_ns() - begun)


def series(seconds: float, action: Callable[[], float] = spin, rest: Callable[[], object] = lambda: None) -> list[list[float]]:
    """Microseconds of the loop and the core it ended on, over and over."""
    ends, result = time.perf_counter() + seconds, []
    while time.perf_counter() < ends:
        rest()
        result.append([round(action() / 1e3, 1), current_core()])
    return result


def in_turns(seconds: float) -> list[list[float]]:
    """The loop by two threads that wake each other, as the one that issues and the one that goes backward do."""
    asked, done = threading.Event(), threading.Event()
    found: list[list[float]] = []
    ends = time.perf_counter() + seconds

    def other() -> None:
        while True:
            asked.wait()
            asked.clear()
            if time.perf_counter() > ends:
                done.set()
                return
            found.append([round(spin() / 1e3, 1), current_core(), 1])
            done.set()

    thread = threading.Thread(target=other)
    thread.start()
    while thread.is_alive():
        found.append([round(spin() / 1e3, 1), current_core(), 0])
        asked.set()
        done.wait()
        done.clear()
    thread.join()
    return found


def cores(out: Path) -> None:
    """What one core does alone, beside another, over time and between rests."""
    every = sorted(os.sched_getaffinity(0))

    def note(what: str, value: Any) -> None:
        with (out / "cores.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "at_s": round(time.time(), 2), "value": value}) + "\n")

    siblings = {core: Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in every}
    note("siblings", {core: file.read_text().strip() for core, file in siblings.items() if file.exists()})
    note("cpuinfo", Path("/proc/cpuinfo").read_text().split("\n\n")[0])
    note("stat", Path("/proc/stat").read_text().split("\n")[: len(every) + 1])
    alone: dict[int, list[float]] = {core: [] for core in every}
    for _ in range(10):
        for core in every:
            os.sched_setaffinity(0, {core})
            spin(500)
            alone[core].append(round(min(spin(), spin()) / 1e3, 1))
    note("each core, ten times", alone)
    for core in (every[0], every[-1]):
        os.sched_setaffinity(0, {core})
        note(f"core {core} for a second", series(1.0))
    other = subprocess.Popen([sys.executable, "-c", _GO_ON])
    try:
        beside = {}
        os.sched_setaffinity(0, {every[0]})
        for core in every[1:]:
            os.sched_setaffinity(other.pid, {core})
            time.sleep(0.005)
            beside[core] = [round(spin() / 1e3, 1) for _ in range(30)]
        note(f"core {every[0]} beside a busy core", beside)
    finally:
        other.kill()
        other.wait()
    os.sched_setaffinity(0, set(every))
    note("anywhere", series(1.0))
    note("anywhere, between rests of 0.2 ms", series(1.0, rest=lambda: time.sleep(2e-4)))
    note("two threads in turns", in_turns(1.0))
    note("stat", Path("/proc/stat").read_text().split("\n")[: len(every) + 1])


class Watch:
    """The cores of this process's threads, and a file that gets a line per block."""

    def __init__(self, file: Path, **every_line: Any) -> None:
        self._file, self._every_line = file, every_line
        self._backward: list[Path] = []

    def backward_core(self) -> int | None:
        """Where the thread of the backward pass ran last; None before there is one."""
        if not self._backward:
            tasks = Path("/proc/self/task").iterdir()
            self._backward = [task / "stat" for task in tasks if (task / "comm").read_text().startswith("pt_autograd")]
        if not self._backward:
            return None
        return int(self._backward[0].read_text().rsplit(")", 1)[1].split()[36])

    def note(self, **content: Any) -> None:
        """Writes one line."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": round(time.time(), 2), **self._every_line, **content}) + "\n")


def work(group: Any, session: Any, plan: Mapping[str, Any]) -> None:
    """One process: a calibration's host part, then all steps in rounds."""
    begun = time.monotonic()
    if plan["cores"]:
        os.sched_setaffinity(0, set(plan["cores"]))
    import torch
    from host_bound_scripts import EXPLORED

    device = "cuda" if group.device_name.startswith("cuda") else "cpu"
    watch = Watch(Path(plan["out"]) / "steps.jsonl", process=plan["process"], cores=len(os.sched_getaffinity(0)))
    watch.note(what="start", seconds=round(time.monotonic() - begun, 2))
    bursts(group, session)
    watch.note(what="calibrated", seconds=round(time.monotonic() - begun, 2))
    square = torch.randn(32, 32, device=group.device)
    steps = {}
    for name, make in EXPLORED.items():
        steps[name] = make(device=device)
        for _ in range(WARM_UP if device == "cuda" else 1):
            steps[name]()
        group.synchronize()
    watch.note(what="built", seconds=round(time.monotonic() - begun, 2))
    for number in range(ROUNDS if device == "cuda" else 1):
        for name, step in steps.items():
            gc.collect()
            watch.note(what=name, round=number, blocks=blocks(step, square, watch, group))
    watch.note(what="end", seconds=round(time.monotonic() - begun, 2))


def bursts(group: Any, session: Any) -> None:
    """What calibrations measured of a host before they timed steps."""
    from steptime._calibrate.harness.session import Progress
    from steptime_lab.measure.host.bench import HostBench
    from steptime_lab.measure.host.representative import representative_probes
    from steptime_lab.measure.host.runner import Runner

    chosen = [probe for probe in representative_probes() if not probe.together]
    bench = HostBench(group, session, bursts=1, calls=100)
    runner = Runner(bench, session, CALIBRATION_S, passes=CALIBRATION_PASSES, source="calibration")
    runner.run(chosen, Progress("bursts", CALIBRATION_PASSES * len(chosen), session.budget, quiet=True))
    session.store.flush()


def blocks(step: Callable[[], None], square: Any, watch: Watch, group: Any) -> list[list[float | None]]:
    """Microseconds of a step and of a view, and both threads' cores, of each block; nothing is waited for between blocks."""
    begun = time.perf_counter()
    step()
    group.synchronize()
    steps = max(1, int(BLOCK_S / (time.perf_counter() - begun)))
    ends, result = time.perf_counter() + ROUND_S, []
    while True:
        start = time.perf_counter_ns()
        for _ in range(steps):
            step()
        stepped = time.perf_counter_ns()
        for _ in range(VIEWS):
            square.view(1024)
        viewed = time.perf_counter_ns()
        result.append([
            round((stepped - start) / steps / 1e3, 1), round((viewed - stepped) / VIEWS / 1e3, 3), current_core(),
            watch.backward_core(),
        ])  # fmt: skip
        if time.perf_counter() > ends:
            break
    waited = time.perf_counter_ns()
    group.synchronize()
    result.append([round((time.perf_counter_ns() - waited) / 1e3, 1), None, None, None])  # what the device was behind
    return result


def main() -> None:
    """Cores first, then the processes one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.absolute()
    cores(out)
    pinned = sorted(os.sched_getaffinity(0))[:PINNED_CORES]
    for process, only in enumerate(([], pinned, [])):
        plan = {"process": process, "cores": only, "out": str(out)}
        on_ranks(__file__, out, Layout(1, False, options.device), limit_s=LIMIT_S, **plan)


if __name__ == "__main__":
    main()
