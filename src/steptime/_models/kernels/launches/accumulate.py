"""Launches of `index_put` that adds: places as one number each, sorted, and then one sum for each place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from steptime._models.kernels.launches import Gpu, Launch, Operand, fresh, hot
from steptime._models.kernels.launches.copies import copies
from steptime._models.kernels.launches.names import UNROLLED, WITH_INDEX
from steptime._models.kernels.launches.pointwise import pointwise
from steptime._models.kernels.launches.reduce import reduction
from steptime._models.kernels.launches.sorting import bits_of, over_indices, radix_sort

# Elements of a slice up to which ATen has a kernel for small ones.
_SMALL_SLICE = 32
# Indices of a block in the kernel that adds (ATen).
_INDICES_OF_BLOCK = 4


def accumulated(x: Operand, places: Sequence[Operand | None], values: Operand, gpu: Gpu, *, checked: bool) -> list[Launch]:
    """Adds `values` to `x` at `places`; None leaves a dimension whole."""
    given = [item for item in places if item is not None]
    indices = max(item.numel for item in given)
    results: list[Launch] = []
    for order, index in enumerate(given):
        results += _bounds_checked(index, gpu) if checked else []
        results += _linear(index, order)
    if not values.dense:
        results += copies(fresh(values.shape, values.dtype), values)
    results.append(_over(indices, "divided"))
    indexed = [size for size, item in zip(x.shape, places, strict=False) if item is not None]
    # ATen sorts by the place of a slice in the whole tensor, dimensions that are left whole included.
    high = math.prod(x.shape[: len(places)])
    results.append(over_indices(WITH_INDEX, indices, path="indices"))
    results += radix_sort(indices, bits_of(high), high)
    return [*results, _added(x, places, values, indices, indexed[0])]


def _over(indices: int, tag: str, *, first: Operand | None = None) -> Launch:
    """An element-wise kernel over indices."""
    source = first if first is not None else hot((indices,), "int64", 8 * indices)
    return replace(pointwise((source,), fresh(source.shape, "int64"), tag=tag), path="indices")


def _bounds_checked(index: Operand, gpu: Gpu) -> list[Launch]:
    """The largest and the smallest index against the bounds, asserted on the device."""
    results: list[Launch] = []
    for tag in ("largest", "smallest"):
        extreme = reduction(index, range(len(index.shape)), gpu, tag=tag)
        compared = replace(pointwise((hot((), "int64", 8),), fresh((), "bool"), tag="compared"), path="indices")
        results += [*extreme, compared, Launch("_assert_async_cuda_kernel", 1, grids=((1.0, 1.0),))]
    return results


def _linear(index: Operand, order: int) -> list[Launch]:
    """Wrapped, multiplied by its stride and, for later dimensions, added to those before."""
    indices = index.numel
    wrapped = _over(indices, "wrapped", first=index)
    # The rows and columns of a triangle are the two rows of one tensor: of an odd length, the second is not aligned.
    if order and indices % 2:
        wrapped = replace(wrapped, kernel=UNROLLED)
    results = [wrapped, _over(indices, "multiplied")]
    return [*results, _over(indices, "added")] if order else results


def _added(x: Operand, places: Sequence[Operand | None], values: Operand, indices: int, table_rows: int) -> Launch:
    first = next(index for index, item in enumerate(places) if item is not None)
    slice_elements = math.prod(x.shape[len(places) :])
    before = math.prod(x.shape[:first])
    kernel = "indexing_backward_kernel"
    if slice_elements == 1:
        kernel += "_stride_1"
    elif slice_elements <= _SMALL_SLICE:
        kernel += "_small_stride"
    reuse = indices / table_rows
    # The longest run of equal indices, evenly drawn, is walked by one warp.
    longest = reuse + math.sqrt(2 * reuse * math.log(1 + table_rows))
    facts = {
        "rows": indices,
        "columns": slice_elements,
        "before": before,
        "table_rows": table_rows,
        "footprint_bytes": x.nbytes,
        "reuse": reuse,
    }
    blocks, wide = indices / _INDICES_OF_BLOCK, max(1.0, slice_elements / 128)
    grids = (
        (before * blocks, 1.0),
        (blocks, float(before)),
        (blocks * wide, reuse),
        (blocks * wide, 1.0),
        (table_rows / _INDICES_OF_BLOCK, reuse),
        (1.0, longest),
        (table_rows * wide, longest),
    )
    return Launch(kernel, values.numel, (values,), (fresh(values.shape, values.dtype),), facts, grids, "", x.dtype)
