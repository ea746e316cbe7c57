"""Embeddings: rows by token forward and backward, and pooled bags of rows forward and backward.

Lookups with realistic index streams are a measured set of their own; here indices are uniform.
"""

from __future__ import annotations

import math

from steptime._models.kernels.call import Argument, TensorArg, contiguous
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import VECTORIZED, WITH_INDEX, GpuCall, Grids, Launch, Operand, fresh, hot
from steptime._models.kernels.launches.indexed import distinct_rows, over_indices, part, radix_sort, rows_by_index
from steptime._models.kernels.launches.iterator import cleared, copies, of_contiguous, pointwise
from steptime._models.kernels.sweep import SEQUENCES, USUAL_ELEMENTS, VOCABULARIES, Draw, Drawn, KernelSweep, Shape, indices
from steptime.errors import InputError

_SUM, _MEAN, _MAX = 0, 1, 2  # values of `mode` in ATen


def _draw_tokens(draw: Draw) -> Drawn | None:
    if draw.chance(0.6):
        rows, features = draw.pick((*VOCABULARIES, 512, 1024, 2)), draw.pick((128, 256, 512, 768, 1024))
        shape: Shape = (draw.log_int(1, 32), draw.pick(SEQUENCES))
    else:
        features = draw.width(8, 1024)
        rows, shape = draw.log_int(16, min(1_000_000, USUAL_ELEMENTS // features)), (draw.log_int(16, 65_536),)
    dtype = draw.floating()
    padding = draw.pick((-1, 0)) if "backward" in draw.form() else None
    gradient = TensorArg((*shape, features), dtype)
    if gradient.numel > USUAL_ELEMENTS:
        return None
    table, tokens = TensorArg((rows, features), dtype), indices(shape, rows)
    return {"table": table, "tokens": tokens, "gradient": gradient, "rows": rows, "padding": padding}


def _draw_bags(draw: Draw) -> Drawn:
    """A table and bags of its rows; backward, they are pooled by sum, so that the maximum indices are not read."""
    features = draw.pick((8, 16, 32, 64, 128, 256))
    rows = draw.log_int(100, min(2_000_000, USUAL_ELEMENTS // features))
    bags, pooled = draw.log_int(32, 32_768), draw.log_int(1, 128)
    bags = min(bags, 2_000_000 // pooled)
    index, dtype = indices((bags * pooled,), rows), draw.floating()
    drawn: dict[str, Argument] = {
        "rows": rows,
        "table": TensorArg((rows, features), dtype),
        "gradient": TensorArg((bags, features), dtype),
        "index": index,
        "offsets": TensorArg((bags,), "int64", high=index.numel, values="offsets"),
        "bag_of_each": indices(index.shape, bags),
        "bag_sizes": indices((bags,), pooled + 1),
        "no_maxima": indices((0,), 1),
    }
    if "backward" in draw.form():
        return drawn
    mode = draw.pick((_SUM, _MEAN, _MAX), (0.75, 0.15, 0.1))
    weights = TensorArg(index.shape, dtype) if mode == _SUM and draw.chance(0.2) else None
    return drawn | {"mode": mode, "weights": weights, "sparse": mode != _MAX and draw.chance(0.5)}


# Launches of embeddings: rows by token, pooled bags, and their gradients, which sort the indices and sum segments.

# Tokens up to which the gradient is summed without sorting (ATen).
_UNSORTED = 3072
# Rows of a segment above which it is summed with atomic additions, where segments are few: seen between 14 and 40 tokens per
# row of the table, and between 512 and 1,003 rows.
_ATOMIC, _FEW_ROWS = 20, 750
_INDEX_BITS, _WARP, _MOST_THREADS = 64, 32, 1024
# ATen's segments are cut into parts of so many rows.
_PART_ROWS = 10
# Warps that share the bags, each one bag and 32 columns at a time (ATen's grid of 1,024 blocks of 8).
_BAG_WARPS = 8192
# What makes segments of sorted indices.
_SEGMENTS = (
    "DeviceCompactInitKernel",
    "DeviceUniqueByKeySweepKernel",
    "krn_partials_per_segment",
    "DeviceScanInitKernel",
    "DeviceScanKernel",
    "compute_num_of_partial_segments",
    "krn_partial_segment_offset",
)


def _table(call: GpuCall, position: int) -> Operand:
    table = call.tensor(position)
    if len(table.shape) != 2 or table.numel == 0:
        raise InputError(f"{call.op}: {table.shape} is no table of rows")
    return table


def _packed(index: Operand) -> list[Launch]:
    """What copies indices that are not contiguous."""
    return [] if index.strides == contiguous(index.shape) else copies(fresh(index.shape, index.dtype), index)


def _embedding(call: GpuCall) -> list[Launch]:
    index = call.tensor(1)
    return [*_packed(index), rows_by_index(_table(call, 0), index)]


def _bag(call: GpuCall) -> list[Launch]:
    table, index, offsets = _table(call, 0), call.tensor(1), call.tensor(2)
    rows, columns = table.shape
    lookups, bags, mode = index.numel, max(1, offsets.numel), call.integer(4, 0)
    met = max(1, int(distinct_rows(rows, lookups)))
    weighted = call.optional_tensor(6) is not None
    pooled = lookups / bags
    facts = {
        "rows": bags,
        "columns": columns,
        "table_rows": rows,
        "pooled": pooled,
        "items": lookups,
        "row_bytes": columns * table.item_bytes,
        "footprint_bytes": table.nbytes,
        "reuse": lookups / met,
        "mode": mode,
        "weighted": weighted,
        "gathered_bytes": lookups * columns * table.item_bytes,
    }
    stretches = bags * math.ceil(columns / _WARP)
    busiest = max(_longest(call, lookups, bags), math.ceil(stretches / _BAG_WARPS) * pooled)
    grids: Grids = ((1.0, busiest), (stretches / 8, pooled), (bags * columns / 256, pooled), (bags / 8, pooled))
    kernel = "EmbeddingBag_updateOutputKernel_" + ("max" if mode == _MAX else "sum_mean")
    reads = (part(table, (met, columns)), index, offsets)
    writes = (fresh((bags, columns), table.dtype), fresh((bags,), "int64"))
    path = "weighted" if weighted else ""
    if mode == _MAX:
        # Few of these were measured: two pairs and the bytes are as much as they can tell.
        facts, grids = {"gathered_bytes": facts["gathered_bytes"], "columns": columns}, grids[:2]
    return [Launch(kernel, lookups * columns, reads, writes, facts, grids, path, table.dtype)]


def _longest(call: GpuCall, lookups: int, bags: int) -> float:
    """Rows of the longest bag: where offsets are drawn evenly, the last one has what is left over."""
    offsets = call.value(2)
    drawn = isinstance(offsets, TensorArg) and offsets.values == "offsets"
    return lookups - (bags - 1) * (lookups // bags) if drawn else lookups / bags


def _bag_backward(call: GpuCall) -> list[Launch]:
    """A sparse gradient: every looked-up row gets the gradient of its bag."""
    return [rows_by_index(_table(call, 0), call.tensor(3))]


def _summed(kernel: str, gradient: Operand, tokens: int, rows: int, grids: Grids) -> Launch:
    """Gradients of tokens added up to rows of the table."""
    columns, dtype = gradient.shape[1], gradient.dtype
    facts = {
        "rows": tokens,
        "columns": columns,
        "table_rows": rows,
        "reuse": tokens / rows,
        "footprint_bytes": rows * columns * gradient.item_bytes,
    }
    written = (fresh((min(tokens, rows), columns), dtype),)
    return Launch(kernel, tokens * columns, (gradient,), written, facts, grids, "", dtype)


def _dense_backward(call: GpuCall) -> list[Launch]:
    gradient, index, rows = call.tensor(0), call.tensor(1), call.integer(2)
    if rows <= 0 or not gradient.shape:
        raise InputError(f"{call.op}: gradient {gradient.shape} of a table of {rows} rows")
    tokens, columns = index.numel, gradient.shape[-1]
    gradient = part(gradient, (tokens, columns))
    if tokens > _UNSORTED:
        return [
            *_packed(index),
            *_segment_sums("compute_grad_weight", gradient, tokens, rows, rows <= _FEW_ROWS and tokens / rows > _ATOMIC),
        ]
    # A block per 32 columns meets tokens 32 at a time; those of one row among them are added one after the other.
    met_twice = _WARP - rows * (1 - (1 - 1 / rows) ** _WARP)
    blocks, batches = columns / _WARP, math.ceil(tokens / _WARP)
    grids = ((blocks, batches * met_twice), (blocks, tokens), (blocks, batches))
    kernel = _summed("embedding_backward_feature_kernel", gradient, tokens, rows, grids)
    return [cleared(fresh((rows, columns), gradient.dtype)), kernel]


def _bag_dense_backward(call: GpuCall) -> list[Launch]:
    gradient, index = _table(call, 0), call.tensor(1)
    return _segment_sums("compute_grad_weight_bags", gradient, index.numel, call.integer(5), atomic=False)


def _segment_sums(kernel: str, gradient: Operand, tokens: int, rows: int, atomic: bool) -> list[Launch]:
    """Indices sorted, equal ones as a segment, parts of segments summed, and their sums written to the rows of the table."""
    columns, dtype = gradient.shape[1], gradient.dtype
    table = (rows, columns)
    # A thread for every column, in whole warps, of as many parts as there may be: blocks of one part where rows are short.
    warped = -(columns // -_WARP) * _WARP
    parts = tokens / _PART_ROWS + min(tokens, rows)
    grids = (
        (parts * warped / min(warped, _MOST_THREADS), 1.0),
        (parts * warped / _MOST_THREADS, 1.0),
        (rows, tokens / rows),
        (columns / _WARP, tokens),
    )
    results = [over_indices(WITH_INDEX, tokens, path="indices"), *radix_sort(tokens, _INDEX_BITS, rows)]
    results.append(cleared(fresh(table, dtype)))
    results += [over_indices(name, tokens, table_rows=rows) for name in _SEGMENTS]
    if not atomic:
        return results + [_summed(name, gradient, tokens, rows, grids) for name in (kernel, "sum_and_scatter")]
    results.append(over_indices("krn_partial_to_segment_idx", tokens, table_rows=rows))
    added = _summed("compute_grad_weight_atomic_accumulate", gradient, tokens, rows, grids)
    if dtype == "float32":
        return [*results, added]
    wide = hot(table, "float32", rows * columns * 4)
    narrowed = pointwise((wide,), fresh(table, dtype), tag="narrowed", casts=True, kernel=VECTORIZED)
    return [*results, cleared(fresh(table, "float32")), added, narrowed]


FAMILY = Family(
    name="embedding",
    sweep=KernelSweep(
        (1, _draw_tokens, "embedding(table, *tokens)"),
        (1, _draw_tokens, "embedding_dense_backward(*gradient, tokens, rows, padding, False)"),
        (1, _draw_bags, "_embedding_bag(table, *index, offsets, False, mode, sparse, weights, False, -1)"),
        (
            *(0.8, _draw_bags),
            # A dense gradient of the whole table, or a sparse one.
            (
                0.4,
                "_embedding_bag_dense_backward(*gradient, index, bag_of_each, bag_sizes, no_maxima, rows, False, 0, None, -1)",
            ),
            (
                0.6,
                "_embedding_bag_backward"
                "(*gradient, index, offsets, bag_of_each, bag_sizes, no_maxima, rows, False, 0, True, None, -1)",
            ),
        ),
    ),
    weight=3.5,
    rules={
        "embedding": _embedding,
        "embedding_dense_backward": of_contiguous(_dense_backward, 0),
        "_embedding_bag": _bag,
        "_embedding_bag_backward": _bag_backward,
        "_embedding_bag_dense_backward": _bag_dense_backward,
    },
)
