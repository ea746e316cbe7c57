"""How Inductor divides a generated kernel among blocks: which tile each takes, with how many warps, in how many turns.

Follows torch/_inductor/runtime/triton_heuristics.py. Where Inductor times several tiles and keeps the fastest, all are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from steptime._ops.generated import FOREACH, LOAD, PERSISTENT, REDUCTION, SPLIT_SCAN, GeneratedKernel

_LARGEST_X, _LARGEST_Y = 4096, 1024  # of a block
_AT_ONCE = 4096  # elements that a persistent reduction holds at most where it takes several rows
_KEPT = 1 << 13


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tile by axis, the warps that work on it, and how often a block goes on to the next one."""

    tile: tuple[tuple[str, int], ...]
    warps: int
    turns: int
    count: int

    @property
    def elements(self) -> int:
        """Of a tile."""
        return math.prod(size for _, size in self.tile)


@lru_cache(maxsize=_KEPT)
def blocks_of(kernel: GeneratedKernel) -> tuple[Blocks, ...]:
    """What Inductor chooses from, the usual one first."""
    extents = dict(kernel.extents) or {"x": 1}
    hints = {axis: _power(extent) for axis, extent in extents.items()}
    if kernel.kind == PERSISTENT:
        tiles = _persistent(kernel, hints)
    elif kernel.kind in (REDUCTION, SPLIT_SCAN):
        tiles = _looping(kernel, hints)
    else:
        tiles = _pointwise(kernel, hints)
    return tuple(dict.fromkeys(_blocks(kernel, extents, tile, warps) for tile, warps in tiles))


