"""Records compiled and graphed training steps: Kineto traces with and without shapes, execution traces, unprofiled step times.

    python3 record_compiled.py [--seconds 125] [--cases a,b] [--cpu]     writes $OUT/recordings.tar and $OUT/steps.jsonl

All cases (`compiled_cases.py`) compile at the same time in processes of their own; then each in turn is timed and recorded,
alone on the GPU. Needs torch with CUDA and Triton, and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from compiled_cases import CASES, CPU

WARM_UP, ROUNDS = 6, 5


def synchronize():
    import torch

    if not CPU:
        torch.cuda.synchronize()


def worker(name, folder, gate):
    import torch

    torch.manual_seed(0)
    build, arguments = CASES[name]
    step = build(**arguments)
    for _ in range(WARM_UP):
        step()
    synchronize()
    (gate / f"{name}.ready").touch()
    while not (gate / f"{name}.go").exists():
        time.sleep(0.01)
    for _ in range(3):
        step()
    synchronize()
    gc.collect()
    gc.disable()
    begun = time.perf_counter()
    step()
    synchronize()
    steps = max(8, min(60, int(0.25 / max(time.perf_counter() - begun, 1e-4)))) if not CPU else 2
    times = []
    for _ in range(ROUNDS):
        synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize()
        times.append(round((time.perf_counter() - begun) / steps * 1e3, 6))
    memory = (
        {} if CPU else {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    )
    result = {
        "case": name,
        "arguments": repr(arguments),
        "steps_per_measurement": steps,
        "measured_step_ms_unprofiled": times,
        **memory,
        "torch": torch.__version__,
        "device": "cpu" if CPU else torch.cuda.get_device_name(),
    }
    (folder / "measured.json").write_text(json.dumps(result))
    record(step, folder, "shapes", record_shapes=True)
    record(step, folder, "plain", record_shapes=False)
    record(step, folder, "both", record_shapes=True, execution=True)
    shutil.make_archive(
        str(folder / "sources"), "gztar", os.environ["TORCHINDUCTOR_CACHE_DIR"] + "_sources"
    ) if sources() else None


def sources():
    """Collects the generated sources; whether there are any."""
    where = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    to = Path(f"{where}_sources")
    to.mkdir(exist_ok=True)
    found = [file for file in where.rglob("*.py") if "def call(" in file.read_text() or "class Runner" in file.read_text()]
    for file in found:
        shutil.copyfile(file, to / file.name)
    return bool(found)


def record(step, folder, kind, *, record_shapes, execution=False):
    from torch.profiler import ProfilerActivity, profile, schedule

    observer, at = None, folder / kind
    at.mkdir()
    if execution:
        from torch.profiler import ExecutionTraceObserver

        observer = ExecutionTraceObserver()
        observer.register_callback(str(at / "rank0.et.json"))
        if hasattr(observer, "set_extra_resource_collection"):
            observer.set_extra_resource_collection(True)
    raw = at / "raw.json"
    activities = [ProfilerActivity.CPU] + ([] if CPU else [ProfilerActivity.CUDA])
    with profile(
        activities=activities,
        schedule=schedule(wait=1, warmup=2, active=3, repeat=1),
        record_shapes=record_shapes,
        execution_trace_observer=observer,
        on_trace_ready=lambda p: p.export_chrome_trace(str(raw)),
    ) as profiler:
        for _ in range(6):
            step()
            profiler.step()
    synchronize()
    pack(raw, at / "rank0.kineto.json.gz")
    if execution and (at / "rank0.et.json").exists():
        pack(at / "rank0.et.json", at / "rank0.et.json.gz")
    if (resources := at / "rank0.et_resources").is_dir():
        shutil.make_archive(str(resources), "gztar", resources)
        shutil.rmtree(resources)


def pack(raw, to):
    with raw.open("rb") as source, gzip.open(to, "wb", 6) as target:
        shutil.copyfileobj(source, target)
    raw.unlink()


class Cases:
    """The processes of all cases, which compile together and are then called up one by one."""

    def __init__(self, names, scratch, begun):
        self.scratch, self.begun, self.gate = scratch, begun, scratch / "gate"
        self.gate.mkdir()
        self.running = {name: self._started(name) for name in names}

    def _started(self, name):
        folder = self.scratch / name
        folder.mkdir()
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / f"{name}_cache"),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "2",
            "TRITON_CACHE_DIR": str(self.scratch / f"{name}_triton"),
        }
        command = [sys.executable, __file__, "--worker", name, str(folder), str(self.gate)] + (["--cpu"] if CPU else [])
        return subprocess.Popen(command, env=environment, stdout=(folder / "log.txt").open("w"), stderr=subprocess.STDOUT)

    def ready(self, name):
        return (self.gate / f"{name}.ready").exists() or self.running[name].poll() is not None

    def until(self, reached, seconds):
        while not reached() and time.monotonic() - self.begun < seconds:
            time.sleep(0.05)

    def record(self, name, seconds):
        """Lets one of them time and record its step; what it came to."""
        (self.gate / f"{name}.go").touch()
        process, folder = self.running[name], self.scratch / name
        self.until(lambda: process.poll() is not None, seconds)
        row = {"case": name, "ended": process.poll(), "at_s": round(time.monotonic() - self.begun, 1)}
        if row["ended"] is None:
            process.kill()
        if (folder / "measured.json").exists():
            row = {**json.loads((folder / "measured.json").read_text()), **row}
        return row if row["ended"] == 0 else {**row, "log": (folder / "log.txt").read_text()[-1500:]}


def keep(row, folder, out):
    """Adds what a case came to to the results."""
    with (out / "steps.jsonl").open("a") as steps:
        steps.write(json.dumps(row) + "\n")
    with tarfile.open(out / "recordings.tar", "a") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.stat().st_size < 3 << 20 and (out / "recordings.tar").stat().st_size < 14 << 20:
                archive.add(file, f"{row['case']}/{file.relative_to(folder)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=125)
    parser.add_argument("--compiling", type=float, default=75, help="seconds until cases that are ready are recorded")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--worker", nargs=3)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker[0], *map(Path, given.worker[1:]))
        return
    out, scratch = Path(os.environ.get("OUT", "out")), Path(tempfile.mkdtemp())
    out.mkdir(exist_ok=True)
    left = given.cases.split(",")
    cases = Cases(left, scratch, time.monotonic())
    cases.until(lambda: all(map(cases.ready, left)), given.compiling)
    while left and time.monotonic() - cases.begun < given.seconds:
        name = next(filter(cases.ready, left), None)
        if name is None:
            time.sleep(0.1)
            continue
        left.remove(name)
        row = cases.record(name, given.seconds + 15)
        keep(row, scratch / name, out)
        times = sorted(row.get("measured_step_ms_unprofiled", [])) or [float("nan")]
        print(f"{name:28s} ended {row['ended']}  {times[len(times) // 2]:9.3f} ms  at {row['at_s']} s {row.get('log', '')}")
    for name in left:
        cases.running[name].kill()
        print(f"{name}: not reached")


if __name__ == "__main__":
    main()
