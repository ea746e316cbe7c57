"""What a generated kernel moves, by its accesses: bytes of memory, elements asked of the cache, and what lies there already.

An access reaches a *footprint*: the sectors of 32 bytes that its terms touch, no more than its tensor has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from steptime._ops.generated import ATOMIC, FOREACH, LOAD, Access, GeneratedKernel

SECTOR_BYTES = 32
_KEPT = 1 << 13


@dataclass(frozen=True, slots=True)
class KernelTraffic:
    """Of one launch. Footprints are by argument, in order: what is read, what is written."""

    read: tuple[float, ...]
    written: tuple[float, ...]
    asked_bytes: float  # of the cache by loads, as useful elements
    again_bytes: float  # that an earlier loop over the same rows has loaded: mostly from the caches of multiprocessors
    stored_bytes: float
    indirect_bytes: float  # of those asked and stored, by loaded indices
    atomics: float
    contended: float  # atomic additions for each element that they are made to
    loads: float  # per iteration
    stores: float
    vector_bytes: int  # that rows of all accesses are aligned to, at most 16: what one instruction takes

    def missed_bytes(self, ages: Sequence[int], kept_bytes: float, lost_bytes: float) -> float:
        """Of what is read, bytes that come from memory, by how many bytes were touched since each argument was.

        Up to `kept_bytes` ago all is in the cache, from `lost_bytes` on nothing; between the two it goes evenly.
        """
        missed = 0.0
        for footprint, age in zip(self.read, ages, strict=True):
            gone = (age + footprint - kept_bytes) / (lost_bytes - kept_bytes)
            missed += footprint * min(max(gone, 0.0), 1.0)
        return missed


@lru_cache(maxsize=_KEPT)
def traffic_of(kernel: GeneratedKernel, sizes: tuple[int, ...]) -> KernelTraffic:
    """Of a kernel whose arguments have so many bytes; 0 where that is not known."""
    footprints: dict[tuple[bool, int], dict[object, float]] = defaultdict(dict)
    sums: dict[str, float] = defaultdict(float)
    total, scattered, vector = max(kernel.elements, 1), 1.0, 16
    for access in kernel.accesses:
        size, loads = sizes[access.argument], access.kind == LOAD
        often = _iterations(kernel, access, total)
        reached = float(total * access.item_bytes if access.indirect else footprint(access))
        reached = min(reached, max(size, SECTOR_BYTES) if size else total * SECTOR_BYTES)
        place = (access.terms, access.offset, access.indirect)
        again = loads and place in footprints[loads, access.argument]
        footprints[loads, access.argument][place] = reached
        useful = often * access.item_bytes
        sums["again" if again else "asked" if loads else "stored"] += useful
        sums["loads" if loads else "stores"] += often / total
        sums["indirect"] += useful if access.indirect else 0.0
        if access.kind == ATOMIC:
            sums["atomics"] += often
            scattered = min(scattered, reached / useful) if useful else scattered
        vector = min(
            [vector, *(math.gcd(access.item_bytes * term.stride, 16) for term in access.terms if abs(term.stride) > 1)]
        )
    arguments = range(len(kernel.arguments))
    read, written = (
        tuple(_together(footprints.get((loads, argument), {}), sizes[argument]) for argument in arguments)
        for loads in (True, False)
    )
    return KernelTraffic(
        *(read, written, sums["asked"], sums["again"], sums["stored"], sums["indirect"]),
        *(sums["atomics"], 1.0 / max(scattered, 1e-9) if sums["atomics"] else 0.0, sums["loads"], sums["stores"], vector),
    )


def _together(reached: dict[object, float], size: int) -> float:
    """The footprint of all accesses to one argument: of unknown size, that of the largest one."""
    return min(sum(reached.values()), max(size, SECTOR_BYTES)) if size else max(reached.values(), default=0.0)


def _iterations(kernel: GeneratedKernel, access: Access, total: int) -> float:
    """How often an access is made, element by element: a tile loads what does not go along an axis once for all of it."""
    if len(kernel.extents) == 1 or kernel.kind == FOREACH:
        return total * access.share
    axes = axes_of(kernel, access)
    return math.prod(extent for axis, extent in kernel.extents if axis in axes) * access.share


def axes_of(kernel: GeneratedKernel, access: Access) -> frozenset[str]:
    """The axes that an address goes along; by loaded indices, those too that loads of whole numbers go along."""
    axes = frozenset(term.axis for term in access.terms)
    return axes | _looked_up(kernel) if access.indirect else axes


@lru_cache(maxsize=_KEPT)
def _looked_up(kernel: GeneratedKernel) -> frozenset[str]:
    axes = (
        term.axis
        for access in kernel.accesses
        if access.kind == LOAD and not access.indirect and kernel.arguments[access.argument][1].startswith("int")
        for term in access.terms
    )
    return frozenset(axes) or frozenset(axis for axis, _ in kernel.extents)


def footprint(access: Access) -> int:
    """Bytes of the sectors that the terms of an access reach."""
    span, count = access.item_bytes, 1
    for term in sorted(access.terms, key=lambda term: abs(term.stride)):
        step = abs(term.stride) * access.item_bytes
        if step <= max(span, SECTOR_BYTES):
            span += (term.extent - 1) * step
        else:
            count *= term.extent
    return count * -(-span // SECTOR_BYTES) * SECTOR_BYTES
