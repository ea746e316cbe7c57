"""`Case`: one collective to time, and the sweep: which cases, in the order of their worth."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from steptime.measure.collectives.fabrics import Place
from steptime.measure.collectives.splits import WANTED, Matrix, largest_sent_bytes, uneven
from steptime.measurements.sets import measured_set
from steptime.measurements.store import key_of
from steptime.units import MIB, NS_PER_MS

MAIN = ("all_reduce", "all_to_all")
OTHERS = ("all_gather", "reduce_scatter", "broadcast", "send_recv", "send_recv_ring", "reduce")
# A rank's buffer is cut into one piece per rank.
CUT = ("all_to_all", "all_gather", "reduce_scatter")
# A rank can be done before the others have begun.
ONE_WAY = ("broadcast", "reduce", "send_recv", "send_recv_ring")

_KIB = 1024
_DOUBLING = tuple(4 << power for power in range(27))  # 4 B to 256 MiB
_SAMPLE = (64 * _KIB, MIB, 8 * MIB, 64 * MIB)
_SKEWS_NS = (0.2 * NS_PER_MS, 1.0 * NS_PER_MS, 5.0 * NS_PER_MS)


@dataclass(frozen=True, slots=True)
class Case:
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

    @property
    def repeats(self) -> int:
        """Fewer for those that take long."""
        return 3 if self.size_bytes > 32 * MIB else 5

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
        return key_of(measured_set("collectives"), {**place.columns(), **self.columns()})


# Timed in every block: how much the fabric itself moves while it is measured.
SENTINEL = Case("all_reduce", MIB)


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


def calls_of(case: Case, ranks: int) -> int:
    """How many back to back in one repeat: about 2 ms worth of them."""
    if case.mode == "single" or case.skew_ns is not None or case.size_bytes > 100 * MIB:
        return 1
    # Company has to outlast them, and a launch queue is finite.
    if case.beside != "none" and case.size_bytes > 32 * MIB:
        return 1
    fewest = 2 if case.size_bytes > 2 * MIB else 4
    most = 20 if case.beside == "none" else 8
    return int(min(most, max(fewest, 2.0 * NS_PER_MS // rough_ns(case.collective, ranks, case.size_bytes))))


def cost_ns(case: Case, ranks: int) -> float:
    """About how long all repeats of a case take."""
    one = calls_of(case, ranks) * rough_ns(case.collective, ranks, case.size_bytes)
    around = 1.5 * NS_PER_MS + (case.skew_ns or 0.0)
    return case.repeats * ((4.0 if case.beside != "none" else 1.2) * one + around)


def tiers(ranks: int, *, dense: bool, seed: int, only: Sequence[str] = ()) -> list[list[Case]]:
    """Every case of a place, in lists of falling worth; the same for the same seed."""
    found = [
        _plain(MAIN, ranks, _grid((1.3, 1.6) if dense else (1.3,), 64 * MIB)),
        _uneven(ranks, WANTED.get(ranks, 60) if dense else WANTED.get(ranks, 60) // 4, seed),
        _plain(OTHERS, ranks, _grid((1.4,) if dense else (), 16 * MIB)),
        [*_beside(ranks), *_skewed(ranks, seed)],
        [*_single(ranks), *_half_precision(ranks)],
        [*_plain(MAIN, ranks, [128 * MIB, 256 * MIB]), *_plain(OTHERS, ranks, [s for s in _DOUBLING if s > 16 * MIB])],
    ]
    return [list(dict.fromkeys(case for case in tier if not only or case.collective in only)) for tier in found]


def few(ranks: int, *, seed: int, only: Sequence[str] = ()) -> list[list[Case]]:
    """A handful of cases of each kind, small."""
    sizes = [4, 4 * _KIB, 100 * _KIB]
    found = [
        *_plain((*MAIN, *OTHERS), ranks, sizes),
        *[case for case in _uneven(ranks, 40, seed) if case.size_bytes < 256 * _KIB][:4],
        *(Case(name, fitting(name, 64 * _KIB, ranks), beside=beside) for name in MAIN for beside in ("gemm", "copy")),
        *(Case(name, fitting(name, 64 * _KIB, ranks), host_threads="busy") for name in MAIN),
        *(Case(name, fitting(name, 64 * _KIB, ranks), skew_ns=1.0 * NS_PER_MS, late_rank=ranks - 1) for name in MAIN),
        Case("all_reduce", 4, mode="single"),
        Case("barrier", 0, mode="single"),
        Case("all_reduce", 4 * _KIB, dtype="bfloat16"),
    ]
    return [list(dict.fromkeys(case for case in found if not only or case.collective in only))]


def blocks(cases: Iterable[Case], ranks: int, seed: int) -> Iterator[list[Case]]:
    """The cases shuffled and cut into blocks of about a second; repeats are spread over a block, and its rows flushed."""
    shuffled = list(cases)
    random.Random(seed).shuffle(shuffled)
    block: list[Case] = []
    cost = 0.0
    for case in shuffled:
        block.append(case)
        cost += cost_ns(case, ranks)
        if cost > 1000 * NS_PER_MS or len(block) == 48:
            yield block
            block, cost = [], 0.0
    if block:
        yield block


def _grid(between: Sequence[float], largest: int) -> list[int]:
    """Doubling sizes up to the largest, and sizes between them where bandwidth begins to matter."""
    doubling = [size for size in _DOUBLING if size <= largest]
    return [*doubling, *(int(size * factor) for size in doubling for factor in between if _KIB <= size < largest)]


def _plain(names: Iterable[str], ranks: int, sizes: Iterable[int]) -> list[Case]:
    # Two ranks in a ring are a pair.
    wanted = [name for name in names if not (name == "send_recv_ring" and ranks == 2)]
    return [Case(name, fitting(name, size, ranks)) for size in sizes for name in wanted]


def _uneven(ranks: int, count: int, seed: int) -> list[Case]:
    return [Case("all_to_all", largest_sent_bytes(matrix, ranks), splits=matrix) for matrix in uneven(ranks, count, seed)]


def _beside(ranks: int) -> list[Case]:
    pairs = [(name, fitting(name, size, ranks)) for name in MAIN for size in _SAMPLE]
    return [
        *(Case(name, size, beside=beside) for name, size in pairs for beside in ("gemm", "copy")),
        *(Case(name, size, host_threads="busy") for name, size in pairs),
        *(Case(name, size, beside="gemm", host_threads="busy") for name, size in pairs if size <= 8 * MIB),
    ]


def _skewed(ranks: int, seed: int) -> list[Case]:
    draw = random.Random(seed)
    return [
        Case(name, fitting(name, size, ranks), skew_ns=skew, late_rank=draw.choice((0, draw.randrange(ranks))))
        for name in MAIN
        for size in (4 * _KIB, 64 * _KIB, MIB, 8 * MIB)
        for skew in _SKEWS_NS
    ]


def _single(ranks: int) -> list[Case]:
    """What a host that waits for it sees, where latency matters."""
    sizes = [4, 256, 4 * _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB, MIB]
    cases = [Case(case.collective, case.size_bytes, mode="single") for case in _plain((*MAIN, *OTHERS), ranks, sizes)]
    return [*cases, Case("barrier", 0, mode="single")]


def _half_precision(ranks: int) -> list[Case]:
    names = ("all_reduce", "reduce_scatter", "all_to_all")
    sizes = (4 * _KIB, 64 * _KIB, 512 * _KIB, 4 * MIB, 16 * MIB)
    return [Case(name, fitting(name, size, ranks), dtype="bfloat16") for name in names for size in sizes]
