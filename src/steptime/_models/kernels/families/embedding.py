"""Embeddings: rows by token forward and backward, and pooled bags of rows forward and backward.

Lookups with realistic index streams are a measured set of their own; here indices are uniform.
"""

from __future__ import annotations

import math

from steptime._models.kernels.call import Argument, Call, TensorArg, contiguous
from steptime._models.kernels.draw import (
    SEQUENCES,
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    Shape,
    chance,
    floating,
    indices,
    log_int,
    mixture,
    pick,
    width,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Launch, Operand, Rules, by_op, fresh, hot
from steptime._models.kernels.launches.arguments import integer, optional_tensor, tensor, value
from steptime._models.kernels.launches.copies import copies
from steptime._models.kernels.launches.gathering import distinct_rows, part, rows_by_index
from steptime._models.kernels.launches.names import VECTORIZED, WITH_INDEX
from steptime._models.kernels.launches.pointwise import cleared, pointwise
from steptime._models.kernels.launches.sorting import over_indices, radix_sort
from steptime.errors import InputError

_MOST_ELEMENTS = USUAL_BYTES // 4
_SUM, _MEAN, _MAX = 0, 1, 2  # values of `mode` in ATen


def _draw_tokens(rng: Rng) -> tuple[int, int, Shape]:
    """Rows and features of the table, and the shape of the tokens."""
    if chance(rng, 0.6):
        rows, features = pick(rng, (*VOCABULARIES, 512, 1024, 2)), pick(rng, (128, 256, 512, 768, 1024))
        shape: Shape = (log_int(rng, 1, 32), pick(rng, SEQUENCES))
    else:
        features = width(rng, 8, 1024)
        rows, shape = log_int(rng, 16, min(1_000_000, _MOST_ELEMENTS // features)), (log_int(rng, 16, 65_536),)
    return rows, features, shape


def _draw_forward(rng: Rng) -> Call | None:
    rows, features, shape = _draw_tokens(rng)
    call = Call("aten::embedding.default", (TensorArg((rows, features), floating(rng)), indices(shape, rows)), written=(1,))
    return call if _result_elements(shape, features) <= _MOST_ELEMENTS else None


def _draw_backward(rng: Rng) -> Call | None:
    rows, features, shape = _draw_tokens(rng)
    gradient = TensorArg((*shape, features), floating(rng))
    padding = pick(rng, (-1, 0))
    call = Call("aten::embedding_dense_backward.default", (gradient, indices(shape, rows), rows, padding, False))
    return call if max(gradient.numel, rows * features) <= _MOST_ELEMENTS else None


def _result_elements(shape: Shape, features: int) -> int:
    count = features
    for length in shape:
        count *= length
    return count


def _draw_bags(rng: Rng) -> tuple[int, int, int, int]:
    """Rows and features of the table, bags and rows per bag."""
    features = pick(rng, (8, 16, 32, 64, 128, 256))
    rows = log_int(rng, 100, min(2_000_000, _MOST_ELEMENTS // features))
    bags, pooled = log_int(rng, 32, 32_768), log_int(rng, 1, 128)
    return rows, features, min(bags, 2_000_000 // pooled), pooled


def _draw_bag(rng: Rng) -> Call:
    rows, features, bags, pooled = _draw_bags(rng)
    dtype, mode = floating(rng), pick(rng, (_SUM, _MEAN, _MAX), (0.75, 0.15, 0.1))
    table, asked = TensorArg((rows, features), dtype), bags * pooled
    offsets = TensorArg((bags,), "int64", high=asked, values="offsets")
    weights = TensorArg((asked,), dtype) if mode == _SUM and chance(rng, 0.2) else None
    sparse = mode != _MAX and chance(rng, 0.5)
    arguments = (table, indices((asked,), rows), offsets, False, mode, sparse, weights, False, -1)
    return Call("aten::_embedding_bag.default", arguments, written=(1,))


def _draw_bag_backward(rng: Rng) -> Call:
    """A sparse gradient, or a dense one of the whole table; pooled by sum, so that the maximum indices are not read."""
    rows, features, bags, pooled = _draw_bags(rng)
    asked = bags * pooled
    bag_of_each = indices((asked,), bags)
    bag_sizes, no_maxima = indices((bags,), pooled + 1), TensorArg((0,), "int64", high=1)
    gradient, index = TensorArg((bags, features), floating(rng)), indices((asked,), rows)
    if chance(rng, 0.4):
        arguments: tuple[Argument, ...] = (gradient, index, bag_of_each, bag_sizes, no_maxima, rows, False, _SUM, None, -1)
        return Call("aten::_embedding_bag_dense_backward.default", arguments)
    offsets = TensorArg((bags,), "int64", high=asked, values="offsets")
    arguments = (gradient, index, offsets, bag_of_each, bag_sizes, no_maxima, rows, False, _SUM, True, None, -1)
    return Call("aten::_embedding_bag_backward.default", arguments)


# Launches of embeddings: rows by token, pooled bags, and their gradients, which sort the indices and sum segments.

# Tokens up to which the gradient is summed without sorting (ATen).
_UNSORTED = 3072
# Rows of a segment above which it is summed with atomic additions: seen between 14 and 40 tokens per row of the table.
_ATOMIC = 20
_MAXIMUM = 2  # value of `mode` in ATen
_INDEX_BITS, _WARP = 64, 32
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


def _table(call: Call, place: int) -> Operand:
    table = tensor(call, place)
    if len(table.shape) != 2 or table.numel == 0:
        raise InputError(f"{call.op}: {table.shape} is no table of rows")
    return table


def _packed(index: Operand) -> list[Launch]:
    """What copies indices that are not contiguous."""
    return [] if index.strides == contiguous(index.shape) else copies(fresh(index.shape, index.dtype), index)


def _embedding(call: Call) -> list[Launch]:
    index = tensor(call, 1)
    return [*_packed(index), rows_by_index(_table(call, 0), index)]


def _bag(call: Call) -> list[Launch]:
    table, index, offsets = _table(call, 0), tensor(call, 1), tensor(call, 2)
    rows, columns = table.shape
    asked, bags, mode = index.numel, max(1, offsets.numel), integer(call, 4, 0)
    met = max(1, int(distinct_rows(rows, asked)))
    weighted = optional_tensor(call, 6) is not None
    pooled = asked / bags
    facts = {
        "rows": bags,
        "columns": columns,
        "table_rows": rows,
        "pooled": pooled,
        "items": asked,
        "row_bytes": columns * table.item_bytes,
        "footprint_bytes": table.nbytes,
        "reuse": asked / met,
        "mode": mode,
        "weighted": weighted,
        "gathered_bytes": asked * columns * table.item_bytes,
    }
    stretches = bags * math.ceil(columns / _WARP)
    busiest = max(_longest(call, asked, bags), math.ceil(stretches / _BAG_WARPS) * pooled)
    grids: tuple[tuple[float, float], ...] = (
        (1.0, busiest),
        (stretches / 8, pooled),
        (bags * columns / 256, pooled),
        (bags / 8, pooled),
    )
    kernel = "EmbeddingBag_updateOutputKernel_" + ("max" if mode == _MAXIMUM else "sum_mean")
    reads = (part(table, (met, columns)), index, offsets)
    writes = (fresh((bags, columns), table.dtype), fresh((bags,), "int64"))
    path = "weighted" if weighted else ""
    if mode == _MAXIMUM:
        # Few of these were measured: two pairs and the bytes are as much as they can tell.
        facts, grids = {"gathered_bytes": facts["gathered_bytes"], "columns": columns}, grids[:2]
    return [Launch(kernel, asked * columns, reads, writes, facts, grids, path, table.dtype)]


def _longest(call: Call, asked: int, bags: int) -> float:
    """Rows of the longest bag: where offsets are drawn evenly, the last one has what is left over."""
    offsets = value(call, 2)
    drawn = isinstance(offsets, TensorArg) and offsets.values == "offsets"
    return float(asked - (bags - 1) * (asked // bags)) if drawn else asked / bags


def _bag_backward(call: Call) -> list[Launch]:
    """A sparse gradient: every looked-up row gets the gradient of its bag."""
    return [rows_by_index(_table(call, 0), tensor(call, 3))]


def _gradient_facts(tokens: int, rows: int, columns: int, item: int) -> dict[str, float]:
    return {
        "rows": tokens,
        "columns": columns,
        "table_rows": rows,
        "reuse": tokens / rows,
        "footprint_bytes": rows * columns * item,
    }


def _dense_backward(call: Call) -> list[Launch]:
    given, index, rows = tensor(call, 0), tensor(call, 1), integer(call, 2)
    if rows <= 0 or not given.shape:
        raise InputError(f"{call.op}: gradient {given.shape} of a table of {rows} rows")
    tokens, columns = index.numel, given.shape[-1]
    gradient = part(given, (tokens, columns))
    if tokens > _UNSORTED:
        return [*_packed(index), *_segment_sums("compute_grad_weight", gradient, tokens, rows, tokens / rows > _ATOMIC)]
    # A block per 32 columns meets tokens 32 at a time; those of one row among them are added one after the other.
    met_twice = _WARP - rows * (1 - (1 - 1 / rows) ** _WARP)
    blocks, batches = columns / _WARP, math.ceil(tokens / _WARP)
    grids = ((blocks, batches * met_twice), (blocks, float(tokens)), (blocks, float(batches)))
    facts = _gradient_facts(tokens, rows, columns, given.item_bytes)
    written = (fresh((min(tokens, rows), columns), given.dtype),)
    kernel = Launch("embedding_backward_feature_kernel", tokens * columns, (gradient,), written, facts, grids, "", given.dtype)
    return [cleared(fresh((rows, columns), given.dtype)), kernel]


def _bag_dense_backward(call: Call) -> list[Launch]:
    gradient, index = _table(call, 0), tensor(call, 1)
    return _segment_sums("compute_grad_weight_bags", gradient, index.numel, integer(call, 5), atomic=False)


def _segment_sums(kernel: str, gradient: Operand, tokens: int, rows: int, atomic: bool) -> list[Launch]:
    """Indices sorted, equal ones as a segment, parts of segments summed, and their sums written to the rows of the table."""
    columns, dtype = gradient.shape[1], gradient.dtype
    table = (rows, columns)

    def summed(name: str) -> Launch:
        grids = (
            (tokens * columns / 1024, 1.0),
            (tokens / _PART_ROWS * columns / _WARP, 1.0),
            (float(rows), tokens / rows),
            (columns / _WARP, float(tokens)),
        )
        facts = _gradient_facts(tokens, rows, columns, gradient.item_bytes)
        written = (fresh((min(tokens, rows), columns), dtype),)
        return Launch(name, tokens * columns, (gradient,), written, facts, grids, "", dtype)

    results = [over_indices(WITH_INDEX, tokens, path="indices"), *radix_sort(tokens, _INDEX_BITS, rows)]
    results.append(cleared(fresh(table, dtype)))
    results += [over_indices(name, tokens, table_rows=rows) for name in _SEGMENTS]
    if not atomic:
        return [*results, summed(kernel), summed("sum_and_scatter")]
    results.append(over_indices("krn_partial_to_segment_idx", tokens, table_rows=rows))
    if dtype == "float32":
        return [*results, summed("compute_grad_weight_atomic_accumulate")]
    wide = hot(table, "float32", rows * columns * 4)
    narrowed = pointwise((wide,), fresh(table, dtype), tag="narrowed", casts=True, kernel=VECTORIZED)
    return [*results, cleared(fresh(table, "float32")), summed("compute_grad_weight_atomic_accumulate"), narrowed]


_RULES: dict[str, Rules] = {
    "aten::embedding.default": _embedding,
    "aten::embedding_dense_backward.default": _dense_backward,
    "aten::_embedding_bag.default": _bag,
    "aten::_embedding_bag_backward.default": _bag_backward,
    "aten::_embedding_bag_dense_backward.default": _bag_dense_backward,
}


FAMILY = Family(
    name="embedding",
    ops=(
        *("aten::embedding.default", "aten::embedding_dense_backward.default"),
        *("aten::_embedding_bag.default", "aten::_embedding_bag_backward.default"),
        "aten::_embedding_bag_dense_backward.default",
    ),
    sweep=mixture((1, _draw_forward), (1, _draw_backward), (1, _draw_bag), (0.8, _draw_bag_backward)),
    weight=3.5,
    rules=by_op(_RULES),
)
