"""Gathers and scatters by index: rows of tables, labels of rows, and the triangle of DLRM's interaction with its backward."""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import (
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    chance,
    fits,
    floating,
    indices,
    log_int,
    mixture,
    options,
    pick,
    size,
    width,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Gpu, GpuCall, Launch, Operand, Rules, by_op, fresh, operand
from steptime._models.kernels.launches.accumulate import accumulated
from steptime._models.kernels.launches.arguments import flag, integer, optional_tensor, tensor, value
from steptime._models.kernels.launches.copies import memcpy
from steptime._models.kernels.launches.gathering import (
    distinct_rows,
    indexed_grids,
    part,
    rows_by_index,
    scatter_grids,
    touched,
)
from steptime._models.kernels.launches.names import INDEXED, SCATTER_GATHER
from steptime.errors import InputError

_MOST_ELEMENTS = USUAL_BYTES // 4


def _draw_table(rng: Rng) -> tuple[TensorArg, int]:
    """Rows of features, and how many of them are asked for."""
    features = pick(rng, (8, 16, 32, 64, 128)) if chance(rng, 0.5) else width(rng, 1, 2048)
    rows = log_int(rng, 16, min(1_000_000, _MOST_ELEMENTS // features))
    return TensorArg((rows, features), floating(rng)), log_int(rng, 16, min(262_144, _MOST_ELEMENTS // features))


def _draw_rows(rng: Rng) -> Call:
    table, asked = _draw_table(rng)
    index = indices((asked,), table.shape[0])
    if chance(rng, 0.6):
        return Call("aten::index_select.default", (table, 0, index), written=(0,))
    return Call("aten::index.Tensor", (table, (index,)))


def _draw_triangle(rng: Rng) -> tuple[TensorArg, tuple[None, TensorArg, TensorArg], TensorArg]:
    """Products of all pairs of features, the row and column of each below the diagonal, and what they select."""
    features = log_int(rng, 3, 65)
    pairs = features * (features - 1) // 2
    batch = log_int(rng, 32, min(32_768, _MOST_ELEMENTS // (features * features)))
    row = TensorArg((pairs,), "int64", high=features, values="lower_row")
    column = TensorArg((pairs,), "int64", high=features, values="lower_column")
    dtype = floating(rng)
    return TensorArg((batch, features, features), dtype), (None, row, column), TensorArg((batch, pairs), dtype)


def _draw_interaction(rng: Rng) -> Call:
    products, places, _ = _draw_triangle(rng)
    return Call("aten::index.Tensor", (products, places))


def _draw_interaction_backward(rng: Rng) -> Call:
    products, places, chosen = _draw_triangle(rng)
    return Call("aten::_index_put_impl_.default", (products, places, chosen, True, True), written=(0, 2))


def _draw_rows_backward(rng: Rng) -> Call:
    """Gradients of rows added where they came from; repeated indices are sorted first."""
    table, asked = _draw_table(rng)
    gradient = TensorArg((asked, table.shape[1]), table.dtype)
    index = indices((asked,), table.shape[0])
    accumulated = chance(rng, 0.7)
    op = pick(rng, ("aten::_index_put_impl_.default", "aten::index_put_.default", "aten::index_put.default"), (2, 2, 1))
    rest = (accumulated, True) if op == "aten::_index_put_impl_.default" else (accumulated,)
    return Call(op, (table, (index,), gradient, *rest), written=(2,))


def _draw_added(rng: Rng) -> Call:
    """`index_add_` of gradients of rows: also what a sparse gradient does to its table."""
    table, asked = _draw_table(rng)
    gradient = TensorArg((asked, table.shape[1]), table.dtype)
    arguments = (table, 0, indices((asked,), table.shape[0]), gradient)
    if chance(rng, 0.8):
        return Call("aten::index_add_.default", arguments, options(alpha=pick(rng, (1, -0.01))), written=(3,))
    return Call("aten::index_add.default", arguments, written=(3,))


def _draw_labelled(rng: Rng) -> tuple[TensorArg, TensorArg]:
    """Scores of rows, and for each row one column or several."""
    columns = pick(rng, VOCABULARIES) if chance(rng, 0.3) else size(rng, 8, 8192)
    rows = log_int(rng, 8, min(65_536, _MOST_ELEMENTS // columns))
    picked = pick(rng, (1, 1, log_int(rng, 1, min(columns, 128)), columns if columns <= 4096 else 1))
    return TensorArg((rows, columns), floating(rng)), indices((rows, picked), columns)


def _draw_gathered(rng: Rng) -> Call | None:
    scores, index = _draw_labelled(rng)
    return fits(Call("aten::gather.default", (scores, 1, index)))


def _draw_scattered(rng: Rng) -> Call | None:
    scores, index = _draw_labelled(rng)
    values = TensorArg(index.shape, scores.dtype)
    forms = ("aten::scatter_.src", "aten::scatter.src", "aten::scatter_add_.default", "aten::scatter_add.default")
    if chance(rng, 0.2):
        return fits(Call("aten::scatter_.value", (scores, 1, index, 1.0)))
    return fits(Call(pick(rng, forms, (1, 0.4, 1.5, 0.6)), (scores, 1, index, values), written=(3,)))


# Launches of gathers and scatters by index, and of the sums that repeated indices need.

_FEW = 16  # indices up to which ATen's index_add has a kernel of its own
# Of ATen's index_add: threads of a block, and blocks at most for each SM, which then walk on.
_THREADS, _BLOCKS_OF_SM = 128, 8
_SECTOR_BYTES, _WARP = 32, 32


def _matrix(call: Call, place: int) -> Operand:
    x = tensor(call, place)
    if not x.shape or x.numel == 0:
        raise InputError(f"{call.op}: nothing can be looked up in {x.shape}")
    return x


def _index_select(call: Call) -> list[Launch]:
    x, index = _matrix(call, 0), tensor(call, 2)
    axis = integer(call, 1) % len(x.shape)
    if math.prod(x.shape[:axis]) == 1:
        return [rows_by_index(replace(x, shape=x.shape[axis:], strides=x.strides[axis:]), index)]
    elements = x.numel // x.shape[axis] * index.numel
    facts = {"rows": index.numel, "columns": x.shape[axis], "footprint_bytes": x.nbytes}
    reads = (index, part(x, (min(elements, x.numel),)))
    result = (fresh((elements,), x.dtype),)
    return [Launch(SCATTER_GATHER, elements, reads, result, facts, scatter_grids(elements), "inner", x.dtype)]


def _places(call: Call) -> list[Operand | None]:
    """The index tensors of advanced indexing; None leaves a dimension whole."""
    given = value(call, 1)
    if not isinstance(given, tuple) or not any(isinstance(item, TensorArg) for item in given):
        raise InputError(f"{call.op}: argument 1 is {given!r}, expected a list of index tensors")
    return [operand(item, 1) if isinstance(item, TensorArg) else None for item in given]


def _index(call: Call) -> list[Launch]:
    x, places = _matrix(call, 0), _places(call)
    first = places[0]
    if len(places) == 1 and first is not None:
        return [rows_by_index(x, first, unaligned=INDEXED, few=False)]
    given = [item for item in places if item is not None]
    asked = max(item.numel for item in given)
    kept = math.prod(size for index, size in enumerate(x.shape) if index >= len(places) or places[index] is None)
    elements = asked * kept
    facts = {
        "rows": kept,
        "row_bytes": asked * x.item_bytes,
        "table_rows": x.shape[1] if len(x.shape) > 1 else 1,
        "footprint_bytes": x.nbytes,
        "items": asked,
    }
    reads, result = (part(x, (elements,)), *given), (fresh((elements,), x.dtype),)
    return [Launch(INDEXED, elements, reads, result, facts, indexed_grids(elements), "places", x.dtype)]


def _index_put(checked: bool, copied: bool) -> Rules:
    """`checked` says that bounds are asserted first, `copied` that the op does not work in place."""

    def rules(call: GpuCall) -> list[Launch]:
        x, places, values = _matrix(call, 0), _places(call), tensor(call, 2)
        before = [memcpy(x, fresh(x.shape, x.dtype))] if copied else []
        if flag(call, 3):
            return before + accumulated(x, places, values, call.gpu, checked=checked)
        given = [item for item in places if item is not None]
        rows = max(item.numel for item in given)
        facts = {
            "rows": rows,
            "row_bytes": values.numel / rows * x.item_bytes,
            "table_rows": x.shape[0],
            "footprint_bytes": x.nbytes,
        }
        written = (fresh(values.shape, values.dtype),)
        grids = indexed_grids(values.numel)
        return [*before, Launch(INDEXED, values.numel, (values, *given), written, facts, grids, "put", x.dtype)]

    return rules


def _index_add(copied: bool) -> Rules:
    def rules(call: GpuCall) -> list[Launch]:
        x, values = _matrix(call, 0), tensor(call, 3)
        before = [memcpy(x, fresh(x.shape, x.dtype))] if copied else []
        return [
            *before,
            _added(x, integer(call, 1) % len(x.shape), tensor(call, 2), values, call.gpu, ordered=_ordered(call, 2)),
        ]

    return rules


def _ordered(call: Call, place: int) -> bool:
    given = value(call, place)
    return isinstance(given, TensorArg) and given.values == "ordered"


def _added(x: Operand, axis: int, index: Operand, values: Operand, gpu: Gpu, *, ordered: bool) -> Launch:
    """Values added at an index along one axis, atomically: neighbours along later axes share a sector, others do not.

    An index that counts meets every row once, and its rows lie side by side.
    """
    length, asked = x.shape[axis], index.numel
    columns = math.prod(x.shape[axis + 1 :])
    met = max(1, min(length, asked) if ordered else int(distinct_rows(length, asked)))
    beside = columns * met if ordered else columns
    rows = _met_rows(x, axis, met, asked, ordered=ordered)
    facts = {
        "rows": asked,
        "columns": beside,
        "table_rows": length,
        "reuse": asked / met,
        "footprint_bytes": x.nbytes,
    }
    sectors = values.numel / max(1, min(beside, _SECTOR_BYTES // x.item_bytes))
    blocks = min(math.ceil(values.numel / _THREADS), _BLOCKS_OF_SM * gpu.sms)
    grids = (
        (values.numel / 512, 1.0),
        (sectors / _WARP, 1.0),
        (float(blocks), float(math.ceil(values.numel / (blocks * _THREADS)))),
    )
    kernel = "indexFuncLargeIndex" if asked > _FEW else "indexFuncSmallIndex"
    return Launch(kernel, values.numel, (values, index, rows), (rows,), facts, grids, "", x.dtype)


def _met_rows(x: Operand, axis: int, met: int, asked: int, *, ordered: bool) -> Operand:
    """What of a tensor is read and written where rows along an axis are met: sectors, where a row is shorter than one."""
    length = x.shape[axis]
    others, of_sector = x.numel // length, _SECTOR_BYTES // (x.item_bytes * math.prod(x.shape[axis + 1 :]))
    if ordered or of_sector < 2:
        return fresh((met, others), x.dtype)
    sectors = math.ceil(length / of_sector)
    return fresh((min(length, max(1, int(of_sector * distinct_rows(sectors, asked)))), others), x.dtype)


def _label_facts(x: Operand, index: Operand) -> dict[str, float]:
    asked = index.shape[-1] if index.shape else 1
    return {
        "rows": index.numel // max(1, asked),
        "columns": x.shape[-1],
        "picked": asked,
        "footprint_bytes": x.nbytes,
        "reuse": asked / x.shape[-1],
    }


def _gather(call: Call) -> list[Launch]:
    x, index = _matrix(call, 0), tensor(call, 2)
    facts = _label_facts(x, index) | {"reuse": 0.0}
    reads, result = (index, touched(x, index.numel)), (fresh(index.shape, x.dtype),)
    return [Launch(SCATTER_GATHER, index.numel, reads, result, facts, scatter_grids(index.numel), "", x.dtype)]


def _scatter(*, added: bool, copied: bool) -> Rules:
    def rules(call: GpuCall) -> list[Launch]:
        x, index, values = _matrix(call, 0), tensor(call, 2), optional_tensor(call, 3)
        met = replace(touched(x, index.numel), origin="fresh", argument=-1)
        reads = (index, *((values,) if values is not None else ()), *((met,) if added else ()))
        grids = scatter_grids(index.numel)
        path = "added" if added else "written"
        kernel = Launch(SCATTER_GATHER, index.numel, reads, (met,), _label_facts(x, index), grids, path, x.dtype)
        return [memcpy(x, fresh(x.shape, x.dtype)), kernel] if copied else [kernel]

    return rules


_RULES: dict[str, Rules] = {
    "aten::index_select.default": _index_select,
    "aten::index.Tensor": _index,
    "aten::_index_put_impl_.default": _index_put(checked=False, copied=False),
    "aten::index_put_.default": _index_put(checked=True, copied=False),
    "aten::index_put.default": _index_put(checked=True, copied=True),
    "aten::index_add_.default": _index_add(copied=False),
    "aten::index_add.default": _index_add(copied=True),
    "aten::gather.default": _gather,
    "aten::scatter_.src": _scatter(added=False, copied=False),
    "aten::scatter.src": _scatter(added=False, copied=True),
    "aten::scatter_.value": _scatter(added=False, copied=False),
    "aten::scatter_add_.default": _scatter(added=True, copied=False),
    "aten::scatter_add.default": _scatter(added=True, copied=True),
}


launches = by_op(_RULES)

FAMILY = Family(
    name="indexing",
    ops=(
        *("aten::index_select.default", "aten::index.Tensor", "aten::_index_put_impl_.default", "aten::index_put_.default"),
        *("aten::index_put.default", "aten::index_add_.default", "aten::index_add.default", "aten::gather.default"),
        *("aten::scatter_.src", "aten::scatter.src", "aten::scatter_.value"),
        *("aten::scatter_add_.default", "aten::scatter_add.default"),
    ),
    sweep=mixture(
        *((1.2, _draw_rows), (1.2, _draw_interaction), (1.2, _draw_interaction_backward), (0.8, _draw_rows_backward)),
        *((0.6, _draw_added), (0.7, _draw_gathered), (0.9, _draw_scattered)),
    ),
    weight=6.0,
    rules=launches,
)
