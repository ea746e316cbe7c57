"""Launches of gathers and scatters by index, and of the sums that repeated indices need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.launches import Launch, Operand, fresh, operand
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
from steptime._models.kernels.launches.reduce import SMS
from steptime.errors import InputError

_FEW = 16  # indices up to which ATen's index_add has a kernel of its own
# Of ATen's index_add: threads of a block, and blocks at most, which then walk on: 8 for each SM.
_THREADS, _MOST_BLOCKS = 128, 8 * SMS
_SECTOR_BYTES, _WARP = 32, 32


def launches(call: Call) -> list[Launch]:
    """What a gather or scatter launches."""
    rules = _RULES.get(call.op)
    if rules is None:
        raise InputError(f"{call.op}: not an op of the family indexing")
    return rules(call)


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
    if not isinstance(given, tuple) or not any(isinstance(one, TensorArg) for one in given):
        raise InputError(f"{call.op}: argument 1 is {given!r}, expected a list of index tensors")
    return [operand(one, 1) if isinstance(one, TensorArg) else None for one in given]


def _index(call: Call) -> list[Launch]:
    x, places = _matrix(call, 0), _places(call)
    first = places[0]
    if len(places) == 1 and first is not None:
        return [rows_by_index(x, first, unaligned=INDEXED, few=False)]
    given = [one for one in places if one is not None]
    asked = max(one.numel for one in given)
    kept = math.prod(size for place, size in enumerate(x.shape) if place >= len(places) or places[place] is None)
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


def _index_put(checked: bool, copied: bool) -> Callable[[Call], list[Launch]]:
    """`checked` says that bounds are asserted first, `copied` that the op does not work in place."""

    def rules(call: Call) -> list[Launch]:
        x, places, values = _matrix(call, 0), _places(call), tensor(call, 2)
        before = [memcpy(x, fresh(x.shape, x.dtype))] if copied else []
        if flag(call, 3):
            return before + accumulated(x, places, values, checked=checked)
        given = [one for one in places if one is not None]
        rows = max(one.numel for one in given)
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


def _index_add(copied: bool) -> Callable[[Call], list[Launch]]:
    def rules(call: Call) -> list[Launch]:
        x, values = _matrix(call, 0), tensor(call, 3)
        before = [memcpy(x, fresh(x.shape, x.dtype))] if copied else []
        return [*before, _added(x, integer(call, 1) % len(x.shape), tensor(call, 2), values, ordered=_ordered(call, 2))]

    return rules


def _ordered(call: Call, place: int) -> bool:
    given = value(call, place)
    return isinstance(given, TensorArg) and given.values == "ordered"


def _added(x: Operand, axis: int, index: Operand, values: Operand, *, ordered: bool) -> Launch:
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
    blocks = min(math.ceil(values.numel / _THREADS), _MOST_BLOCKS)
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


def _scatter(*, added: bool, copied: bool) -> Callable[[Call], list[Launch]]:
    def rules(call: Call) -> list[Launch]:
        x, index, values = _matrix(call, 0), tensor(call, 2), optional_tensor(call, 3)
        met = replace(touched(x, index.numel), origin="fresh", argument=-1)
        reads = (index, *((values,) if values is not None else ()), *((met,) if added else ()))
        grids = scatter_grids(index.numel)
        path = "added" if added else "written"
        kernel = Launch(SCATTER_GATHER, index.numel, reads, (met,), _label_facts(x, index), grids, path, x.dtype)
        return [memcpy(x, fresh(x.shape, x.dtype)), kernel] if copied else [kernel]

    return rules


_RULES: dict[str, Callable[[Call], list[Launch]]] = {
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
