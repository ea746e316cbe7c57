"""How much longer collectives take while the host that issued them sleeps, spins or issues work: ranks on shares of one GPU.

    PYTHONPATH=src python benchmarks/h200/collectives_beside_hosts.py --out DIR

Needs torch, numpy, pyarrow and an NVIDIA GPU. Results of 2026-11-16 (H200, torch 2.11, CUDA 13.0, 16 cores, loopback sockets)
are in results/: where a rank has four cores or more its host hardly matters; with two, a host that trains makes collectives
take 1.1 to 1.9 times as long.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

RANKS = (2, 4, 8)
MESSAGES = {256 << 10: 12, 1 << 20: 8, 4 << 20: 4, 16 << 20: 2}  # bytes -> how many behind one another
REPEATS = {2: 24, 4: 20, 8: 12}


def companies() -> dict[str, Callable[[], object]]:
    """What a host does, a little at a time, while collectives are in flight."""
    import torch

    x = torch.zeros(64, 64, device="cuda")
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device="cuda") for _ in range(2)))
    wide = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, device="cuda") for _ in range(2)))
    rows = torch.zeros(2048, 1024, device="cuda")

    def spins() -> None:
        until = time.perf_counter() + 1e-4
        while time.perf_counter() < until:
            pass

    def views() -> None:
        for _ in range(50):
            x.view(-1)

    def launches() -> None:
        for _ in range(10):
            x.add_(1.0)

    def trains() -> None:
        layers(x).sum().backward()

    def trains_wide() -> None:
        wide(rows).sum().backward()

    return {
        "sleeps": lambda: time.sleep(1e-4), "spins": spins, "views": views, "launches": launches,
        "trains": trains, "trains wide": trains_wide,
    }  # fmt: skip


def work(_group: Any, _session: Any, plan: Mapping[str, Any]) -> None:
    """One rank: every collective in every company, in a shuffled order; rank 0 writes the medians of all ranks."""
    import torch
    import torch.distributed as dist

    ranks, rank = dist.get_world_size(), dist.get_rank()
    side = torch.cuda.Stream()
    company = companies()
    cases = [(kind, size, name) for kind in ("all_reduce", "all_to_all") for size in MESSAGES for name in company]
    times: dict[tuple[str, int, str], list[float]] = {case: [] for case in cases}
    order = random.Random(1)
    deadline = time.monotonic() + float(plan["seconds"])
    for repeat in range(REPEATS[ranks]):
        order.shuffle(cases)
        late = torch.tensor([float(time.monotonic() > deadline)], device="cuda")
        dist.all_reduce(late)
        if late.item() > 0:
            break
        for kind, size, name in cases:
            result = timed_us(kind, size, side, company[name])
            if repeat:
                times[kind, size, name].append(result)
    rows = []
    for (kind, size, name), mine in times.items():
        everyone: list[float] = [0.0] * ranks
        dist.all_gather_object(everyone, round(median(mine), 1) if mine else 0.0)
        rows.append({"ranks": ranks, "kind": kind, "bytes": size, "host": name, "median_us": everyone, "repeats": len(mine)})
    if rank == 0:
        Path(plan["out"]).write_text(json.dumps(rows), encoding="utf-8")


def timed_us(kind: str, size: int, side: Any, company: Callable[[], object]) -> float:
    """Of one collective among several behind one another, after one that is not counted."""
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    sent = torch.zeros(size // 4, device="cuda")
    received = torch.zeros_like(sent)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for number in range(MESSAGES[size] + 1):
            if number == 1:
                begin.record()
            if kind == "all_reduce":
                dist.all_reduce(sent)
            else:
                dist.all_to_all_single(received, sent)
        end.record()
    while not end.query():
        company()
    return 1e3 * begin.elapsed_time(end) / MESSAGES[size]


def main() -> None:
    from processes import on_ranks

    from steptime._calibrate.harness.ranks import Layout

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=50.0)
    arguments = parser.parse_args()
    folder: Path = arguments.out
    for ranks in RANKS:
        file, seconds = folder.absolute() / f"collectives_beside_hosts_{ranks}.json", arguments.seconds
        on_ranks(__file__, folder, Layout(ranks, share_gpu=True), limit_s=seconds + 60, out=str(file), seconds=seconds)
        rows = json.loads(file.read_text(encoding="utf-8"))
        asleep = {(row["kind"], row["bytes"]): max(row["median_us"]) for row in rows if row["host"] == "sleeps"}
        for (kind, size), asleep_us in asleep.items():
            mine = [row for row in rows if (row["kind"], row["bytes"]) == (kind, size)]
            told = "  ".join(f"{row['host']} {max(row['median_us']) / asleep_us:.2f}" for row in mine)
            print(ranks, kind, size, f"{asleep_us:.0f} us", told, "n", mine[0]["repeats"], flush=True)


if __name__ == "__main__":
    main()
