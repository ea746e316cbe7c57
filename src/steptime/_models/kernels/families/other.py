"""Ops that real steps call now and then and no other family sweeps: other overloads of its ops, and a few of their own.

They launch what their siblings do; a few calls of each show that.
"""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._models.kernels.draw import (
    Rng,
    activation_shape,
    floating,
    indices,
    log_int,
    mixture,
    options,
    pick,
    scalar,
    size,
)
from steptime._models.kernels.families.elementwise import launches as elementwise
from steptime._models.kernels.families.indexing import launches as indexing
from steptime._models.kernels.families.optimizer import launches as over_lists
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import GpuCall, Launch, Rules, fresh, hot
from steptime._models.kernels.launches.arguments import base_name, dtype_keyword, integers, keyword, tensor, value
from steptime._models.kernels.launches.copies import memcpy
from steptime._models.kernels.launches.names import WITH_INDEX
from steptime._models.kernels.launches.pointwise import cleared, pointwise
from steptime._models.kernels.launches.sorting import over_indices, radix_sort
from steptime.errors import InputError

_MOST_ELEMENTS = 16 << 20

# A tensor and a number, two tensors, three of them.
_WITH_NUMBER = (
    *("aten::div.Scalar", "aten::add.Scalar", "aten::add_.Scalar", "aten::sub.Scalar", "aten::sub_.Scalar"),
    *("aten::mul_.Scalar", "aten::lt.Scalar", "aten::ne.Scalar"),
)
_WITH_TENSOR = (
    *("aten::ge.Tensor", "aten::clamp_min.Tensor", "aten::pow.Tensor_Tensor", "aten::remainder.Tensor"),
    *("aten::clamp.Tensor",),
)
_WITH_TWO = ("aten::lerp.Tensor", "aten::lerp_.Tensor")
# Lists of parameters with what follows them: lists, a number, a number for each, a number on the device.
_LISTS = {
    "aten::_foreach_add.Scalar": "number",
    "aten::_foreach_add.ScalarList": "numbers",
    "aten::_foreach_add.Tensor": "scalar",
    "aten::_foreach_add_.ScalarList": "numbers",
    "aten::_foreach_add_.Tensor": "scalar",
    "aten::_foreach_div_.Scalar": "number",
    "aten::_foreach_div_.Tensor": "scalar",
    "aten::_foreach_mul.List": "list",
    "aten::_foreach_mul.Tensor": "scalar",
    "aten::_foreach_mul_.ScalarList": "numbers",
    "aten::_foreach_lerp_.List": "list list",
    "aten::_foreach_lerp_.ScalarList": "list numbers",
    "aten::_foreach_addcmul_.ScalarList": "list list numbers",
}


def _draw_tensor(rng: Rng, values: str = "normal") -> TensorArg:
    return TensorArg(activation_shape(rng, _MOST_ELEMENTS), floating(rng), values=values)


def _draw_with_number(rng: Rng) -> Call:
    return Call(pick(rng, _WITH_NUMBER), (_draw_tensor(rng), 0.5))


def _draw_with_tensor(rng: Rng) -> Call:
    x = _draw_tensor(rng, "positive")
    return Call(pick(rng, _WITH_TENSOR), (x, x), written=(0, 1))


def _draw_with_two(rng: Rng) -> Call:
    x = _draw_tensor(rng, "unit")
    return Call(pick(rng, _WITH_TWO), (x, x, x), written=(0, 1))


def _draw_given_result(rng: Rng) -> Call:
    """Gradients scaled into a bucket of DDP."""
    x = TensorArg(pick(rng, ((size(rng, 1, 4096), size(rng, 1, 4096)), (size(rng, 1, 4096),))))
    return Call("aten::mul.out", (x, 0.25), options(out=x))


def _draw_made(rng: Rng) -> Call:
    x = _draw_tensor(rng)
    if pick(rng, (True, False)):
        return Call("aten::new_zeros.default", (x, activation_shape(rng, _MOST_ELEMENTS)))
    named = options(device="device", dtype=DtypeArg(x.dtype))
    return Call("aten::scalar_tensor.default", (0.0,), named, written=())


def _draw_counted(rng: Rng) -> Call:
    named = options(device="device", dtype=DtypeArg("int64"))
    return Call("aten::arange.start_step", (0, log_int(rng, 16, 65_536), pick(rng, (1, 2))), named, written=())


def _draw_powers(rng: Rng) -> Call:
    return Call("aten::pow.Scalar", (10_000, TensorArg((size(rng, 16, 4096),), values="unit")), written=(1,))


def _draw_sorted(rng: Rng) -> Call:
    """Indices of a table-batched lookup."""
    index = TensorArg((log_int(rng, 8192, 4 << 20),), pick(rng, ("int32", "int64")), high=1 << 25)
    if pick(rng, (True, False)):
        return Call("aten::sort.default", (index,), written=())
    return Call("aten::sort.stable", (index,), options(stable=True), written=())


