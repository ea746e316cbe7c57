"""Sorts of rows as ATen makes them (native/cuda/Sort.cpp): within a block, all rows at once, or each by itself."""

from __future__ import annotations

import math

from steptime._models.kernels.launches import WITH_INDEX, GpuCall, Launch, Operand, fresh, hot
from steptime._models.kernels.launches.indexed import bits_of, over_indices, radix_sort
from steptime._models.kernels.launches.iterator import copies, memcpy

# Keys of a row up to which a block, and a warp, sorts it; rows from which each is sorted by itself.
_BLOCK_SORTS, _WARP_SORTS, _MANY_ROWS = 4096, 32, 128
# Bits that a pass over rows, each by itself, sorts by.
_ROW_PASS_BITS = 6


def sorted_rows(call: GpuCall) -> list[Launch]:
    """`sort` along an axis: keys are copied, numbered, and sorted with their numbers."""
    x = call.tensor(0)
    given = call.keyword("dim") if call.overload == "stable" else call.value(1, -1)
    axis = (given if isinstance(given, int) else -1) % max(1, len(x.shape))
    length = x.shape[axis] if x.shape else 1
    rows = x.numel // max(1, length)
    keys = fresh(x.shape, x.dtype)
    copied = [memcpy(x, keys)] if x.dense else copies(keys, x)
    if length <= _BLOCK_SORTS:
        return [*copied, *_in_blocks(x, rows, length, stable=call.keyword("stable") is True)]
    turned = axis != len(x.shape) - 1 and rows > 1
    order = [place for place in range(len(x.shape)) if place != axis] + [axis]
    first, *again = _turned(x, order) if turned else ((), ())
    results = [*copied, *first, *_long(x, rows, length)]
    return [*results, *(launch for each in again for launch in each)]


def _turned(x: Operand, order: list[int]) -> tuple[list[Launch], ...]:
    """Keys brought next to each other before, keys and their numbers brought back after."""
    shape = tuple(x.shape[axis] for axis in order)
    strides = tuple(fresh(x.shape, x.dtype).strides[axis] for axis in order)
    results = []
    for dtype in (x.dtype, x.dtype, "int64"):
        across = Operand(shape, dtype, strides)
        results.append(copies(fresh(shape, dtype), across))
    return tuple(results)


def _in_blocks(x: Operand, rows: int, length: int, *, stable: bool) -> list[Launch]:
    numbers = Operand(x.shape, "int64", tuple(1 if size == length else 0 for size in x.shape))
    target = fresh(x.shape, "int64")
    spread = [memcpy(fresh((length,), "int64"), target)] if rows == 1 else copies(target, numbers)
    counted = Launch(WITH_INDEX, length, (), (fresh((length,), "int64"),), {}, ((length / 1024, 1.0),))
    results = [counted, *spread, memcpy(target, fresh(x.shape, "int64"))]
    if length == 1:
        return results
    padded = 1 << (length - 1).bit_length()
    passes = math.ceil(8 * x.item_bytes / _ROW_PASS_BITS)
    kernel = "bitonicSortKVInPlace" if length <= _WARP_SORTS and not stable else "radixSortKVInPlace"
    facts: dict[str, float] = {"rows": rows, "columns": length, "passes": passes}
    grids = ((rows, padded), (rows, passes), (rows / 16, passes))
    pairs = (hot(x.shape, x.dtype, 2 * x.nbytes), hot(x.shape, "int64", 8 * x.numel))
    return [*results, Launch(kernel, x.numel, pairs, pairs, facts, grids, f"{min(padded, _BLOCK_SORTS)}", x.dtype)]


def _long(x: Operand, rows: int, length: int) -> list[Launch]:
    count, bits = x.numel, 8 * x.item_bytes
    if rows == 1:
        return [over_indices("fill_reverse_indices_kernel", count), *radix_sort(count, bits, 1 << bits)]
    if rows < _MANY_ROWS:
        by_keys, by_rows = radix_sort(count, bits, 1 << bits), radix_sort(count, bits_of(rows), rows)
        ends = (over_indices("fill_index_and_segment_kernel", count), over_indices("sort_postprocess_kernel", count))
        return [ends[0], *by_keys, *by_rows, ends[1]]
    passes = math.ceil(bits / _ROW_PASS_BITS)
    facts: dict[str, float] = {"rows": rows, "columns": length}
    pairs = (hot(x.shape, x.dtype, 2 * x.nbytes), hot(x.shape, "int64", 8 * count))
    written = (fresh(x.shape, x.dtype), fresh(x.shape, "int64"))
    each = Launch("DeviceSegmentedRadixSortKernel", count, pairs, written, facts, ((rows, length / 256),), "", x.dtype)
    return [over_indices("fill_reverse_indices_kernel", count), *[each] * passes]
