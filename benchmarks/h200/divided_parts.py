"""What divided decoders are made of, each part by itself: hosts without a wire, groups of some of the ranks, whole steps.

    PYTHONPATH=src python benchmarks/h200/divided_parts.py --out DIR

`hosts`: steps of `large` with tiny tensors whose collectives reach nobody (PyTorch's `fake` backend), so that a step takes
what its host does, in one process and in many at once. `groups`: collectives of pairs and fours among 4 and 8 ranks, all
groups at once. `steps`: the tiny steps with a wire, the real ones, and these recorded by the profiler, last: a process that
profiled is slow ever after. Needs torch, numpy, pyarrow and an NVIDIA GPU; four minutes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

HOSTS = ("hsdp2x2-r4", "hsdp2x2-kept-r4", "hsdp2x4-r8", "tp2-small-r2", "tp2-r2", "tp2fsdp2-r4", "tp2hsdp2x2-r8")
STEPS = {
    2: ("tp2-small-r2", "tp2-r2", "pp2-1f1b-r2"),
    4: ("hsdp2x2-r4", "tp4-r4", "pp4-1f1b-r4", "pp4-1f1b-wide-r4"),
    8: ("hsdp2x4-r8", "tp2hsdp2x2-r8"),
}
SLOT_S = 2.0  # for one of `HOSTS`: half to build it, half to time it
SIZES = {256 << 10: 10, 1 << 20: 6, 4 << 20: 4, 16 << 20: 2}  # bytes -> how many behind one another
REPEATS = 4
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "send")
ENOUGH_S = 215.0  # after which no other part is begun


def work(group: Any, _session: Any, plan: Mapping[str, Any]) -> None:
    """One rank."""
    folder = Path(plan["out"])
    if plan["part"] == "hosts":
        found: Any = hosts(group.rank, float(plan["begin"]))
        (folder / f"hosts_{group.ranks}_{group.rank}.json").write_text(json.dumps(found), encoding="utf-8")
        return
    found = {"groups": groups(group) if group.ranks > 2 else [], "steps": steps(group)}
    if group.rank == 0:
        (folder / f"parts_{group.ranks}.json").write_text(json.dumps(found), encoding="utf-8")
    for name in STEPS[group.ranks]:
        recorded(name, group, folder)


def case_of(name: str) -> Any:
    """One of `large`."""
    from steptime_lab.workloads.large_cases import large_cases

    return next(case for case in large_cases(int(name.rpartition("r")[2])) if case.name == f"large-{name}")


def hosts(rank: int, begin: float) -> dict[str, list[float]]:
    """Milliseconds of tiny steps; all processes begin each at the same time."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from steptime_lab.workloads.large_cases import shrunk_large
    from steptime_lab.workloads.networks.large import training_step

    found = {}
    time.sleep(max(0.0, begin - time.time()))
    begin = max(begin, time.time())
    for number, name in enumerate(HOSTS):
        if dist.is_initialized():
            dist.destroy_process_group()
        case = shrunk_large(case_of(name))
        dist.init_process_group("fake", store=FakeStore(), rank=rank % case.ranks, world_size=case.ranks)
        try:
            step = training_step(case, rank % case.ranks, torch.device("cuda"))
            for _ in range(4):
                step()
            torch.cuda.synchronize()
            time.sleep(max(0.0, begin + (number + 0.5) * SLOT_S - time.time()))
            found[name] = []
            while len(found[name]) < REPEATS or time.time() < begin + (number + 0.95) * SLOT_S:
                found[name].append(per_step_ms(step, 3))
        except Exception as error:
            found[name] = [str(error)[:200]]  # type: ignore[list-item]
    return found


def per_step_ms(step: Callable[[], None], count: int) -> float:
    """Unsynchronised steps divided by their number."""
    import torch

    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - begun) / count, 4)