def _draw_scattered(rng: Rng) -> Call:
    x = TensorArg((log_int(rng, 8, 8192), size(rng, 8, 1024)), floating(rng))
    return Call("aten::scatter.value", (x, 1, indices((x.shape[0], 1), x.shape[1]), 1.0))


def _draw_lists(rng: Rng) -> Call:
    op = pick(rng, tuple(_LISTS))
    shapes = [(log_int(rng, 1, 500_000),) for _ in range(log_int(rng, 1, 60))]
    tensors = tuple(TensorArg(shape) for shape in shapes)
    rest: dict[str, Argument] = {
        "number": 0.5,
        "numbers": (0.5,) * len(shapes),
        "scalar": scalar(values="unit"),
        "list": tensors,
    }
    return Call(op, (tensors, *(rest[kind] for kind in _LISTS[op].split())))


# Launches of the ops of the family `other`: those of a sibling in another family, and a few of their own.

_BLOCK = 1024  # elements, as in the element-wise kernels
# Keys of a row up to which ATen sorts within a block, by kernels that were never measured.
_SMALL_SORT = 4096


def launches(call: GpuCall) -> list[Launch]:
    """What an op of the family launches."""
    name = base_name(call.op)
    if name in _OWN and call.op != "aten::pow.Tensor_Tensor":
        return _OWN[name](call)
    if name.startswith("_foreach_"):
        return over_lists(call)
    if name in ("scatter", "scatter_"):
        return indexing(replace(call, op=f"aten::{name}.src"))
    return elementwise(call)


def _new_zeros(call: GpuCall) -> list[Launch]:
    return [cleared(fresh(integers(call, 1), dtype_keyword(call, tensor(call, 0).dtype)))]


def _scalar_tensor(call: GpuCall) -> list[Launch]:
    return [cleared(fresh((), dtype_keyword(call, "float32")))]


def _number(call: Call, place: int, default: float) -> float:
    given = value(call, place, default)
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise InputError(f"{call.op}: argument {place} is {given!r}, expected a number")
    return float(given)


def _arange(call: GpuCall) -> list[Launch]:
    start, end, step = _number(call, 0, 0), _number(call, 1, 0), _number(call, 2, 1)
    count = math.ceil((end - start) / step) if step else 0
    if count <= 0:
        raise InputError(f"{call.op}: no number lies from {start} to {end} by steps of {step}")
    result = fresh((count,), dtype_keyword(call, "int64"))
    return [Launch(WITH_INDEX, count, (), (result,), {}, ((count / _BLOCK, 1.0),))]


def _power(call: GpuCall) -> list[Launch]:
    """A number to the power of a tensor: the number becomes a tensor first."""
    x = tensor(call, 1)
    number = "int64" if isinstance(value(call, 0), int) else "float32"
    powers = pointwise((hot((), number, 8), x), fresh(x.shape, x.dtype), tag=number, casts=number != x.dtype)
    return [cleared(fresh((), number)), powers]


def _sort(call: GpuCall) -> list[Launch]:
    x = tensor(call, 0)
    if len(x.shape) != 1 or x.numel <= _SMALL_SORT:
        raise InputError(f"{call.op}: no rule says what sorting {x.shape} launches, only one row of more than {_SMALL_SORT}")
    order = over_indices("fill_reverse_indices_kernel", x.numel)
    return [memcpy(x, fresh(x.shape, x.dtype)), order, *radix_sort(x.numel, 8 * x.item_bytes, 1 << (8 * x.item_bytes))]


def _given_result(call: GpuCall) -> list[Launch]:
    """The element-wise op whose result is given by name."""
    if keyword(call, "out") is None:
        raise InputError(f"{call.op}: no result is given")
    return elementwise(replace(call, op="aten::mul.Tensor"))


_OWN: dict[str, Rules] = {
    "new_zeros": _new_zeros,
    "scalar_tensor": _scalar_tensor,
    "arange": _arange,
    "pow": _power,
    "sort": _sort,
    "mul": _given_result,
}


FAMILY = Family(
    name="other",
    ops=(
        *(*_WITH_NUMBER, *_WITH_TENSOR, *_WITH_TWO, *_LISTS),
        *("aten::mul.out", "aten::new_zeros.default", "aten::scalar_tensor.default", "aten::arange.start_step"),
        *("aten::pow.Scalar", "aten::sort.default", "aten::sort.stable", "aten::scatter.value"),
    ),
    sweep=mixture(
        *((2, _draw_with_number), (1.5, _draw_with_tensor), (0.7, _draw_with_two), (1, _draw_given_result)),
        *((0.8, _draw_made), (0.3, _draw_counted), (0.3, _draw_powers), (0.7, _draw_sorted), (0.4, _draw_scattered)),
        (3, _draw_lists),
    ),
    weight=0.5,
    rules=launches,
)
