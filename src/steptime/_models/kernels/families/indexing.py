"""Gathers and scatters by index: rows of tables, labels of rows, and the triangle of DLRM's interaction with its backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from steptime._models.kernels.call import Argument, TensorArg, contiguous
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import (
    FRESH,
    INDEXED,
    SCATTER_GATHER,
    UNROLLED,
    WITH_INDEX,
    Gpu,
    GpuCall,
    Launch,
    Operand,
    fresh,
    hot,
    operand,
)
from steptime._models.kernels.launches.indexed import (
    bits_of,
    distinct_rows,
    indexed_grids,
    over_indices,
    part,
    radix_sort,
    rows_by_index,
    scatter_grids,
    touched,
)
from steptime._models.kernels.launches.iterator import copies, memcpy, pointwise, reduction
from steptime._models.kernels.sweep import MOST_BYTES, USUAL_ELEMENTS, VOCABULARIES, Draw, Drawn, KernelSweep, indices
from steptime.errors import InputError

_BY_NUMBER = "scatter_.value(*scores, 1, index, 1.0)"
_BY_TENSOR = (
    *((1, "scatter_.src(scores, 1, index, *values)"), (0.4, "scatter.src(scores, 1, index, *values)")),
    *((1.5, "scatter_add_(scores, 1, index, *values)"), (0.6, "scatter_add(scores, 1, index, *values)")),
)


def _draw_rows(draw: Draw) -> dict[str, Argument]:
    """Rows of features, those of them that are lookups for, and their gradients."""
    features = draw.pick((8, 16, 32, 64, 128)) if draw.chance(0.5) else draw.width(1, 2048)
    rows = draw.log_int(16, min(1_000_000, USUAL_ELEMENTS // features))
    table = TensorArg((rows, features), draw.floating())
    lookups = draw.log_int(16, min(262_144, USUAL_ELEMENTS // features))
    return {"table": table, "index": indices((lookups,), rows), "gradient": TensorArg((lookups, features), table.dtype)}


def _draw_put(draw: Draw) -> Drawn:
    """Gradients of rows put or added where they came from; repeated indices are sorted first."""
    return _draw_rows(draw) | {"accumulated": draw.chance(0.7)}


def _draw_added(draw: Draw) -> Drawn:
    """`index_add_` of gradients of rows: also what a sparse gradient does to its table."""
    return _draw_rows(draw) | {"alpha": draw.pick((1, -0.01)) if "index_add_" in draw.form() else None}


def _draw_triangle(draw: Draw) -> Drawn:
    """Products of all pairs of features, the row and column of each below the diagonal, and what they select."""
    features = draw.log_int(3, 65)
    pairs = features * (features - 1) // 2
    batch = draw.log_int(32, min(32_768, USUAL_ELEMENTS // (features * features)))
    row = TensorArg((pairs,), "int64", high=features, values="lower_row")
    products = TensorArg((batch, features, features), draw.floating())
    selected = TensorArg((batch, pairs), products.dtype)
    return {"products": products, "row": row, "column": replace(row, values="lower_column"), "selected": selected}


def _draw_labelled(draw: Draw) -> Drawn:
    """Scores of rows, and for each row one column or several."""
    columns = draw.pick(VOCABULARIES) if draw.chance(0.3) else draw.size(8, 8192)
    rows = draw.log_int(8, min(65_536, USUAL_ELEMENTS // columns))
    picked = draw.pick((1, 1, draw.log_int(1, min(columns, 128)), columns if columns <= 4096 else 1))
    scores, index = TensorArg((rows, columns), draw.floating()), indices((rows, picked), columns)
    return {"scores": scores, "index": index, "values": TensorArg(index.shape, scores.dtype)}


def _draw_scattered(draw: Draw) -> Drawn:
    drawn = _draw_labelled(draw)
    draw.form((_BY_NUMBER,) if draw.chance(0.2) else _BY_TENSOR)
    return drawn


# Launches of gathers and scatters by index, and of the sums that repeated indices need.

_FEW = 16  # indices up to which ATen's index_add has a kernel of its own
# Of ATen's index_add: threads of a block, and blocks at most for each SM, which then walk on.
_THREADS, _BLOCKS_OF_SM = 128, 8
_SECTOR_BYTES, _WARP, _VECTOR_BYTES = 32, 32, 16


def _matrix(call: GpuCall) -> Operand:
    x = call.tensor(0)
    if not x.shape or x.numel == 0:
        raise InputError(f"{call.op}: nothing can be looked up in {x.shape}")
    return x


def _index_select(call: GpuCall) -> list[Launch]:
    x, index = _matrix(call), call.tensor(2)
    axis = call.integer(1) % len(x.shape)
    if math.prod(x.shape[:axis]) == 1:
        return [rows_by_index(replace(x, shape=x.shape[axis:], strides=x.strides[axis:]), index)]
    elements = x.numel // x.shape[axis] * index.numel
    facts = {"rows": index.numel, "columns": x.shape[axis], "footprint_bytes": x.nbytes}
    reads = (index, part(x, (min(elements, x.numel),)))
    result = (fresh((elements,), x.dtype),)
    return [Launch(SCATTER_GATHER, elements, reads, result, facts, scatter_grids(elements), "inner", x.dtype)]


def _index_tensors(call: GpuCall) -> list[Operand | None]:
    """The index tensors of advanced indexing; None leaves a dimension whole.

    A mask becomes one for each of its dimensions, by an op of its own (`nonzero`): as long as what is put there, or as all that
    it could pick.
    """
    tensors = call.value(1)
    if not isinstance(tensors, tuple) or not any(isinstance(item, TensorArg) for item in tensors):
        raise InputError(f"{call.op}: argument 1 is {tensors!r}, expected a list of index tensors")
    results: list[Operand | None] = []
    for item in tensors:
        if isinstance(item, TensorArg) and item.dtype in _MASKS:
            put = call.optional_tensor(2)
            count = put.shape[0] if put is not None and put.shape else item.numel
            results += [hot((count,), "int64", 8 * count)] * len(item.shape)
        else:
            results.append(operand(item, 1) if isinstance(item, TensorArg) else None)
    return results


def _index(call: GpuCall) -> list[Launch]:
    x, tensors = _matrix(call), _index_tensors(call)
    first = tensors[0]
    if len(tensors) == 1 and first is not None:
        return [rows_by_index(x, first, unaligned=INDEXED, few=False)]
    indices = [index for index in tensors if index is not None]
    lookups = max(index.numel for index in indices)
    whole = math.prod(size for index, size in enumerate(x.shape) if index >= len(tensors) or tensors[index] is None)
    elements = lookups * whole
    facts = {
        "rows": whole,
        "row_bytes": lookups * x.item_bytes,
        "table_rows": x.shape[1] if len(x.shape) > 1 else 1,
        "footprint_bytes": x.nbytes,
        "items": lookups,
    }
    reads, result = (part(x, (elements,)), *indices), (fresh((elements,), x.dtype),)
    return [Launch(INDEXED, elements, reads, result, facts, indexed_grids(elements), "places", x.dtype)]


def _copied(call: GpuCall, x: Operand) -> list[Launch]:
    """The copy that an op which does not work in place begins with."""
    return [] if call.name.endswith("_") else [memcpy(x, fresh(x.shape, x.dtype))]


def _filled(call: GpuCall) -> list[Launch]:
    """A number of the host: filled in where a mask is true (native/TensorAdvancedIndexing.cpp)."""
    x, indices = call.tensor(0), call.value(1)
    masks = [each for each in indices if isinstance(each, TensorArg)] if isinstance(indices, tuple) else []
    if len(masks) != 1 or masks[0].dtype not in _MASKS:
        raise InputError(f"{call.op}: a number is put by {indices!r}, expected one mask")
    mask = operand(masks[0], 1)
    spread = replace(mask, shape=x.shape, strides=(*mask.strides, *(0,) * len(x.shape))[: len(x.shape)])
    return [*_copied(call, x), pointwise((x, spread), x, tag=f"{x.dtype},{mask.dtype}", existing=True)]


def _index_put(call: GpuCall) -> list[Launch]:
    if isinstance(call.value(2), int | float):
        return _filled(call)
    x, tensors, values = _matrix(call), _index_tensors(call), call.tensor(2)
    if call.flag(3):
        # Autograd's op has bounds checked before; the others assert them first.
        return _copied(call, x) + _accumulated(x, tensors, values, call.gpu, checked=call.name != "_index_put_impl_")
    indices = [index for index in tensors if index is not None]
    rows = max(index.numel for index in indices)
    facts = {
        "rows": rows,
        "row_bytes": values.numel / rows * x.item_bytes,
        "table_rows": x.shape[0],
        "footprint_bytes": x.nbytes,
    }
    written, grids = (fresh(values.shape, values.dtype),), indexed_grids(values.numel)
    kernel = Launch(INDEXED, values.numel, (values, *indices), written, facts, grids, "put", x.dtype)
    return [*_copied(call, x), kernel]


def _index_add(call: GpuCall) -> list[Launch]:
    x, index = _matrix(call), call.value(2)
    axis, ordered = call.integer(1) % len(x.shape), isinstance(index, TensorArg) and index.values == "ordered"
    return [*_copied(call, x), _added(x, axis, call.tensor(2), call.tensor(3), call.gpu, ordered=ordered)]


def _added(x: Operand, axis: int, index: Operand, values: Operand, gpu: Gpu, *, ordered: bool) -> Launch:
    """Values added at an index along one axis, atomically: neighbours along later axes share a sector, others do not.

    An index that counts meets every row once, and its rows lie side by side.
    """
    length, lookups = x.shape[axis], index.numel
    columns = math.prod(x.shape[axis + 1 :])
    met = max(1, min(length, lookups) if ordered else int(distinct_rows(length, lookups)))
    beside = columns * met if ordered else columns
    rows = _met_rows(x, axis, met, lookups, ordered=ordered)
    facts = {"rows": lookups, "columns": beside, "table_rows": length, "reuse": lookups / met, "footprint_bytes": x.nbytes}
    sectors = values.numel / max(1, min(beside, _SECTOR_BYTES // x.item_bytes))
    blocks = min(math.ceil(values.numel / _THREADS), _BLOCKS_OF_SM * gpu.sms)
    grids = ((values.numel / 512, 1.0), (sectors / _WARP, 1.0), (blocks, math.ceil(values.numel / (blocks * _THREADS))))
    kernel = "indexFuncLargeIndex" if lookups > _FEW else "indexFuncSmallIndex"
    return Launch(kernel, values.numel, (values, index, rows), (rows,), facts, grids, "", x.dtype)


def _met_rows(x: Operand, axis: int, met: int, lookups: int, *, ordered: bool) -> Operand:
    """What of a tensor is read and written where rows along an axis are met: sectors, where a row is shorter than one."""
    length = x.shape[axis]
    others, of_sector = x.numel // length, _SECTOR_BYTES // (x.item_bytes * math.prod(x.shape[axis + 1 :]))
    if ordered or of_sector < 2:
        return fresh((met, others), x.dtype)
    sectors = math.ceil(length / of_sector)
    return fresh((min(length, max(1, int(of_sector * distinct_rows(sectors, lookups)))), others), x.dtype)


def _label_facts(x: Operand, index: Operand) -> dict[str, float]:
    lookups = index.shape[-1] if index.shape else 1
    return {
        "rows": index.numel // max(1, lookups),
        "columns": x.shape[-1],
        "picked": lookups,
        "footprint_bytes": x.nbytes,
        "reuse": lookups / x.shape[-1],
    }


def _whole_rows(x: Operand, index: Operand, axis: int) -> bool:
    """Whether one index stands for a whole row that 16 bytes divide: those ATen gathers as it looks up rows of a table."""
    inner = index.shape[axis + 1 :]
    expanded = all(stride == 0 for size, stride in zip(inner, index.strides[axis + 1 :], strict=True) if size != 1)
    columns = math.prod(inner)
    row = columns > 1 and inner == x.shape[axis + 1 :] and columns * x.item_bytes % _VECTOR_BYTES == 0
    return expanded and row and math.prod(index.shape[:axis]) == 1


def _gather(call: GpuCall) -> list[Launch]:
    x, index = _matrix(call), call.tensor(2)
    axis = call.integer(1) % len(x.shape)
    if _whole_rows(x, index, axis):
        table = replace(x, shape=x.shape[axis:], strides=x.strides[axis:])
        return [rows_by_index(table, part(index, (index.shape[axis],)), few=False)]
    facts = _label_facts(x, index) | {"reuse": 0.0}
    reads, result = (index, touched(x, index.numel)), (fresh(index.shape, x.dtype),)
    return [Launch(SCATTER_GATHER, index.numel, reads, result, facts, scatter_grids(index.numel), "", x.dtype)]


def scatter(call: GpuCall) -> list[Launch]:
    """Values written or added at an index along one axis."""
    x, index, values, added = _matrix(call), call.tensor(2), call.optional_tensor(3), "_add" in call.name
    met = replace(touched(x, index.numel), origin=FRESH, argument=-1)
    reads = (index, *((values,) if values is not None else ()), *((met,) if added else ()))
    facts, grids, path = _label_facts(x, index), scatter_grids(index.numel), "added" if added else "written"
    if added and index.shape and index.shape[-1] > 1 and index.strides[-1] == 0:
        # One index stands for a row, whose elements threads side by side add.
        path = "rows"
    return [*_copied(call, x), Launch(SCATTER_GATHER, index.numel, reads, (met,), facts, grids, path, x.dtype)]


def _nonzero(call: GpuCall) -> list[Launch]:
    """Places that are not zero: counted, the count handed to the host, and picked; then as one number for each dimension.

    CUB counts and picks (native/cuda/Nonzero.cu): a sum over all, in two kernels beyond what one block takes, and a sweep as
    that for unique indices. What has gaps is copied before.
    """
    x = call.tensor(0)
    moved = copies(fresh(x.shape, x.dtype), x) if x.strides != contiguous(x.shape) else []
    parts = -(-x.numel // _COUNTED)
    counted = reduction(x, range(len(x.shape)), call.gpu, tag=x.dtype)[-1:]
    counted += reduction(hot((parts,), "int64", 8 * parts), (0,), call.gpu)[-1:] if parts > 1 else []
    picked = [over_indices(name, x.numel, table_rows=x.numel) for name in _PICKED]
    places = [over_indices(WITH_INDEX, x.numel, path="indices")] if len(x.shape) > 1 else []
    return [*moved, *counted, memcpy(hot((), "int64", 8), fresh((), "int64")), *picked, *places]


_COUNTED = 4096  # elements that one block sums: 256 threads with 16 each (cub/device/dispatch/tuning/tuning_reduce.cuh)
_PICKED = ("DeviceCompactInitKernel", "DeviceUniqueByKeySweepKernel")

# Of their elements, what is true picks.
_MASKS = ("bool", "uint8")

# `index_put` that adds: indices as one number each, sorted, and then one sum for each of them.

# Elements of a slice up to which ATen has a kernel for small ones.
_SMALL_SLICE = 32
# Indices of a block in the kernel that adds (ATen).
_INDICES_OF_BLOCK = 4


def _accumulated(x: Operand, tensors: Sequence[Operand | None], values: Operand, gpu: Gpu, *, checked: bool) -> list[Launch]:
    """Adds `values` to `x` where the index tensors say; None leaves a dimension whole."""
    indexing = [index for index in tensors if index is not None]
    indices = max(index.numel for index in indexing)
    results: list[Launch] = []
    for order, index in enumerate(indexing):
        results += _bounds_checked(index, gpu) if checked else []
        results += _linear(index, order)
    if not values.dense:
        results += copies(fresh(values.shape, values.dtype), values)
    results.append(_over(indices, "divided"))
    indexed = [size for size, item in zip(x.shape, tensors, strict=False) if item is not None]
    # ATen sorts by the place of a slice in the whole tensor, dimensions that are left whole included.
    high = math.prod(x.shape[: len(tensors)])
    results.append(over_indices(WITH_INDEX, indices, path="indices"))
    results += radix_sort(indices, bits_of(high), high)
    # Indices of leading dimensions name a place together.
    places = math.prod(indexed) if tensors[0] is not None else indexed[0]
    return [*results, _summed(x, tensors, values, indices, places)]


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


def _summed(x: Operand, tensors: Sequence[Operand | None], values: Operand, indices: int, table_rows: int) -> Launch:
    first = next(index for index, item in enumerate(tensors) if item is not None)
    slice_elements = math.prod(x.shape[len(tensors) :])
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
        (blocks, before),
        (blocks * wide, reuse),
        (blocks * wide, 1.0),
        (table_rows / _INDICES_OF_BLOCK, reuse),
        (1.0, longest),
        (table_rows * wide, longest),
    )
    return Launch(kernel, values.numel, (values,), (fresh(values.shape, values.dtype),), facts, grids, "", x.dtype)


FAMILY = Family(
    name="indexing",
    sweep=KernelSweep(
        (1.2, _draw_rows, (0.6, "index_select(*table, 0, index)"), (0.4, "index.Tensor(*table, [index])")),
        (1.2, _draw_triangle, "index.Tensor(*products, [None, row, column])"),
        (1.2, _draw_triangle, "_index_put_impl_(*products, [None, row, column], *selected, True, True)"),
        (
            *(0.8, _draw_put, (2, "_index_put_impl_(table, [index], *gradient, accumulated, True)")),
            (2, "index_put_(table, [index], *gradient, accumulated)"),
            (1, "index_put(table, [index], *gradient, accumulated)"),
        ),
        (
            *(0.6, _draw_added, (0.8, "index_add_(table, 0, index, *gradient, alpha=alpha)")),
            (0.2, "index_add(table, 0, index, *gradient)"),
        ),
        (0.7, _draw_labelled, "gather(*scores, 1, index)"),
        (0.9, _draw_scattered, _BY_NUMBER, *_BY_TENSOR),
        most_bytes=MOST_BYTES,
    ),
    weight=6.0,
    rules={
        "index_select": _index_select,
        "index": _index,
        **dict.fromkeys(("_index_put_impl_", "index_put_", "index_put"), _index_put),
        **dict.fromkeys(("index_add_", "index_add"), _index_add),
        "gather": _gather,
        "nonzero": _nonzero,
        **dict.fromkeys(("scatter_", "scatter", "scatter_add_", "scatter_add"), scatter),
    },
    kin="nonzero",
)
