"""What a block of a generated kernel touches: sectors that its warps ask for, and different ones among those.

Triton lays every access out along the axis where neighbours are contiguous
(triton/lib/Dialect/TritonGPU/Transforms/Coalesce.cpp); a warp's instruction takes up to 16 bytes of each of its lanes. Sectors
that a block touches twice, by one access or by several of one argument, come from the cache of its multiprocessor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from steptime._models.engine.stored import Longs
from steptime._models.kernels.forms.generated.blocks import Blocks, blocks_of
from steptime._models.kernels.forms.generated.traffic import SECTOR_BYTES, axes_of
from steptime._ops.generated import ATOMIC, LOAD, Access, GeneratedKernel

_LANES, _VECTOR_BYTES = 32, 16
_NOWHERE = 1 << 60
# What a loaded index is taken to move an address by.
_ELSEWHERE = 1 << 30
# How much slower a multiprocessor moves alone; sectors that a device moves while a loop turns, and while a block starts.
_ALONE, _OF_TURN, _OF_BLOCK = 2.0, 40_000.0, 8.0
_MOST = 2048  # elements of a tile that are looked at
_KEPT = 1 << 13


@dataclass(frozen=True, slots=True)
class TileSectors:
    """By all blocks together, in sectors."""

    blocks: Blocks
    loaded: float  # that warps ask for
    fetched: float  # that blocks have to get from the cache of the device
    stored: float
    written: float
    scattered: float  # of those asked for, by loaded indices
    instructions: float  # loads and stores of warps


@lru_cache(maxsize=_KEPT)
def touched_by(kernel: GeneratedKernel, sms: float) -> TileSectors:
    """With the division that takes least on so many multiprocessors, as if Inductor had timed them."""
    tried = [_touched(kernel, blocks) for blocks in blocks_of(kernel)]
    return min(tried, key=lambda touched: _effort(touched, sms))


def _effort(touched: TileSectors, sms: float) -> float:
    """In sectors that a device moves meanwhile: few blocks move less at once, and turns have to be awaited."""
    blocks = touched.blocks
    moved = touched.fetched + touched.written + 0.25 * (touched.loaded + touched.stored)
    return moved * max(1.0, _ALONE * sms / blocks.count) + _OF_TURN * blocks.turns + _OF_BLOCK * blocks.count


def _touched(kernel: GeneratedKernel, blocks: Blocks) -> TileSectors:
    sums: dict[str, float] = defaultdict(float)
    together: dict[tuple[bool, int], list[tuple[float, Longs]]] = defaultdict(list)
    for access in kernel.accesses:
        part, scale = _part(kernel, blocks, access)
        loads = access.kind == LOAD
        sums["loaded" if loads else "stored"] += part.asked * scale
        sums["instructions"] += part.instructions * scale
        if access.indirect:
            sums["scattered"] += part.asked * scale
            sums["fetched" if loads else "written"] += part.asked * scale
        else:
            together[loads, access.argument].append((scale, part.sectors))
    for (loads, _), parts in together.items():
        sums["fetched" if loads else "written"] += _once(parts)
    names = ("loaded", "fetched", "stored", "written", "scattered", "instructions")
    return TileSectors(blocks, *(sums[name] for name in names))


def _once(parts: Sequence[tuple[float, Longs]]) -> float:
    """Sectors of all blocks, where one that several accesses of a block touch counts once."""
    apart = sum(scale * len(sectors) for scale, sectors in parts)
    alone = sum(len(sectors) for _, sectors in parts)
    if len(parts) == 1 or not alone:
        return apart
    return apart * len(np.unique(np.concatenate([sectors for _, sectors in parts]))) / alone


def _part(kernel: GeneratedKernel, blocks: Blocks, access: Access) -> tuple[_AccessSectors, float]:
    """What an access touches in a tile, and how many times that all blocks do so together."""
    extents = dict(kernel.extents) or {"x": 1}
    tile = {axis: min(size, extents[axis]) for axis, size in blocks.tile}
    axes = axes_of(kernel, access)
    seen = tuple((axis, size) for axis, size in tile.items() if axis in axes)
    part = _of_access(access, seen)
    # What does not go along the axis of a loop is loaded once.
    once = not access.loop and not any(axis[0] == "r" for axis in axes)
    turns = blocks.count * (1 if once else blocks.turns)
    covered = blocks.count * blocks.turns * math.prod(tile.values())
    full = min(max(kernel.elements, 1) / covered, 1.0)
    return part, math.prod(size for _, size in seen) / part.elements * turns * full * access.share


@dataclass(frozen=True, slots=True)
class _AccessSectors:
    """Of one access of one tile."""

    asked: float  # sectors, by warps one by one
    instructions: float
    sectors: Longs  # different ones
    elements: int  # that were looked at


@lru_cache(maxsize=_KEPT)
def _of_access(access: Access, tile: tuple[tuple[str, int], ...]) -> _AccessSectors:
    along = {axis: _steps(access, axis, size) for axis, size in tile}
    order = sorted(along, key=lambda axis: (_stride(along[axis]), -len(along[axis])))
    address = np.zeros(1, dtype=np.int64)
    for axis in order:
        address = (along[axis][: max(_MOST // len(address), 1), None] + address[None, :]).ravel()
    sectors = (address + access.offset) * access.item_bytes // SECTOR_BYTES
    vector = _vector(along[order[0]], access) if order else 1
    if access.kind == ATOMIC:
        vector = min(vector, max(4 // max(access.item_bytes, 1), 1))
    asked, instructions = _asked(sectors, _LANES * vector)
    return _AccessSectors(asked, instructions, np.unique(sectors), len(address))


def _asked(sectors: Longs, group: int) -> tuple[float, int]:
    """Different sectors in each group, summed, and how many groups there are."""
    groups = -(-len(sectors) // group)
    whole = np.concatenate([sectors, np.full(groups * group - len(sectors), sectors[-1])]).reshape(groups, group)
    whole.sort(axis=1)
    return float(groups + np.count_nonzero(np.diff(whole, axis=1))), groups


def _steps(access: Access, axis: str, size: int) -> Longs:
    index = np.arange(size, dtype=np.int64)
    address = np.zeros(size, dtype=np.int64)
    for term in access.terms:
        if term.axis == axis:
            address += (index // max(term.every, 1)) % max(term.extent, 1) * term.stride
    if access.indirect and all(term.axis != axis for term in access.terms):
        address += index * _ELSEWHERE
    return address


def _stride(along: Longs) -> int:
    """Of neighbours; an axis that changes nothing comes last."""
    if len(along) < 2:
        return _NOWHERE
    step = abs(int(along[1] - along[0]))
    return step or _NOWHERE - 1


def _vector(along: Longs | None, access: Access) -> int:
    """Elements that a lane takes at once."""
    if along is None or len(along) < 2 or along[1] - along[0] != 1:
        return 1
    run = len(along) if (np.diff(along) == 1).all() else int(np.argmax(np.diff(along) != 1)) + 1
    aligned = math.gcd(run, *(abs(term.stride) for term in access.terms if abs(term.stride) > 1), access.offset) or 1
    return max(min(_VECTOR_BYTES // max(access.item_bytes, 1), math.gcd(aligned, _VECTOR_BYTES)), 1)
