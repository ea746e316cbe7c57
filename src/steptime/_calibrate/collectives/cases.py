"""Collectives to time: on which fabric, which case, how often, and about how long that takes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime._measurements.sets import COLLECTIVES
from steptime._measurements.store import key_of
from steptime._units import MIB, NS_PER_MS

# The first of several is swept densely.
LOOPBACK: dict[str, dict[str, str]] = {
    "loopback": {},
    "loopback-2x2": {"NCCL_SOCKET_NTHREADS": "2", "NCCL_NSOCKS_PERTHREAD": "2"},
}
SETTINGS: dict[str, dict[str, str]] = {**LOOPBACK, "default": {}, "gloo": {}}

# Names the fabric of a group whose wires are not the usual ones.
FABRIC = "STEPTIME_FABRIC"


def fabric_of(ranks: int, share: int, device: str) -> str:
    """What connects the ranks of a group, as the collectives' set names it; the environment may say otherwise."""
    if ranks == 1:
        return "none"
    if not device.startswith("cuda"):
        return "gloo"
    return os.environ.get(FABRIC, "loopback" if share > 1 else "default")


@dataclass(frozen=True, slots=True)
class Place:
    """A number of ranks on a fabric: what one group of processes measures."""

    ranks: int
    fabric: str
    share: int  # how many ranks share one GPU; 1: a GPU each

    @property
    def settings(self) -> dict[str, str]:
        """The environment that makes the fabric."""
        return SETTINGS.get(self.fabric, {})

    @property
    def dense(self) -> bool:
        """Whether every case is wanted here; a second fabric gets a coarser grid."""
        return self.fabric != "loopback-2x2"

    @property
    def unsteady(self) -> bool:
        """Whether a quarter of all repeats and more are outliers: ranks with two cores each, threads that share sockets."""
        return self.ranks >= 8 or self.fabric == "loopback-2x2"

    def columns(self) -> dict[str, Any]:
        """What a row says about it."""
        settings = json.dumps(self.settings, sort_keys=True)
        return {"ranks": self.ranks, "fabric": self.fabric, "settings": settings, "share": self.share}


Matrix = tuple[int, ...]  # sent bytes, row by row: entry (i, j) goes from rank i to rank j

MAIN = ("all_reduce", "all_to_all")
OTHERS = ("all_gather", "reduce_scatter", "broadcast", "send_recv", "send_recv_ring", "reduce")
# A rank's buffer is cut into one piece per rank.
CUT = ("all_to_all", "all_gather", "reduce_scatter")
# A rank can be done before the others have begun.
ONE_WAY = ("broadcast", "reduce", "send_recv", "send_recv_ring")

# What one pass takes between two timings of the sentinel, and how many seconds of cases share their passes: rows are written
# after each lap.
_BLOCK_NS, _LAP_NS = 250 * NS_PER_MS, 10_000 * NS_PER_MS


@dataclass(frozen=True, slots=True)
class CollectiveCase:
    """One question: this collective, so many bytes, under these circumstances."""

    collective: str
    size_bytes: int
    dtype: str = "float32"
    splits: Matrix | None = None
    mode: str = "stream"  # stream | single
    beside: str = "none"  # none | gemm | copy
    host_threads: str = "idle"  # idle | busy
    skew_ns: float | None = None
    late_rank: int | None = None

    def columns(self) -> dict[str, Any]:
        """What a row says about it."""
        return {
            "collective": self.collective,
            "bytes": self.size_bytes,
            "dtype": self.dtype,
            "splits": None if self.splits is None else list(self.splits),
            "mode": self.mode,
            "beside": self.beside,
            "host_threads": self.host_threads,
            "arrival": "together" if self.skew_ns is None else "skewed",
            "skew_ns": self.skew_ns,
            "late_rank": self.late_rank,
        }

    def key(self, place: Place) -> str:
        """The key its row will have."""
        return key_of(COLLECTIVES, {**place.columns(), **self.columns()})


def largest_buffer_bytes(splits: Matrix, ranks: int) -> int:
    """The largest send or receive buffer of a rank."""
    matrix = np.asarray(splits).reshape(ranks, ranks)
    return int(max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max()))


# Timed in every block: how much the fabric itself moves while it is measured.
SENTINEL = CollectiveCase("all_reduce", MIB)
# DDP's bucket, of which a backward pass has many one after another.
BUCKET = CollectiveCase("all_reduce", 25 * MIB)


def repeats_of(case: CollectiveCase, place: Place) -> int:
    """One in each pass; fewer of those that take long, more where many repeats are outliers."""
    if case.size_bytes > 32 * MIB:
        return 4 if place.unsteady else 3
    return 7 if place.unsteady else 5


def fitting(collective: str, size_bytes: float, ranks: int) -> int:
    """The size, rounded up to whole elements, the same number for every rank where it is cut."""
    unit = 4 * (ranks if collective in CUT else 1)
    return max(1, -(-int(size_bytes) // unit)) * unit


def rough_ns(collective: str, ranks: int, size_bytes: int) -> float:
    """About how long one takes on loopback sockets (all_reduce of 64 MiB: 20, 32, 44 ms on 2, 4, 8 ranks); for planning."""
    if collective == "barrier":
        return 60_000.0 * ranks
    heavy = 1.0 if collective in ("all_reduce", "all_to_all") else 0.7
    return 18_000.0 * ranks + size_bytes * (0.22 + 0.06 * ranks) * heavy


def calls_of(case: CollectiveCase, ranks: int) -> int:
    """How many back to back in one repeat: about 2 ms worth of them."""
    if case.mode == "single" or case.skew_ns is not None or case.size_bytes > 100 * MIB:
        return 1
    # Company has to outlast them, and a launch queue is finite.
    if case.beside != "none" and case.size_bytes > 32 * MIB:
        return 1
    if case == BUCKET:
        return 8
    fewest = 2 if case.size_bytes > 2 * MIB else 4
    most = 20 if case.beside == "none" else 8
    return int(min(most, max(fewest, 2.0 * NS_PER_MS // rough_ns(case.collective, ranks, case.size_bytes))))


def once_ns(case: CollectiveCase, ranks: int) -> float:
    """About how long one repeat of a case takes."""
    item = calls_of(case, ranks) * rough_ns(case.collective, ranks, case.size_bytes)
    around = 1.5 * NS_PER_MS + (case.skew_ns or 0.0)
    return (4.0 if case.beside != "none" else 1.2) * item + around


def cost_ns(case: CollectiveCase, place: Place) -> float:
    """About how long all repeats of a case take."""
    return repeats_of(case, place) * once_ns(case, place.ranks)


def laps(cases: Sequence[CollectiveCase], place: Place) -> list[list[CollectiveCase]]:
    """The cases in order, cut where those before take some seconds: so far apart are the repeats of one."""
    return _cut(cases, [cost_ns(case, place) for case in cases], _LAP_NS)


def blocks(cases: Sequence[CollectiveCase], ranks: int) -> list[list[CollectiveCase]]:
    """The cases in order, cut where one repeat of those before takes a fraction of a second."""
    return _cut(cases, [once_ns(case, ranks) for case in cases], _BLOCK_NS)


def _cut(cases: Sequence[CollectiveCase], costs_ns: Sequence[float], most_ns: float) -> list[list[CollectiveCase]]:
    results: list[list[CollectiveCase]] = [[]]
    taken = 0.0
    for case, cost in zip(cases, costs_ns, strict=True):
        if taken + cost > most_ns and results[-1]:
            results.append([])
            taken = 0.0
        results[-1].append(case)
        taken += cost
    return results if results[0] else []
