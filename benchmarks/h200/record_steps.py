"""Records ground truth for replay: Kineto traces of all ranks, and step times of clean processes that never profiled.

    python3 record_steps.py --out DIR [--cases a,b] [--timed-only c,d] [--rounds 2]
        writes DIR/<case>.tar with rank<r>.kineto.json.gz and measured.json, and DIR/steps.json

Cases of several ranks run on one GPU under CUDA MPS, with NCCL on loopback sockets. Timed groups run before and after the
profiled ones, so that a drift of the machine shows as spread.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from processes import pin, together
from results_file import recipe, store

from steptime._calibrate.harness.ranks import mps, share

WARM_UP_STEPS = 15
ACTIVE_STEPS = 3
REPEATS = 3
JSON = dict[str, Any]


def join_group() -> Any:
    """The device of this rank; with several ranks, also its process group."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("nccl", device_id=device)
    return device


def time_cases(names: list[str], file: Path) -> None:
    """Times the cases one after another, unsynchronised steps divided by their number, the slowest rank's time."""
    import torch
    import torch.distributed as dist
    from all_cases import CASES

    device = join_group()
    times: JSON = {}
    for name in names:
        step = CASES[name].build(CASES[name].config, device)
        for _ in range(WARM_UP_STEPS):
            step()
        gc.collect()
        gc.disable()
        times[name] = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            if dist.is_initialized():
                dist.barrier()
                torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(CASES[name].steps):
                step()
            torch.cuda.synchronize()
            taken = torch.tensor((time.perf_counter() - begun) / CASES[name].steps * 1e3, device=device, dtype=torch.float64)
            if dist.is_initialized():
                dist.all_reduce(taken, dist.ReduceOp.MAX)
            times[name].append(round(float(taken), 6))
        gc.enable()
        del step
        torch.cuda.empty_cache()
        if os.environ["RANK"] == "0":
            store(file, times)
    if dist.is_initialized():
        dist.destroy_process_group()


def profile_case(name: str, folder: Path) -> None:
    """Profiles three steps of one case and keeps the trace without Python frames."""
    import torch.distributed as dist
    from all_cases import CASES
    from torch.profiler import ProfilerActivity, profile, schedule

    device = join_group()
    step = CASES[name].build(CASES[name].config, device)
    for _ in range(WARM_UP_STEPS):
        step()
    gc.collect()
    gc.disable()
    plan = schedule(wait=1, warmup=3, active=ACTIVE_STEPS, repeat=1)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, schedule=plan, record_shapes=True, with_stack=False) as profiler:
        for _ in range(4 + ACTIVE_STEPS):
            step()
            profiler.step()
    raw = folder / f"raw{os.environ['RANK']}.json"
    profiler.export_chrome_trace(str(raw))
    write_small(raw, folder / f"rank{os.environ['RANK']}.kineto.json.gz")
    raw.unlink()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def write_small(raw: Path, small: Path) -> None:
    """The trace without Python frames, packed; the same trace gives the same bytes."""
    trace = json.loads(raw.read_text(encoding="utf-8"))
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") != "python_function"]
    trace["traceName"] = small.name
    with small.open("wb") as target, gzip.GzipFile("", "wb", 9, target, mtime=0) as packed:
        packed.write(json.dumps(trace, separators=(",", ":")).encode())