def groups(group: Any) -> list[dict[str, Any]]:
    """Collectives of neighbours and of ranks apart, microseconds of the slowest rank, and of two groups of a rank at once."""
    import torch
    import torch.distributed as dist

    made: dict[str, Any] = {"all": dist.group.WORLD}
    for size in (2, 4)[: 1 if group.ranks == 4 else 2]:
        near = [tuple(range(first, first + size)) for first in range(0, group.ranks, size)]
        far = [tuple(range(first, group.ranks, group.ranks // size)) for first in range(group.ranks // size)]
        for name, sets in ((f"near{size}", near), (f"far{size}", far))[: 1 if size > 2 else 2]:
            for ranks in sets:
                one = dist.new_group(ranks)
                if group.rank in ranks:
                    made[name] = one
    rows = []
    buffers = [torch.randn(max(SIZES) // 4, device="cuda") for _ in range(4)]
    together = [(name, "far2") for name in made if name not in ("all", "far2")]
    for names in [*((name,) for name in made), *together]:
        for kind in KINDS[: 4 if names == ("near2",) else 3] if len(names) == 1 else ("all_gather", "all_reduce"):
            for size, count in SIZES.items():
                times = []
                for repeat in range(REPEATS):
                    group.barrier()
                    mine = timed_us(kind, [made[name] for name in names], size, count, buffers)
                    if repeat:
                        times.append(max(group.gather(mine)))
                row = {"ranks": group.ranks, "groups": names, "kind": kind, "bytes": size}
                rows.append({**row, "us": [round(each, 1) for each in times]})
    return rows


def timed_us(kind: str, made: list[Any], size: int, count: int, buffers: list[Any]) -> float:
    """Of one among several behind one another, in each of the groups at the same time; the first is not counted."""
    import torch
    import torch.distributed as dist

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(count + 1):
        handles = []
        for at, one in enumerate(made):
            whole, part = buffers[2 * at][: size // 4], buffers[2 * at + 1][: size // 4 // dist.get_world_size(one)]
            if kind == "all_gather":
                handles.append(dist.all_gather_into_tensor(whole, part, group=one, async_op=True))
            elif kind == "reduce_scatter":
                handles.append(dist.reduce_scatter_tensor(part, whole, group=one, async_op=True))
            elif kind == "all_reduce":
                handles.append(dist.all_reduce(whole, group=one, async_op=True))
            else:
                ranks = dist.get_process_group_ranks(one)
                place = ranks.index(dist.get_rank())
                call = dist.isend if place % 2 == 0 else dist.irecv
                handles.append(call(whole, ranks[place ^ 1], group=one))
        for handle in handles:
            handle.wait()
        if number == 0:
            begin.record()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / count


def steps(group: Any) -> dict[str, list[float]]:
    """Milliseconds of tiny and real steps."""
    from steptime_lab.workloads.large_cases import shrunk_large
    from steptime_lab.workloads.networks.large import build

    found: dict[str, list[float]] = {}
    for name in STEPS[group.ranks]:
        for label, case in ((f"{name} tiny", shrunk_large(case_of(name))), (name, case_of(name))):
            step = build(case, group, group.device)
            for _ in range(6):
                step()
            found[label] = []
            for _ in range(3):
                group.barrier()
                found[label].append(max(group.gather(per_step_ms(step, 5))))
            step.close()
    return found


def recorded(name: str, group: Any, folder: Path) -> None:
    """Two steps by the profiler, of every rank."""
    from torch.profiler import ProfilerActivity, profile, schedule

    from steptime_lab.workloads.networks.large import build

    step = build(case_of(name), group, group.device)
    for _ in range(4):
        step()
    group.barrier()
    plan = schedule(wait=1, warmup=2, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=plan) as profiler:
        for _ in range(5):
            step()
            profiler.step()
    raw = folder / f"{name}_{group.rank}.json"
    profiler.export_chrome_trace(str(raw))
    with gzip.open(folder / f"{name}_rank{group.rank}.json.gz", "wb", 6) as packed:
        packed.write(raw.read_bytes())
    raw.unlink()
    step.close()


def main() -> None:
    from processes import on_ranks

    from steptime._calibrate.harness.ranks import Layout, RanksError

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="steps,hosts")
    arguments = parser.parse_args()
    folder: Path = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    plans = (("steps", 4), ("hosts", 8), ("steps", 8), ("steps", 2), ("hosts", 1))
    started = time.time()
    for part, ranks in plans:
        if part not in arguments.only.split(",") or time.time() > started + ENOUGH_S:
            continue
        begun = time.time()
        try:
            layout = Layout(ranks, share_gpu=True)
            on_ranks(__file__, folder, layout, limit_s=110, out=str(folder), part=part, begin=begun + 14.0)
        except RanksError as error:
            print(part, ranks, error)
        print(part, ranks, f"{time.time() - begun:.0f} s", flush=True)
    for file in sorted(folder.glob("*.json")):
        print(file.name, {name: told(each) for name, each in json.loads(file.read_text()).items()})


def told(each: Any) -> Any:
    """The middle of what was timed."""
    return round(median(each), 2) if isinstance(each, list) and each and isinstance(each[0], float) else "..."


if __name__ == "__main__":
    main()
