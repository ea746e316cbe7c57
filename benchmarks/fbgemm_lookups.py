"""FBGEMM's table-batched lookups in two public traces of V100: measured against estimated, forward and backward with update.

The estimate is analytic (`steptime._models.lookups.fbgemm_kernels`): nothing is fitted, and a trace tells no statistics
of the tables, so that tables are taken as alike, bags as equally long and rows as equally likely. The second estimate knows
rows and bag lengths of each table where they are public (the DLRM trace is of MLPerf's configuration), rows still equally
likely. Beside them, what planners in use compute: bytes over bandwidth, backward twice forward (TorchRec,
distributed/planner/constants.py). Times are sums of kernels; these traces have them in whole microseconds.

    python benchmarks/fbgemm_lookups.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

import numpy as np

from _cases import public_traces
from steptime._hardware.description import Quantity
from steptime._hardware.device import DeviceLimits, reference_device
from steptime._lookups.estimated import expected_statistics
from steptime._lookups.generators import Generator
from steptime._lookups.table import TableStatistics
from steptime._models.lookups.fbgemm import FbgemmCall, FbgemmLookup, KernelTime, calls_in
from steptime._models.lookups.fbgemm_kernels import backward_kernels, forward_kernels, total_ns
from steptime._models.lookups.question import ITEM_BYTES
from steptime._program.load import load

TRACES = ("meta_ranking_2xV100", "dlrm_8xV100")

_SHEET, _PAPER = "NVIDIA V100 data sheet, 2020, SXM2", "NVIDIA Tesla V100 GPU Architecture, 2017"
V100 = DeviceLimits(
    name="v100",
    title="NVIDIA V100 SXM2",
    whole="v100",
    share=1,
    models="",
    sms=Quantity(80, _PAPER),
    memory_bytes=Quantity(16e9, f"{_SHEET}: 16 or 32 GB HBM2"),
    bandwidth_bytes_per_s=Quantity(900e9, f"{_SHEET}: 900 GB/s"),
    cache_bytes=Quantity(6144 << 10, f"{_PAPER}: 6144 KB L2"),
    clock_hz=Quantity(1.53e9, f"{_PAPER}: boost clock 1530 MHz"),
    threads_per_sm=Quantity(2048, f"{_PAPER}: compute capability 7.0"),
    dispatch=reference_device().dispatch,
    peak_flop_per_s={"float32": Quantity(15.7e12, f"{_SHEET}: 15.7 TFLOPS")},
)

# Kernels of the backward pass by a part of their names, the first that fits; the rest belongs to "runs".
PARTS = {
    "grad_indice_weights": "weights' gradient",
    "linearize_index": "linearize",
    "RadixSort": "sort",
    "grad_mean": "mean",
    "cta_per_row": "block per row",
    "warp_per_row": "warp per row",
    "FillFunctor<float>": "clear",
    "Memset": "sort",
}

# MLPerf training, recommendation (torchrec_dlrm): rows of the 26 tables, and lookups of a sample in each.
MLPERF_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938, 155, 4,
    976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
MLPERF_LOOKUPS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


def mlperf_tables(lookup: FbgemmLookup) -> list[TableStatistics] | None:
    """The tables of MLPerf's configuration that have as many rows and lookups as a call has, if exactly one choice does."""
    every = list(zip(MLPERF_ROWS, MLPERF_LOOKUPS, strict=True))
    wanted = (lookup.rows, lookup.lookups / lookup.batch)
    found = {
        tuple(sorted(chosen))
        for chosen in combinations(every, lookup.tables if lookup.tables <= 3 else 0)
        if tuple(map(sum, zip(*chosen, strict=True))) == wanted
    }
    if len(found) != 1:
        return None
    dim = lookup.total_dim // lookup.tables
    return [expected_statistics(Generator(rows, float(length)), lookup.batch, dim) for rows, length in found.pop()]


def planner_ns(lookup: FbgemmLookup) -> tuple[float, float]:
    """Forward and backward as TorchRec's planner has them: inputs, rows and results over 897 GiB/s, narrow rows dearer."""
    dim = lookup.total_dim / lookup.tables
    penalty = 1.0 if dim >= 128 else 1.15 if dim >= 64 else 1.75
    moved = (
        lookup.lookups * (lookup.index_bytes + dim * ITEM_BYTES[lookup.dtype] * penalty) + 4 * lookup.batch * lookup.total_dim
    )
    forward = 1e9 * moved / (897 * 2**30) * (1.1 if lookup.weighted else 1.0)
    return forward, 2 * forward