def profiled_steps_ms(files: list[Path]) -> list[float]:
    """Distance of the ends of consecutive steps; a step ends when, on every rank, its host and device work has ended."""
    ends: dict[str, float] = {}
    begins: list[float] = []
    for file in files:
        trace = json.loads(gzip.decompress(file.read_bytes()))
        # Microseconds after `baseTimeNanoseconds`, which may differ from process to process.
        base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
        events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
        steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
        calls = {e["args"].get("correlation"): e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
        work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        for step in steps:
            begin, end = step["ts"], step["ts"] + step["dur"]
            begins.append(base + begin)
            for event in work:
                call = calls.get(event["args"].get("correlation"))
                if call and begin <= call["ts"] < step["ts"] + step["dur"]:
                    end = max(end, event["ts"] + event["dur"])
            ends[step["name"]] = max(ends.get(step["name"], 0.0), base + end)
    marks = [min(begins), *sorted(ends.values())]
    return [round((after - before) / 1e3, 4) for before, after in pairwise(marks)]


def run_group(ranks: int, arguments: list[str], environment: dict[str, str], limit_s: float) -> None:
    """Starts one process per rank and waits for all."""
    port = str(29500 + os.getpid() % 1000 + int(time.monotonic()) % 1000)
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    parts = [
        {**environment, **world, "RANK": str(rank), "LOCAL_RANK": "0", **(share(rank, ranks) if ranks > 1 else {})}
        for rank in range(ranks)
    ]
    together([[sys.executable, __file__, *arguments]] * ranks, parts, limit_s)


def record(names: list[str], timed_only: list[str], rounds: int, out: Path) -> None:
    """Times the cases and profiles all but `timed_only`: first those of one rank, then those under MPS."""
    from all_cases import CASES

    made = recipe()
    folder = Path(tempfile.mkdtemp())
    times: dict[str, list[float]] = {name: [] for name in names}
    failed: JSON = {}
    for ranks in sorted({CASES[name].ranks for name in names}):
        chosen = [name for name in sorted(names) if CASES[name].ranks == ranks]
        with ExitStack() as stack:
            environment = stack.enter_context(mps()) if ranks > 1 else {}
            for turn in range(rounds):
                timed = folder / f"times{ranks}_{turn}.json"
                try:
                    run_group(ranks, ["--time", ",".join(chosen), "--file", str(timed)], environment, 150)
                    for name, values in json.loads(timed.read_text()).items():
                        times[name] += values
                except (RuntimeError, TimeoutError, OSError) as error:
                    failed[f"time {ranks} {turn}"] = repr(error)
                if turn:
                    continue
                for name in chosen:
                    (folder / name).mkdir()
                    if name in timed_only:
                        continue
                    try:
                        run_group(ranks, ["--profile", name, "--file", str(folder / name)], environment, 90)
                    except (RuntimeError, TimeoutError, OSError) as error:
                        failed[f"profile {name}"] = repr(error)
        for name in chosen:
            keep(name, folder / name, times[name], made, out)
    store(out / "steps.json", {"recipe": made, "unprofiled_step_ms": times, "failed": failed})
    print(json.dumps(failed, indent=1))


def keep(name: str, folder: Path, times: list[float], made: JSON, out: Path) -> None:
    """Writes measured.json beside the traces of a case and packs the folder."""
    from all_cases import CASES

    case, files = CASES[name], sorted(folder.glob("rank*.gz"))
    versions = f"torch {made['torch']}, CUDA {made['cuda']}, NCCL {made['nccl']}, driver {made['driver']}"
    where = (
        "one H200"
        if case.ranks == 1
        else f"{case.ranks} NCCL ranks on one H200, MPS {100 // case.ranks} % each, sockets on loopback"
    )
    profiled = profiled_steps_ms(files) if len(files) == case.ranks else []
    measured = {
        "platform": f"{where}; {versions}",
        "measured_step_ms_unprofiled": times,
        "steps_per_measurement": case.steps,
        "profiled_step_ms": profiled,
        "about": case.about,
        "config": case.config,
        "recipe": made,
    }
    store(folder / "measured.json", measured)
    with tarfile.open(out / f"{name}.tar", "w") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, f"{name}/{file.name}")
    sizes = [file.stat().st_size // 1024 for file in files]
    print(f"{name:16s} unprofiled {times}  profiled {profiled}  KiB {sizes}", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Records traces and step times of known training steps.")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--cases", default="")
    parser.add_argument("--timed-only", default="")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--time")
    parser.add_argument("--profile")
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    pin()
    if options.time:
        time_cases(options.time.split(","), options.file)
    elif options.profile:
        profile_case(options.profile, options.file)
    else:
        from all_cases import CASES

        options.out.mkdir(parents=True, exist_ok=True)
        timed_only = [name for name in options.timed_only.split(",") if name]
        names = options.cases.split(",") if options.cases else [] if timed_only else list(CASES)
        record([*names, *timed_only], timed_only, options.rounds, options.out)


if __name__ == "__main__":
    main()
