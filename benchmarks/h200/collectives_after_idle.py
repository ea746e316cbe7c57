"""How long collectives take after a pause, with the next one already launched or not: two and four ranks on shares of one GPU.

`gpu`: the host is ahead, and a kernel that only waits lies between two collectives. `host`: the host waits for the collective
before, lets as much time pass and launches the next. Where the launch comes late, NCCL's proxy threads have gone to sleep.

    PYTHONPATH=src python benchmarks/h200/collectives_after_idle.py --out DIR

Needs torch, numpy, pyarrow and an NVIDIA GPU. Results of 2026-11-16 (H200, torch 2.11, CUDA 13.0, loopback sockets) are in
results/.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
PAUSES_US = (0, 100, 300, 1000, 3000)
CYCLES_PER_US = 1980
SETTLE, FEW_BYTES, MANY, FEW = 5, 1 << 20, 40, 15


def work(_group: Any, _session: Any, plan: Mapping[str, Any]) -> None:
    """One rank: every collective, size and pause; rank 0 writes the medians of all ranks."""
    import torch
    import torch.distributed as dist

    rows = []
    for kind in ("all_reduce", "all_to_all"):
        for size in SIZES:
            sent = torch.zeros(size // 4, device="cuda")
            received = torch.zeros_like(sent)
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": lambda sent=sent: dist.all_reduce(sent),
                "all_to_all": lambda sent=sent, received=received: dist.all_to_all_single(received, sent),
            }
            for mode in ("gpu", "host"):
                for pause in PAUSES_US[mode == "host" :]:
                    medians: list[float] = [0.0] * dist.get_world_size()
                    dist.all_gather_object(medians, timed_us(calls[kind], mode, pause, MANY if size <= FEW_BYTES else FEW))
                    rows.append({"kind": kind, "bytes": size, "mode": mode, "gap_us": pause, "median_us": medians})
    if dist.get_rank() == 0:
        Path(plan["out"]).write_text(json.dumps(rows), encoding="utf-8")


def timed_us(call: Callable[[], object], mode: str, pause_us: int, repeats: int) -> float:
    """Median of the repeats on this rank."""
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    dist.barrier()
    pairs = []
    for _ in range(repeats):
        if mode == "host":
            torch.cuda.synchronize()
            until = time.perf_counter() + 1e-6 * pause_us
            while time.perf_counter() < until:
                pass
        elif pause_us:
            torch.cuda._sleep(pause_us * CYCLES_PER_US)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return round(median(1e3 * begin.elapsed_time(end) for begin, end in pairs[SETTLE:]), 1)


def main() -> None:
    from processes import on_ranks

    from steptime._calibrate.harness.ranks import Layout

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    folder: Path = parser.parse_args().out
    for ranks in (4, 2):
        file = folder.absolute() / f"collectives_after_idle_{ranks}.json"
        on_ranks(__file__, folder, Layout(ranks, share_gpu=True), limit_s=240, out=str(file))
        for row in json.loads(file.read_text(encoding="utf-8")):
            print(ranks, row["kind"], row["bytes"], row["mode"], row["gap_us"], min(row["median_us"]), max(row["median_us"]))


if __name__ == "__main__":
    main()
