"""Ops that real steps call now and then and no other family sweeps: other overloads of its ops, and a few of their own.

They launch what their siblings do; a few calls of each show that.
"""

from __future__ import annotations

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
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.other import launches

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


def _tensor(rng: Rng, values: str = "normal") -> TensorArg:
    return TensorArg(activation_shape(rng, _MOST_ELEMENTS), floating(rng), values=values)


def _with_number(rng: Rng) -> Call:
    return Call(pick(rng, _WITH_NUMBER), (_tensor(rng), 0.5))


def _with_tensor(rng: Rng) -> Call:
    x = _tensor(rng, "positive")
    return Call(pick(rng, _WITH_TENSOR), (x, x), written=(0, 1))


def _with_two(rng: Rng) -> Call:
    x = _tensor(rng, "unit")
    return Call(pick(rng, _WITH_TWO), (x, x, x), written=(0, 1))


def _given_result(rng: Rng) -> Call:
    """Gradients scaled into a bucket of DDP."""
    x = TensorArg(pick(rng, ((size(rng, 1, 4096), size(rng, 1, 4096)), (size(rng, 1, 4096),))))
    return Call("aten::mul.out", (x, 0.25), options(out=x))


def _made(rng: Rng) -> Call:
    x = _tensor(rng)
    if pick(rng, (True, False)):
        return Call("aten::new_zeros.default", (x, activation_shape(rng, _MOST_ELEMENTS)))
    named = options(device="device", dtype=DtypeArg(x.dtype))
    return Call("aten::scalar_tensor.default", (0.0,), named, written=())


def _counted(rng: Rng) -> Call:
    named = options(device="device", dtype=DtypeArg("int64"))
    return Call("aten::arange.start_step", (0, log_int(rng, 16, 65_536), pick(rng, (1, 2))), named, written=())


def _powers(rng: Rng) -> Call:
    return Call("aten::pow.Scalar", (10_000, TensorArg((size(rng, 16, 4096),), values="unit")), written=(1,))


def _sorted(rng: Rng) -> Call:
    """Indices of a table-batched lookup."""
    index = TensorArg((log_int(rng, 8192, 4 << 20),), pick(rng, ("int32", "int64")), high=1 << 25)
    if pick(rng, (True, False)):
        return Call("aten::sort.default", (index,), written=())
    return Call("aten::sort.stable", (index,), options(stable=True), written=())


def _scattered(rng: Rng) -> Call:
    x = TensorArg((log_int(rng, 8, 8192), size(rng, 8, 1024)), floating(rng))
    return Call("aten::scatter.value", (x, 1, indices((x.shape[0], 1), x.shape[1]), 1.0))


def _lists(rng: Rng) -> Call:
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


FAMILY = Family(
    name="other",
    ops=(
        *(*_WITH_NUMBER, *_WITH_TENSOR, *_WITH_TWO, *_LISTS),
        *("aten::mul.out", "aten::new_zeros.default", "aten::scalar_tensor.default", "aten::arange.start_step"),
        *("aten::pow.Scalar", "aten::sort.default", "aten::sort.stable", "aten::scatter.value"),
    ),
    sweep=mixture(
        *((2, _with_number), (1.5, _with_tensor), (0.7, _with_two), (1, _given_result), (0.8, _made), (0.3, _counted)),
        *((0.3, _powers), (0.7, _sorted), (0.4, _scattered), (3, _lists)),
    ),
    weight=0.5,
    rules=launches,
)
