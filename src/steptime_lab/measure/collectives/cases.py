"""The sweep: at which places, which cases, in the order of their worth. A run may end anywhere in it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np

from steptime._calibrate.collectives.cases import BUCKET, LOOPBACK, MAIN, OTHERS, CollectiveCase, Matrix, Place, fitting
from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.ranks import Layout
from steptime._units import MIB, NS_PER_MS
from steptime.errors import InputError

# Sharded training on four ranks is measured first, so its wires are as well.
_ORDER_OF_WORTH = (4, 2, 8)


def places(options: Options, gpus: int) -> list[Place]:
    """What there is to measure, most wanted first: every rank count on the first fabric, then on the next."""
    ranks = rank_counts(options, gpus)
    if options.device != "cuda":
        return [Place(count, "gloo", 1) for count in ranks]
    if not options.share_gpu:
        return [Place(count, "default", 1) for count in ranks]
    return [Place(count, fabric, count) for fabric in LOOPBACK for count in ranks]


def rank_counts(options: Options, gpus: int) -> list[int]:
    """The rank counts asked for that can exchange something, most wanted first."""
    asked = [count for count in options.ranks if count > 1]
    if options.device == "cuda" and not options.share_gpu:
        fitting = [count for count in asked or (2, 4, 8) if count <= gpus]
        if not fitting:
            raise InputError(
                f"collectives need two ranks or more and this machine has {gpus} GPU(s); "
                "let the ranks share one (--share-gpu) or use a machine with more"
            )
        asked = fitting
    elif not asked:
        asked = [2, 4, 8] if options.device == "cuda" else [2]
    return sorted(set(asked), key=lambda count: (_ORDER_OF_WORTH.index(count) if count in _ORDER_OF_WORTH else 9, count))


def layout_of(place: Place, device: str) -> Layout:
    """Where its ranks live."""
    return Layout(place.ranks, share_gpu=device == "cuda" and place.share > 1, device=device)


# How many cases per rank count: 510 in all, most where sharding is validated.
WANTED = {2: 120, 4: 260, 8: 130}

_SMALLEST_TOTAL, _LARGEST_TOTAL = 64 * 1024, 64 * MIB
_ELEMENT_BYTES = 4  # fp32
_DIMS = (16, 32, 64, 128)

# Forward: every sender's batch shares are equal. Backward: the same matrix with the directions swapped.
_KINDS = ("forward", "backward", "any")
_CHANCES = (0.55, 0.15, 0.30)


def uneven(ranks: int, count: int, seed: int) -> list[Matrix]:
    """So many different matrices, the same for the same seed."""
    draw = np.random.default_rng([seed, ranks, 3])
    result: dict[Matrix, None] = {}
    while len(result) < count:
        total = float(np.exp(draw.uniform(np.log(_SMALLEST_TOTAL), np.log(_LARGEST_TOTAL))))
        kind = str(draw.choice(_KINDS, p=_CHANCES))
        elements = _any(draw, ranks, total) if kind == "any" else _sharded(draw, ranks, total)
        matrix = elements.T if kind == "backward" else elements
        if len(set(matrix.ravel().tolist())) > 1:
            result[tuple(int(value) * _ELEMENT_BYTES for value in matrix.ravel())] = None
    return list(result)


def _sharded(draw: np.random.Generator, ranks: int, total_bytes: float) -> np.ndarray:
    """Rank i owns tables of some dims and sends every rank its batch share of all of them: constant rows."""
    tables = int(draw.integers(ranks, 8 * ranks + 1))
    dims = draw.choice(_DIMS, size=tables)
    # A rank without a table sends nothing; each has at least one here, the rest go anywhere.
    owner = np.concatenate([np.arange(ranks), draw.integers(0, ranks, tables - ranks)])
    owned = np.bincount(owner, weights=dims, minlength=ranks).astype(np.int64)
    per_sample_bytes = int(owned.sum()) * ranks * _ELEMENT_BYTES
    batch_share = max(1, round(total_bytes / per_sample_bytes))
    return np.tile(owned[:, None] * batch_share, (1, ranks))


def _any(draw: np.random.Generator, ranks: int, total_bytes: float) -> np.ndarray:
    """Every entry for itself, over more than a decade; the diagonal (what stays) may be large as well."""
    weights = np.exp(draw.normal(0.0, draw.uniform(0.3, 1.5), (ranks, ranks)))
    elements = weights / weights.sum() * total_bytes / _ELEMENT_BYTES
    whole: np.ndarray = np.maximum(1, np.round(elements)).astype(np.int64)
    return whole


def largest_sent_bytes(splits: Matrix, ranks: int) -> int:
    """The largest send buffer of a rank."""
    return int(np.asarray(splits).reshape(ranks, ranks).sum(axis=1).max())


_KIB = 1024
_DOUBLING = tuple(4 << power for power in range(27))  # 4 B to 256 MiB
# Where a curve bends, and the buckets of small models.
_ESSENTIAL = (MIB, 64 * _KIB, 8 * MIB, 256 * _KIB, 16 * _KIB, 4 * _KIB, 4 * MIB, 2 * MIB, 512 * _KIB, 32 * _KIB, 128 * _KIB,
              16 * MIB, int(1.2 * MIB), int(2.6 * MIB), 1 * _KIB, 4, 64 * MIB)  # fmt: skip
_COARSE = (64 * _KIB, MIB, 8 * MIB, 4 * _KIB, 512 * _KIB)
_CROWDED = (MIB, 16 * MIB, 64 * _KIB)
_SKEWS_NS = (0.2 * NS_PER_MS, 1.0 * NS_PER_MS, 5.0 * NS_PER_MS)


def tiers(ranks: int, *, dense: bool, seed: int, only: Sequence[str] = ()) -> list[list[CollectiveCase]]:
    """Every case of a place, in lists of falling worth; the first is what every place should have. No case is in two."""
    uneven_cases = WANTED.get(ranks, 60) // (1 if dense else 4)
    results = [
        essential(ranks, seed),
        _uneven(ranks, uneven_cases, seed),
        _plain(MAIN, ranks, _grid((1.3, 1.6) if dense else (1.3,), 64 * MIB)),
        _plain(OTHERS, ranks, _grid((1.4,) if dense else (), 16 * MIB)),
        [*_crowded(ranks, (64 * _KIB, MIB, 8 * MIB, 64 * MIB)), *_skewed(ranks, (4 * _KIB, 64 * _KIB, MIB, 8 * MIB), seed)],
        [*_single(ranks), *_half_precision(ranks)],
        [*_plain(MAIN, ranks, [128 * MIB, 256 * MIB]), *_plain(OTHERS, ranks, [s for s in _DOUBLING if s > 16 * MIB])],
    ]
    first_in = {case: number for number, tier in reversed(list(enumerate(results))) for case in tier}
    return [
        [case for case in dict.fromkeys(tier) if first_in[case] == number and (not only or case.collective in only)]
        for number, tier in enumerate(results)
    ]


def essential(ranks: int, seed: int) -> list[CollectiveCase]:
    """A few of each kind: sizes of the main collectives, company, busy hosts, late ranks, uneven splits, other collectives."""
    main = _plain(MAIN, ranks, _ESSENTIAL)
    # One circumstance at a time.
    crowded = [case for case in _crowded(ranks, _CROWDED) if case.beside == "none" or case.host_threads == "idle"]
    late = [case for case in _skewed(ranks, (64 * _KIB, MIB), seed) if case.skew_ns == 1.0 * NS_PER_MS]
    return [BUCKET, *main[:16], *crowded, *late, *_uneven(ranks, 12, seed), *main[16:], *_plain(OTHERS, ranks, _COARSE)]


def few(ranks: int, *, seed: int, only: Sequence[str] = ()) -> list[list[CollectiveCase]]:
    """A handful of cases of each kind, small."""
    sizes = [4, 4 * _KIB, 100 * _KIB]
    results = [
        *_plain((*MAIN, *OTHERS), ranks, sizes),
        *[case for case in _uneven(ranks, 40, seed) if case.size_bytes < 256 * _KIB][:4],
        *(CollectiveCase(name, fitting(name, 64 * _KIB, ranks), beside=beside) for name in MAIN for beside in ("gemm", "copy")),
        *(CollectiveCase(name, fitting(name, 64 * _KIB, ranks), host_threads="busy") for name in MAIN),
        *(CollectiveCase(name, fitting(name, 64 * _KIB, ranks), skew_ns=1.0 * NS_PER_MS, late_rank=ranks - 1) for name in MAIN),
        CollectiveCase("all_reduce", 4, mode="single"),
        CollectiveCase("barrier", 0, mode="single"),
        CollectiveCase("all_reduce", 4 * _KIB, dtype="bfloat16"),
    ]
    return [list(dict.fromkeys(case for case in results if not only or case.collective in only))]


def _grid(between: Sequence[float], largest: int) -> list[int]:
    """Doubling sizes up to the largest, and sizes between them where bandwidth begins to matter."""
    doubling = [size for size in _DOUBLING if size <= largest]
    return [*doubling, *(int(size * factor) for size in doubling for factor in between if _KIB <= size < largest)]


def _plain(names: Iterable[str], ranks: int, sizes: Iterable[int]) -> list[CollectiveCase]:
    # Two ranks in a ring are a pair.
    wanted = [name for name in names if not (name == "send_recv_ring" and ranks == 2)]
    return [CollectiveCase(name, fitting(name, size, ranks)) for size in sizes for name in wanted]


def _uneven(ranks: int, count: int, seed: int) -> list[CollectiveCase]:
    return [
        CollectiveCase("all_to_all", largest_sent_bytes(matrix, ranks), splits=matrix) for matrix in uneven(ranks, count, seed)
    ]


def _crowded(ranks: int, sizes: Iterable[int]) -> list[CollectiveCase]:
    """Beside compute, and with host threads busy; then both."""
    pairs = [(name, fitting(name, size, ranks)) for size in sizes for name in MAIN]
    return [
        *(CollectiveCase(name, size, beside=beside) for name, size in pairs for beside in ("gemm", "copy")),
        *(CollectiveCase(name, size, host_threads="busy") for name, size in pairs),
        *(CollectiveCase(name, size, beside="gemm", host_threads="busy") for name, size in pairs if size <= 8 * MIB),
    ]


def _skewed(ranks: int, sizes: Iterable[int], seed: int) -> list[CollectiveCase]:
    draw = random.Random(seed)
    return [
        CollectiveCase(name, fitting(name, size, ranks), skew_ns=skew, late_rank=draw.choice((0, draw.randrange(ranks))))
        for size in sizes
        for name in MAIN
        for skew in _SKEWS_NS
    ]


def _single(ranks: int) -> list[CollectiveCase]:
    """What a host that waits for it sees, where latency matters."""
    sizes = [4, 256, 4 * _KIB, 16 * _KIB, 64 * _KIB, 256 * _KIB, MIB]
    cases = [CollectiveCase(case.collective, case.size_bytes, mode="single") for case in _plain((*MAIN, *OTHERS), ranks, sizes)]
    return [*cases, CollectiveCase("barrier", 0, mode="single")]


def _half_precision(ranks: int) -> list[CollectiveCase]:
    names = ("all_reduce", "reduce_scatter", "all_to_all")
    sizes = (4 * _KIB, 64 * _KIB, 512 * _KIB, 4 * MIB, 16 * MIB)
    return [CollectiveCase(name, fitting(name, size, ranks), dtype="bfloat16") for name in names for size in sizes]