def _blocks(kernel: GeneratedKernel, extents: dict[str, int], tile: dict[str, int], warps: int) -> Blocks:
    along = math.prod(-(-extent // tile[axis]) for axis, extent in extents.items() if axis[0] == "r")
    across = math.prod(-(-extent // tile[axis]) for axis, extent in extents.items() if axis[0] != "r")
    turns = along
    if kernel.kind == SPLIT_SCAN:
        turns, across = 1, across * along
    elif kernel.rows:
        turns = max(-(-kernel.rows // tile["x"]), 1)
        across = -(-extents.get("x", 1) // kernel.rows)
    elif kernel.kind == FOREACH:
        across += kernel.parts
    return Blocks(tuple(tile.items()), warps, turns, max(across, 1))


def _power(number: float) -> int:
    """The next power of two."""
    return 1 << max(math.ceil(number) - 1, 0).bit_length()


def _warps(number: int, least: int, most: int) -> int:
    return _power(min(max(number, least), most))


Tiles = list[tuple[dict[str, int], int]]


def _pointwise(kernel: GeneratedKernel, hints: dict[str, int]) -> Tiles:
    if kernel.kind == FOREACH:
        return [({axis: 1024 if axis == "x" else 1 for axis in hints}, 8)]
    axes = list(hints)
    usual = max(256, min(math.prod(hints.values()) // 128, 1024))
    if len(axes) == 1:
        return [_scaled(hints, [usual], 256), _scaled(hints, [usual // 2], 64)]
    if len(axes) > 2:
        return [_scaled(hints, [16, 16, 16], 256)]
    if len(kernel.arguments) == 2:
        return [_scaled(hints, [32, 32], 256)]
    wanted = ([32, 32], [64, 64], [256, 16], [16, 256], [usual, 1], [1, usual])
    return [_scaled(hints, sizes, 256) for sizes in wanted]


def _scaled(hints: dict[str, int], wanted: list[int], of_warp: int) -> tuple[dict[str, int], int]:
    """A tile no larger than the kernel, and made larger along other axes where it is smaller along one."""
    target = math.prod(wanted)
    if math.prod(hints.values()) < target:
        target //= 8
    tile = {axis: min(size, hint) for (axis, hint), size in zip(hints.items(), wanted, strict=False)}
    for axis, hint in hints.items():
        while tile[axis] < min(hint, _LARGEST_X if axis == "x" else _LARGEST_Y) and math.prod(tile.values()) < target:
            tile[axis] *= 2
    elements = math.prod(tile.values())
    warps = _warps(elements // of_warp, 1, 8)
    return tile, max(warps, 4) if elements >= 128 else warps


def _looping(kernel: GeneratedKernel, hints: dict[str, int]) -> Tiles:
    rows, reduced = _sides(hints)
    heavy = sum(access.kind == LOAD for access in kernel.accesses) + kernel.reductions
    intensive = rows >= 1024 and heavy >= 10
    most = 1024 if intensive else 2048
    inner = (2 if reduced <= 2048 else 1, min(reduced, most))
    tiny = (2 * (256 // reduced) if reduced <= 256 else 1, min(reduced, most))
    outer = _outer(kernel, rows, reduced)
    if kernel.hint == "INNER":
        wanted = [inner]
    elif kernel.hint == "OUTER":
        wanted = [outer]
    elif kernel.hint == "OUTER_TINY":
        wanted = [tiny]
    else:
        wanted = [inner, outer, tiny, (64, 64), (8, 512), (64, 4)]
    made = [_reduction(kernel, hints, x, r, intensive=intensive) for x, r in wanted]
    if kernel.kind == SPLIT_SCAN:
        made = [({axis: max(size, 256) if axis[0] == "r" else size for axis, size in tile.items()}, w) for tile, w in made]
    return made


def _sides(hints: dict[str, int]) -> tuple[int, int]:
    return (
        math.prod(hint for axis, hint in hints.items() if axis[0] != "r"),
        math.prod(hint for axis, hint in hints.items() if axis[0] == "r"),
    )


def _outer(kernel: GeneratedKernel, rows: int, reduced: int) -> tuple[int, int]:
    if rows <= 1024:
        return max(min(rows // 128, 8), 2), min(reduced, 64)
    if rows // 4096 <= 8:
        return 16, 32
    columns = max(min(256, _power(rows // 4096)), 64)
    if sum(access.kind == LOAD for access in kernel.accesses) < 4 or reduced <= 128:
        return columns, 512 // columns
    return min(columns, 32), 64 if reduced >= 2048 else 32


def _reduction(
    kernel: GeneratedKernel, hints: dict[str, int], wide: int, along: int, *, intensive: bool, warps: int = 0
) -> tuple[dict[str, int], int]:
    rows, reduced = _sides(hints)
    target = wide * along
    wide, along = min(wide, rows), min(along, reduced)
    if rows * reduced < target:
        target //= 8
    while wide < rows and wide * along < target:
        wide *= 2
    while along < reduced and wide * along < target:
        along *= 2
    most = (16 if along <= 8192 else 32) // (2 if intensive else 1)
    number = warps or _warps((along if kernel.hint == "INNER" else wide * along) // 128, 2, most)
    return _spread(hints, wide, along), number


def _spread(hints: dict[str, int], wide: int, along: int) -> dict[str, int]:
    """A tile of so many columns and so many elements along reductions, filled from the innermost axis."""
    tile, left = {}, {False: wide, True: along}
    for axis in sorted(hints, key=lambda axis: axis if axis[0] != "r" else f"r{-int(axis[1:])}"):
        reduces = axis[0] == "r"
        tile[axis] = min(hints[axis], left[reduces])
        left[reduces] = max(left[reduces] // tile[axis], 1)
    return {axis: tile[axis] for axis in hints}


def _persistent(kernel: GeneratedKernel, hints: dict[str, int]) -> Tiles:
    rows, reduced = _sides(hints)
    few = [1, *(wide for wide in (8, 32, 128) if reduced * wide <= _AT_ONCE and wide <= rows)]
    warps = 0
    if kernel.rows:
        few = [min(max(kernel.rows // 32, 4 if reduced <= 512 else 1), 16)]
        warps = max(_warps(reduced // 128, 2, 8) // (2 if reduced <= 1024 else 1), 1)
    elif kernel.hint == "INNER" and reduced >= 256:
        if reduced > 1024 or rows // 8 < 128:
            few = [1]
        else:
            few, warps = [min(1024 // reduced, 8)], 1
    elif kernel.hint == "OUTER":
        few = few[-1:]
    elif kernel.hint == "OUTER_TINY":
        few = [2 * (256 // reduced) if reduced <= 256 else 1]
    return [_reduction(kernel, hints, wide, reduced, intensive=True, warps=warps) for wide in few]
