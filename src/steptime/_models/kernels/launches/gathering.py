"""Launches that look rows up by index: vectors of 16 bytes where rows allow it, element by element where they do not."""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import contiguous
from steptime._models.kernels.launches import Launch, Operand, fresh
from steptime._models.kernels.launches.names import GATHER, SCATTER_GATHER, SMALL_INDEX

_VECTOR_BYTES, _LINE_BYTES, _SECTOR_BYTES = 16, 128, 32
# Indices up to which ATen's index_select has a kernel of its own.
_FEW = 16
# ATen's gather, scatter and index kernels: threads of a block, elements that a thread takes one after the other.
_THREADS, _EACH_SCATTER, _EACH_INDEXED = 128, 8, 4
_INDEX_BYTES = 8


def distinct_rows(rows: int, asked: int) -> float:
    """Rows met at least once when so many are drawn evenly."""
    return rows * -math.expm1(-asked / rows) if rows else 0.0


def part(table: Operand, shape: tuple[int, ...]) -> Operand:
    """As much of a table as is touched."""
    return replace(table, shape=shape, strides=contiguous(shape))


def touched(table: Operand, elements: int) -> Operand:
    """The sectors of a tensor that evenly drawn single elements lie in."""
    sectors = max(1.0, table.nbytes / _SECTOR_BYTES)
    met = _SECTOR_BYTES * sectors * -math.expm1(-elements / sectors)
    return part(table, (max(1, int(met) // table.item_bytes),))


def serial_grids(elements: int, each: int) -> tuple[tuple[float, float], ...]:
    """Blocks of 128 threads whose threads take `each` elements one after the other, fewer where there are not enough."""
    blocks = elements / (_THREADS * each)
    return ((blocks, float(min(each, math.ceil(elements / _THREADS)))), (blocks, 1.0))


def scatter_grids(elements: int) -> tuple[tuple[float, float], ...]:
    """The grid of the kernel of gather, scatter and unaligned selection."""
    return serial_grids(elements, _EACH_SCATTER)


def indexed_grids(elements: int) -> tuple[tuple[float, float], ...]:
    """The grid of the kernel of advanced indexing."""
    return serial_grids(elements, _EACH_INDEXED)


def rows_by_index(table: Operand, index: Operand, *, unaligned: str = SCATTER_GATHER, few: bool = True) -> Launch:
    """Rows of `table` (its first dimension) by `index`. `few` says whether few indices have a kernel of their own."""
    asked, columns = index.numel, math.prod(table.shape[1:])
    row_bytes, rows = columns * table.item_bytes, table.shape[0]
    met = max(1, int(distinct_rows(rows, asked)))
    facts = {
        "rows": asked,
        "row_bytes": row_bytes,
        "table_rows": rows,
        "footprint_bytes": table.nbytes,
        "reuse": asked / met,
        "aligned_128": row_bytes % _LINE_BYTES == 0,
    }
    reads, writes = (part(table, (met, columns)), index), (fresh((asked, columns), table.dtype),)
    elements = asked * columns
    if few and asked <= _FEW:
        return Launch(
            SMALL_INDEX, elements, reads, writes, facts, ((elements / 1024, 1.0), (1.0, float(asked))), "", table.dtype
        )
    if row_bytes % _VECTOR_BYTES == 0:
        grids = ((float(asked * math.ceil(row_bytes / 4096)), 1.0), (float(asked), float(row_bytes)))
        return Launch(GATHER, elements, reads, writes, facts, grids, "", table.dtype)
    ways = _unaligned_grids(elements, columns) if unaligned == SCATTER_GATHER else indexed_grids(elements)
    return Launch(unaligned, elements, reads, writes, facts, ways, "rows", table.dtype)


def _unaligned_grids(elements: int, columns: int) -> tuple[tuple[float, float], ...]:
    """Besides its elements, a thread waits for an index whenever its next element lies in another sector of them."""
    blocks = elements / (_THREADS * _EACH_SCATTER)
    span = min(elements, _THREADS * _EACH_SCATTER)
    waits = min(_EACH_SCATTER, math.ceil(span / (columns * _SECTOR_BYTES / _INDEX_BYTES)))
    return (*scatter_grids(elements), (blocks, float(waits)))