def calls_of(folder: Path) -> list[tuple[int, FbgemmCall]]:
    """Rank and lookup of every recorded step."""
    return [(program.rank, call) for program in load([folder]).programs for call in calls_in(program)]


def described(lookup: FbgemmLookup) -> str:
    kind = f"{lookup.optimizer}{', weighted' if lookup.weighted else ''}"
    return f"{kind}: {lookup.tables} tables, {lookup.rows:,} rows, {lookup.total_dim} wide, batch {lookup.batch}"


def errors(pairs: Sequence[tuple[float, float]]) -> str:
    """Geometric mean and median of |estimated / measured - 1|, and the mean of the signed error."""
    off = [estimated / measured - 1 for measured, estimated in pairs]
    geometric = float(np.exp(np.mean(np.log(np.maximum(np.abs(off), 0.001)))))
    return f"GMAE {geometric:.0%}, median {median(map(abs, off)):.0%}, mean {fmean(off):+.0%}, worst {max(off, key=abs):+.0%}"


def report_kernels(measured: Sequence[KernelTime], estimates: Sequence[Sequence[KernelTime]]) -> None:
    names = [kernel.name for kernel in estimates[0]]
    took = dict.fromkeys(names, 0.0)
    for kernel in measured:
        part = next((part for text, part in PARTS.items() if text in kernel.name), "runs")
        took[part if part in took else "runs"] += kernel.time_ns
    for name, *kernels in zip(names, *estimates, strict=True):
        print(
            f"        {name:18s} {took[name] / 1e3:8.0f} "
            + " ".join(f"{kernel.time_ns / 1e3:10.0f}       " for kernel in kernels)
        )


def report_call(rank: int, alike: Sequence[FbgemmCall], pairs: dict[str, list[tuple[float, float]]], detailed: bool) -> None:
    """One lookup of all steps; what was measured and estimated joins `pairs`."""
    typical = alike[len(alike) // 2]
    tables = mlperf_tables(typical.lookup)
    known = " with its tables' sizes" if tables else ""
    print(f"  rank {rank}, {described(typical.lookup)}, {typical.lookup.lookups:,} lookups, {len(alike)} steps{known}")
    planned = dict(zip(("forward", "backward"), planner_ns(typical.lookup), strict=True))
    for direction, model in (("forward", forward_kernels), ("backward", backward_kernels)):
        recorded = [kernels for call in alike if (kernels := getattr(call, direction))]
        if not recorded:
            print(f"    {direction:8s} not recorded")
            continue
        took = median(map(total_ns, recorded))
        estimates = [model(typical.lookup, V100)] + ([model(typical.lookup, V100, tables)] if tables else [])
        line = f"    {direction:22s} {took / 1e3:8.0f} "
        for kind, estimate in zip(("alike", "tables' sizes known"), estimates, strict=False):
            pairs.setdefault(f"{direction}, {kind}", []).append((took, total_ns(estimate)))
            line += f"{total_ns(estimate) / 1e3:10.0f} {total_ns(estimate) / took - 1:+6.0%} "
        pairs.setdefault(f"{direction}, planner", []).append((took, planned[direction]))
        print(f"{line}   (planner {planned[direction] / 1e3:.0f})")
        if direction == "backward" and detailed:
            report_kernels(recorded[len(recorded) // 2], estimates)


def report(name: str, calls: Sequence[tuple[int, FbgemmCall]]) -> None:
    print(f"\n{name}: us measured (median over steps); estimated with tables alike; with their sizes, where known")
    groups: dict[tuple[int, str], list[FbgemmCall]] = {}
    for rank, call in calls:
        groups.setdefault((rank, described(call.lookup)), []).append(call)
    pairs: dict[str, list[tuple[float, float]]] = {}
    for (rank, _), alike in groups.items():
        report_call(rank, alike, pairs, detailed=rank in (calls[0][0], 3))
    for kind, found in sorted(pairs.items()):
        print(f"  {kind:30s} {errors(found)}")


def main() -> int:
    root = public_traces()
    if root is None:
        print("no public traces here: set STEPTIME_SHARED to the folder that holds data/traces")
        return 1
    for name in TRACES:
        report(name, calls_of(root / name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
