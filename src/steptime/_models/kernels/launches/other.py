"""Launches of the ops of the family `other`: those of a sibling in another family, and a few of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from steptime._models.kernels.call import Call
from steptime._models.kernels.launches import Launch, fresh, hot
from steptime._models.kernels.launches.arguments import base_name, dtype_keyword, integers, keyword, tensor, value
from steptime._models.kernels.launches.copies import memcpy
from steptime._models.kernels.launches.elementwise import launches as elementwise
from steptime._models.kernels.launches.indexing import launches as indexing
from steptime._models.kernels.launches.names import WITH_INDEX
from steptime._models.kernels.launches.optimizer import launches as over_lists
from steptime._models.kernels.launches.pointwise import pointwise
from steptime._models.kernels.launches.sorting import over_indices, radix_sort
from steptime._models.kernels.launches.zeros import cleared
from steptime.errors import InputError

_BLOCK = 1024  # elements, as in the element-wise kernels
# Keys of a row up to which ATen sorts within a block, by kernels that were never measured.
_SMALL_SORT = 4096


def launches(call: Call) -> list[Launch]:
    """What an op of the family launches."""
    name = base_name(call.op)
    if name in _OWN and call.op != "aten::pow.Tensor_Tensor":
        return _OWN[name](call)
    if name.startswith("_foreach_"):
        return over_lists(call)
    if name in ("scatter", "scatter_"):
        return indexing(replace(call, op=f"aten::{name}.src"))
    return elementwise(call)


def _new_zeros(call: Call) -> list[Launch]:
    return [cleared(fresh(integers(call, 1), dtype_keyword(call, tensor(call, 0).dtype)))]


def _scalar_tensor(call: Call) -> list[Launch]:
    return [cleared(fresh((), dtype_keyword(call, "float32")))]


def _number(call: Call, place: int, default: float) -> float:
    given = value(call, place, default)
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise InputError(f"{call.op}: argument {place} is {given!r}, expected a number")
    return float(given)


def _arange(call: Call) -> list[Launch]:
    start, end, step = _number(call, 0, 0), _number(call, 1, 0), _number(call, 2, 1)
    count = math.ceil((end - start) / step) if step else 0
    if count <= 0:
        raise InputError(f"{call.op}: no number lies from {start} to {end} by steps of {step}")
    result = fresh((count,), dtype_keyword(call, "int64"))
    return [Launch(WITH_INDEX, count, (), (result,), {}, ((count / _BLOCK, 1.0),))]


def _power(call: Call) -> list[Launch]:
    """A number to the power of a tensor: the number becomes a tensor first."""
    x = tensor(call, 1)
    number = "int64" if isinstance(value(call, 0), int) else "float32"
    powers = pointwise((hot((), number, 8), x), fresh(x.shape, x.dtype), tag=number, casts=number != x.dtype)
    return [cleared(fresh((), number)), powers]


def _sort(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    if len(x.shape) != 1 or x.numel <= _SMALL_SORT:
        raise InputError(f"{call.op}: no rule says what sorting {x.shape} launches, only one row of more than {_SMALL_SORT}")
    order = over_indices("fill_reverse_indices_kernel", x.numel)
    return [memcpy(x, fresh(x.shape, x.dtype)), order, *radix_sort(x.numel, 8 * x.item_bytes, 1 << (8 * x.item_bytes))]


def _given_result(call: Call) -> list[Launch]:
    """The element-wise op whose result is given by name."""
    if keyword(call, "out") is None:
        raise InputError(f"{call.op}: no result is given")
    return elementwise(replace(call, op="aten::mul.Tensor"))


_OWN: dict[str, Callable[[Call], list[Launch]]] = {
    "new_zeros": _new_zeros,
    "scalar_tensor": _scalar_tensor,
    "arange": _arange,
    "pow": _power,
    "sort": _sort,
    "mul": _given_result,
}
