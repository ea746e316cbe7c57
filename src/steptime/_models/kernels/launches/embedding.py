"""Launches of embeddings: rows by token, pooled bags, and their gradients, which sort the indices and sum segments."""

from __future__ import annotations

import math
from collections.abc import Callable

from steptime._models.kernels.call import Call, TensorArg, contiguous
from steptime._models.kernels.launches import Launch, Operand, fresh, hot
from steptime._models.kernels.launches.arguments import integer, optional_tensor, tensor, value
from steptime._models.kernels.launches.copies import copies
from steptime._models.kernels.launches.gathering import distinct_rows, part, rows_by_index
from steptime._models.kernels.launches.names import VECTORIZED, WITH_INDEX
from steptime._models.kernels.launches.pointwise import pointwise
from steptime._models.kernels.launches.sorting import over_indices, radix_sort
from steptime._models.kernels.launches.zeros import cleared
from steptime.errors import InputError

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


def launches(call: Call) -> list[Launch]:
    """What an embedding or its gradient launches."""
    rules = _RULES.get(call.op)
    if rules is None:
        raise InputError(f"{call.op}: not an op of the family embedding")
    return rules(call)


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

    found = [over_indices(WITH_INDEX, tokens, path="indices"), *radix_sort(tokens, _INDEX_BITS, rows)]
    found.append(cleared(fresh(table, dtype)))
    found += [over_indices(name, tokens, table_rows=rows) for name in _SEGMENTS]
    if not atomic:
        return [*found, summed(kernel), summed("sum_and_scatter")]
    found.append(over_indices("krn_partial_to_segment_idx", tokens, table_rows=rows))
    if dtype == "float32":
        return [*found, summed("compute_grad_weight_atomic_accumulate")]
    wide = hot(table, "float32", rows * columns * 4)
    narrowed = pointwise((wide,), fresh(table, dtype), tag="narrowed", casts=True, kernel=VECTORIZED)
    return [*found, cleared(fresh(table, "float32")), summed("compute_grad_weight_atomic_accumulate"), narrowed]


_RULES: dict[str, Callable[[Call], list[Launch]]] = {
    "aten::embedding.default": _embedding,
    "aten::embedding_dense_backward.default": _dense_backward,
    "aten::_embedding_bag.default": _bag,
    "aten::_embedding_bag_backward.default": _bag_backward,
    "aten::_embedding_bag_dense_backward.default": _bag_dense_backward,
}
