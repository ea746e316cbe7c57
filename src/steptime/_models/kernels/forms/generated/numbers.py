"""A generated kernel in numbers: what its time is worked out from, and what trees see besides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from steptime._models.engine.stored import Floats
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.forms.generated.tiles import TileSectors, touched_by
from steptime._models.kernels.forms.generated.traffic import SECTOR_BYTES, KernelTraffic, traffic_of
from steptime._ops.generated import (
    FOREACH,
    INDEX,
    LOAD,
    PERSISTENT,
    PLAIN,
    POINTWISE,
    RANDOM,
    REDUCTION,
    SPLIT_SCAN,
    GeneratedKernel,
)
from steptime._units import MIB
from steptime.errors import InputError

# Kinds that have rates of their own; split scans go as reductions, the rest as pointwise ones.
RATED = (POINTWISE, REDUCTION, PERSISTENT, FOREACH)
_KINDS = (*RATED, SPLIT_SCAN)
_HINTS = ("INNER", "OUTER", "OUTER_TINY", "DEFAULT")
# Functions that take about as long as each other.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    PLAIN: (PLAIN,),
    INDEX: (INDEX,),
    "exp": ("exp", "exp2", "expm1", "sigmoid", "tanh"),
    "div": ("div", "sqrt_rn", "rsqrt", "sqrt", "div_rn"),
    "erf": ("erf",),
    "log": ("log", "log1p", "log2", "log10"),
    "random": RANDOM,
    "welford": ("welford_reduce", "welford_combine"),
    "online": ("online_softmax_combine",),
    "scan": ("associative_scan",),
    "other": (),
}
_GROUP = {name: group for group, names in FUNCTIONS.items() for name in names}
# What is kept of a cache, in shares of it: where the bytes that arguments miss are looked at.
_EDGES = (0.1, 0.3, 0.6, 0.9, 1.2, 1.8)
_SMALL_BYTES = 1e5
_KEPT = 1 << 14
LONG_AGO_BYTES = 1 << 40
"""More than any cache has."""
_AGES = tuple(MIB * edge for edge in (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128))

COLUMNS = (
    *("elements", "reduced", "across", "y", "read", "written", "missed"),
    *(f"missed{number}" for number in range(len(_EDGES) - 1)),
    *("asked", "again", "stored", "indirect", "atomics", "contended", "loads", "stores"),
    *("vector", "largest", "small", *FUNCTIONS, "reductions", "loops", "parts", "rows", "kind", "hint"),
    *("least_item", "most_item", "load_count", "store_count", "inner", "masked"),
    *("warp_loads", "block_loads", "warp_stores", "block_stores", "scattered", "instructions"),
    *("blocks", "warps", "turns", "tile", "padded"),
)
AT: Mapping[str, int] = {name: place for place, name in enumerate(COLUMNS)}


@dataclass(frozen=True, slots=True)
class GeneratedConstants:
    """Of a device."""

    sms: float
    threads_per_sm: float
    peak_bytes_per_ns: float
    l2_bytes: float
    # Bytes touched up to which all that was read or written is in the cache, and from which on nothing is.
    kept_bytes: float
    lost_bytes: float


def generated_call(name: str, text: str, tensors: Sequence[TensorArg], ages: Sequence[int]) -> Call:
    """What is asked of a generated kernel: its text, its arguments in order, and bytes touched since each was; -1: never."""
    return Call(name, (text, tuple(tensors), tuple(map(rounded_age, ages))), written=())


def rounded_age(age: int) -> int:
    """Up to one of a few numbers, so that a step asks few distinct questions; the largest stands for long ago and never."""
    return next((edge for edge in _AGES if 0 <= age <= edge), LONG_AGO_BYTES)


def asked_of(call: Call) -> tuple[GeneratedKernel, tuple[int, ...], tuple[int, ...]]:
    """Kernel, bytes of its arguments and their ages. Raises InputError for a call that is none."""
    text, tensors, ages = (*call.args, None, None, None)[:3]
    if not isinstance(text, str) or not isinstance(tensors, tuple) or not isinstance(ages, tuple):
        raise InputError(f"{call.op}: nothing is known of this generated kernel")
    kernel = GeneratedKernel.read(text)
    count = len(kernel.arguments)
    sizes = [each.nbytes if isinstance(each, TensorArg) else 0 for each in tensors]
    known = [each if isinstance(each, int) and each >= 0 else LONG_AGO_BYTES for each in ages]
    return kernel, tuple((sizes + [0] * count)[:count]), tuple((known + [LONG_AGO_BYTES] * count)[:count])


def numbers_of(calls: Sequence[Call], device: GeneratedConstants, share: Sequence[float]) -> Floats:
    """A row for each call, on one of so many equal parts of a device."""
    rows = [_row(call, device, part) for call, part in zip(calls, share, strict=True)]
    return np.asarray(rows, dtype=np.float64).reshape(-1, len(COLUMNS))


@lru_cache(maxsize=_KEPT)
def _row(call: Call, device: GeneratedConstants, share: float) -> tuple[float, ...]:
    kernel, sizes, ages = asked_of(call)
    moved = traffic_of(kernel, sizes)
    missed = moved.missed_bytes(ages, device.kept_bytes / share, device.lost_bytes / share)
    cache = device.l2_bytes / share
    between = [moved.missed_bytes(ages, low * cache, high * cache) for low, high in pairwise(_EDGES)]
    elements = max(kernel.elements, 1)
    reduced = max(math.prod(extent for axis, extent in kernel.extents if axis[0] == "r"), 1)
    across = elements / reduced
    groups = dict.fromkeys(FUNCTIONS, 0.0)
    for name, count in kernel.functions:
        groups[_GROUP.get(name, "other")] += count
    items = [access.item_bytes for access in kernel.accesses if access.terms] or [4]
    loads = sum(access.kind == LOAD for access in kernel.accesses)
    loops = max((access.loop for access in kernel.accesses), default=0)
    inner = [term.extent for access in kernel.accesses for term in access.terms if abs(term.stride) == 1]
    footprints = [*moved.read, *moved.written]
    return (
        *(elements, reduced, across, kernel.extent("y")),
        *(sum(moved.read), sum(moved.written), missed, *between),
        *_asked(moved),
        *(moved.vector_bytes, max(footprints, default=0.0), sum(each for each in moved.read if each < _SMALL_BYTES)),
        *groups.values(),
        *(kernel.reductions, loops, kernel.parts, kernel.rows, _kind(kernel.kind), _place(kernel.hint, _HINTS)),
        *(min(items), max(items), loads, len(kernel.accesses) - loads, min(inner, default=1)),
        *(sum(access.share < 1 for access in kernel.accesses), *_divided(touched_by(kernel, device.sms / share))),
    )


def _asked(moved: KernelTraffic) -> tuple[float, ...]:
    return (
        moved.asked_bytes,
        moved.again_bytes,
        moved.stored_bytes,
        moved.indirect_bytes,
        moved.atomics,
        moved.contended,
        moved.loads,
        moved.stores,
    )


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) + 1 if name in names else 0


def _kind(kind: str) -> int:
    return _KINDS.index(kind) if kind in _KINDS else 0


def _divided(touched: TileSectors) -> tuple[float, ...]:
    blocks = touched.blocks
    sectors = (touched.loaded, touched.fetched, touched.stored, touched.written, touched.scattered)
    return (
        *(SECTOR_BYTES * count for count in sectors),
        *(touched.instructions, blocks.count, blocks.warps, blocks.turns, blocks.elements),
        blocks.count * blocks.turns * blocks.elements,
    )
