"""How much longer a host takes to issue work while the collectives of its rank are in flight: ranks on shares of one GPU.

Each rank is pinned to its share of the cores, and NCCL's proxy and socket threads with it. The same bursts are timed on the
host `alone` (the other ranks sleep), with all ranks `together`, and together with `all_reduce`s or `all_to_all`s in flight from
before the burst until after it. `busy_gpu`: a kernel that only waits is in flight instead.

    PYTHONPATH=src python benchmarks/h200/hosts_beside_collectives.py --out DIR

Needs torch, numpy, pyarrow and an NVIDIA GPU. Results of 2026-11-16 (H200, torch 2.11, CUDA 13.0, 16 cores, loopback sockets)
are in results/. One core of that box has two speeds, a factor of two apart for work without launches: medians of single ranks
differ by as much as companies do, so read them over ranks and messages.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

RANKS = (4, 2, 8, 1)
REPEATS, SETTLE = 30, 6
MESSAGES = {"small": (64 << 10, 60), "middle": (1 << 20, 20), "large": (16 << 20, 3)}  # bytes, how many
WAIT_CYCLES = 40_000_000


def bursts() -> dict[str, Callable[[], object]]:
    """Host work of a millisecond or so each, which never fills the launch queue."""
    import torch

    x = torch.zeros(64, 64, device="cuda")
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device="cuda") for _ in range(8)))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, foreach=True)

    def views() -> None:
        for _ in range(800):
            x.view(-1)

    def launches() -> None:
        for _ in range(150):
            x.add_(1.0)

    def step() -> None:
        optimizer.zero_grad()
        layers(x).sum().backward()
        optimizer.step()

    return {"views": views, "launches": launches, "step": step}


def work(_group: Any, _session: Any, plan: Mapping[str, Any]) -> None:
    """One rank: every burst in every company; rank 0 writes the medians of all ranks."""
    import torch
    import torch.distributed as dist

    ranks = int(plan["ranks"])
    rank = dist.get_rank() if ranks > 1 else 0
    rows: list[dict[str, Any]] = []
    all_bursts = bursts()
    for mode, before in companies(ranks).items():
        for name, burst in all_bursts.items():
            if mode == "alone" and rank > 0:
                mine: tuple[float, float] = (0.0, 0.0)
            else:
                mine = timed_us(burst, before)
            everyone: list[tuple[float, float]] = [mine] * ranks
            if ranks > 1:
                # Ranks that have nothing to time wait here, in a sleep and not in a spinning call.
                if mode == "alone" and rank > 0:
                    time.sleep(1.0)
                torch.cuda.synchronize()
                dist.all_gather_object(everyone, mine)
            times, covered = zip(*everyone, strict=True)
            rows.append({"ranks": ranks, "mode": mode, "burst": name, "us": times, "covered": covered})
    if rank == 0:
        Path(plan["out"]).write_text(json.dumps(rows), encoding="utf-8")


def companies(ranks: int) -> dict[str, Callable[[], object] | None]:
    """What is in flight during a burst."""
    import torch
    import torch.distributed as dist

    result: dict[str, Callable[[], object] | None] = {"alone": None, "together": None}
    if ranks == 1:
        result.pop("together")
    side = torch.cuda.Stream()

    def wait_kernel() -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(WAIT_CYCLES)

    result["busy_gpu"] = wait_kernel
    if ranks == 1:
        return result
    for name, (size, count) in MESSAGES.items():
        sent = torch.zeros(size // 4, device="cuda")
        received = torch.zeros_like(sent)

        def reduces(sent: Any = sent, count: int = count) -> None:
            for _ in range(count):
                dist.all_reduce(sent, async_op=True)

        def exchanges(sent: Any = sent, received: Any = received, count: int = count) -> None:
            for _ in range(count):
                dist.all_to_all_single(received, sent, async_op=True)

        result[f"all_reduce {name}"] = reduces
        result[f"all_to_all {name}"] = exchanges
    return result


def timed_us(burst: Callable[[], object], before: Callable[[], object] | None) -> tuple[float, float]:
    """Median host time of the burst, and in which share of the repeats company outlasted it."""
    import torch

    times, covered = [], []
    for repeat in range(REPEATS):
        torch.cuda.synchronize()
        if before is not None:
            before()
        begin = time.perf_counter_ns()
        burst()
        end = time.perf_counter_ns()
        if before is not None:
            idle_from = time.perf_counter_ns()
            torch.cuda.synchronize()
            covered.append(time.perf_counter_ns() - idle_from > 200_000)
        if repeat >= SETTLE:
            times.append((end - begin) / 1e3)
    return round(median(times), 1), round(sum(covered) / max(len(covered), 1), 2)


def main() -> None:
    from processes import on_ranks

    from steptime._calibrate.harness.ranks import Layout

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    folder: Path = parser.parse_args().out
    for ranks in RANKS:
        file = folder.absolute() / f"hosts_beside_collectives_{ranks}.json"
        on_ranks(__file__, folder, Layout(ranks, share_gpu=ranks > 1), limit_s=100, out=str(file), ranks=ranks)
        rows = json.loads(file.read_text(encoding="utf-8"))
        alone = {row["burst"]: row["us"][0] for row in rows if row["mode"] == "alone"}
        for row in rows:
            print(ranks, row["mode"], row["burst"], row["us"], f"{max(row['us']) / alone[row['burst']]:.2f}", flush=True)


if __name__ == "__main__":
    main()
