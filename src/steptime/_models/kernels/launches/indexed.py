"""Launches by index: rows looked up or scattered, and the radix sort of indices that gradients of looked-up rows begin with."""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import contiguous
from steptime._models.kernels.launches import GATHER, SCATTER_GATHER, SMALL_INDEX, Grids, Launch, Operand, fresh, hot
from steptime._models.kernels.launches.iterator import memset, serial_grids

_VECTOR_BYTES, _LINE_BYTES, _SECTOR_BYTES = 16, 128, 32
# Indices up to which ATen's index_select has a kernel of its own.
_FEW = 16
# ATen's gather, scatter and index kernels: threads of a block, elements that a thread takes one after the other.
_THREADS, _EACH_SCATTER, _EACH_INDEXED = 128, 8, 4
_INDEX_BYTES = 8


def distinct_rows(rows: int, lookups: int) -> float:
    """Rows met at least once when so many are drawn evenly."""
    return rows * -math.expm1(-lookups / rows) if rows else 0.0


def part(table: Operand, shape: tuple[int, ...]) -> Operand:
    """As much of a table as is touched."""
    return replace(table, shape=shape, strides=contiguous(shape))


def touched(table: Operand, elements: int) -> Operand:
    """The sectors of a tensor that evenly drawn single elements lie in."""
    sectors = max(1.0, table.nbytes / _SECTOR_BYTES)
    met = _SECTOR_BYTES * sectors * -math.expm1(-elements / sectors)
    return part(table, (max(1, int(met) // table.item_bytes),))


def scatter_grids(elements: int) -> Grids:
    """The grid of the kernel of gather, scatter and unaligned selection."""
    return serial_grids(elements, _EACH_SCATTER)


def indexed_grids(elements: int) -> Grids:
    """The grid of the kernel of advanced indexing."""
    return serial_grids(elements, _EACH_INDEXED)


def rows_by_index(table: Operand, index: Operand, *, unaligned: str = SCATTER_GATHER, few: bool = True) -> Launch:
    """Rows of `table` (its first dimension) by `index`. `few` says whether few indices have a kernel of their own."""
    lookups, columns = index.numel, math.prod(table.shape[1:])
    row_bytes, rows = columns * table.item_bytes, table.shape[0]
    met = max(1, int(distinct_rows(rows, lookups)))
    facts = {
        "rows": lookups,
        "row_bytes": row_bytes,
        "table_rows": rows,
        "footprint_bytes": table.nbytes,
        "reuse": lookups / met,
        "aligned_128": row_bytes % _LINE_BYTES == 0,
    }
    reads, writes = (part(table, (met, columns)), index), (fresh((lookups, columns), table.dtype),)
    elements = lookups * columns
    if few and lookups <= _FEW:
        return Launch(SMALL_INDEX, elements, reads, writes, facts, ((elements / 1024, 1.0), (1.0, lookups)), "", table.dtype)
    if row_bytes % _VECTOR_BYTES == 0:
        grids = ((lookups * math.ceil(row_bytes / 4096), 1.0), (lookups, row_bytes))
        return Launch(GATHER, elements, reads, writes, facts, grids, "", table.dtype)
    ways = _unaligned_grids(elements, columns) if unaligned == SCATTER_GATHER else indexed_grids(elements)
    return Launch(unaligned, elements, reads, writes, facts, ways, "rows", table.dtype)


def _unaligned_grids(elements: int, columns: int) -> Grids:
    """Besides its elements, a thread waits for an index whenever its next element lies in another sector of them."""
    blocks = elements / (_THREADS * _EACH_SCATTER)
    span = min(elements, _THREADS * _EACH_SCATTER)
    waits = min(_EACH_SCATTER, math.ceil(span / (columns * _SECTOR_BYTES / _INDEX_BYTES)))
    return (*scatter_grids(elements), (blocks, waits))


# Keys up to which one block sorts all of them (seen between 2,182 and 2,316 in the measured rows).
_SINGLE_TILE = 2304
# Bits that a pass of CUB sorts by: over many blocks, and within one (seen: another 1.1 us for every 6 bits).
_PASS_BITS, _TILE_PASS_BITS = 8, 6
_TILE = 4096  # keys of a block; only the order of magnitude matters, the weight is fitted


def over_indices(kernel: str, indices: int, *, table_rows: int = 0, path: str = "", serial: float = 1.0) -> Launch:
    """A kernel that does little for every index, which the launch before has written."""
    facts = {"rows": indices, "table_rows": table_rows}
    grids = ((indices / 1024, serial), (indices / _TILE, serial))
    column = (hot((indices,), "int64", 8 * indices),)
    return Launch(kernel, indices, column, (fresh((indices,), "int64"),), facts, grids, path, "indices")


def radix_sort(indices: int, bits: int, high: int) -> list[Launch]:
    """Sorts so many indices by `bits` bits; `high` is what they are below, which leaves the upper digits zero."""
    if indices <= _SINGLE_TILE:
        return [_single_tile(indices, math.ceil(bits / _TILE_PASS_BITS))]
    results = [memset(4 * indices // _TILE + 4), memset(8 << _PASS_BITS)]
    results += [
        over_indices("DeviceRadixSortHistogramKernel", indices, serial=math.ceil(bits / _PASS_BITS)),
        over_indices("DeviceRadixSortExclusiveSumKernel", math.ceil(bits / _PASS_BITS) << _PASS_BITS),
    ]
    for digit in range(math.ceil(bits / _PASS_BITS)):
        varied = high > 1 << (_PASS_BITS * digit)
        path = "first" if digit == 0 else "varied" if varied else "constant"
        results += [memset(4 * indices // _TILE + 4), over_indices("DeviceRadixSortOnesweepKernel", indices, path=path)]
    return results


def _single_tile(indices: int, passes: int) -> Launch:
    """One block of 256 threads with as many keys each as it takes."""
    facts = {"passes": passes, "indices": indices}
    grids = ((1.0, passes), (1.0, passes * indices / 256))
    column = (hot((indices,), "int64", 8 * indices),)
    written = (fresh((indices,), "int64"),)
    return Launch("DeviceRadixSortSingleTileKernel", indices, column, written, facts, grids, "", "indices")


def bits_of(high: int) -> int:
    """Bits that tell so many numbers apart, at least one."""
    return max(1, math.ceil(math.log2(max(2, high))))
