"""Element-wise arithmetic by operand count: one, two or three, with scalars, broadcasting, views and mixed dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import (
    HALVES,
    Rng,
    Shape,
    activation,
    activation_shape,
    chance,
    floating,
    log_int,
    mixture,
    options,
    permuted,
    pick,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Launch, Operand, fresh, hot
from steptime._models.kernels.launches.arguments import base_name, keyword, tensors, value
from steptime._models.kernels.launches.copies import empty_like, memcpy
from steptime._models.kernels.launches.iteration import broadcast
from steptime._models.kernels.launches.pointwise import pointwise
from steptime.errors import InputError

# Op -> what its operand has to be.
_ONE = {
    "aten::neg.default": "normal",
    "aten::abs.default": "normal",
    "aten::exp.default": "normal",
    "aten::log.default": "positive",
    "aten::sqrt.default": "positive",
    "aten::rsqrt.default": "positive",
    "aten::reciprocal.default": "positive",
    "aten::sin.default": "normal",
    "aten::cos.default": "normal",
    "aten::erf.default": "normal",
    "aten::sqrt_.default": "positive",
}
_TWO = ("aten::add.Tensor", "aten::mul.Tensor", "aten::sub.Tensor", "aten::div.Tensor")
_COMPARED = ("aten::eq.Tensor", "aten::ne.Tensor", "aten::lt.Tensor", "aten::gt.Tensor", "aten::ge.Scalar", "aten::eq.Scalar")
# C++ passes numbers as such: data parallelism's reducer, sparse gradients, row-wise Adagrad.
_NUMBERS = ("aten::mul.Scalar", "aten::div_.Scalar", "aten::gt.Scalar")
_IN_PLACE = ("aten::add_.Tensor", "aten::mul_.Tensor", "aten::sub_.Tensor", "aten::div_.Tensor")
_BETWEEN = ("aten::lerp.Scalar", "aten::lerp_.Scalar")
_THREE = ("aten::addcmul.default", "aten::addcdiv.default", "aten::addcmul_.default", "aten::addcdiv_.default")


def _draw_broadcast(rng: Rng, shape: Shape) -> Shape:
    """The shape of an operand that is repeated: over the rows, the features, the pixels, or all but one axis."""
    if len(shape) == 1:
        return pick(rng, ((), (1,)))
    per_row = (*shape[:-1], 1)
    per_feature = shape[-1:]
    kept = int(rng.integers(len(shape)))
    per_axis = tuple(length if axis == kept else 1 for axis, length in enumerate(shape))
    return pick(rng, (per_row, per_feature, per_axis, (1, *shape[1:])))


def _draw_operand(rng: Rng, x: TensorArg) -> TensorArg:
    """The other operand: mostly of the same shape and dtype, else broadcast, stored transposed, or of another dtype."""
    kind = rng.random()
    if kind < 0.55:
        return TensorArg(x.shape, x.dtype, x.strides)
    if kind < 0.8:
        return TensorArg(_draw_broadcast(rng, x.shape), x.dtype)
    if kind < 0.9 and len(x.shape) > 1:
        order = (*range(len(x.shape) - 2), len(x.shape) - 1, len(x.shape) - 2)
        return permuted(TensorArg(tuple(x.shape[axis] for axis in order), x.dtype), order)
    other = pick(rng, HALVES) if x.dtype == "float32" else "float32"
    return TensorArg(x.shape, other)


def _draw_one(rng: Rng) -> Call:
    op = pick(rng, tuple(_ONE))
    return Call(op, (activation(rng, _ONE[op]),))


def _draw_power(rng: Rng) -> Call:
    x = activation(rng)
    if chance(rng, 0.7):
        return Call("aten::pow.Tensor_Scalar", (x, pick(rng, (2, 2, 3, 0.5))))
    return Call("aten::clamp.default", (x, -1.0, 1.0))


def _draw_two(rng: Rng) -> Call:
    x = activation(rng)
    op = pick(rng, _TWO, (0.45, 0.35, 0.08, 0.12))
    scaled = options(alpha=pick(rng, (-0.01, 0.5))) if op == "aten::add.Tensor" and chance(rng, 0.1) else ()
    return Call(op, (x, _draw_operand(rng, x)), scaled, written=(0, 1))


def _draw_scalar(rng: Rng) -> Call:
    """The other operand is a Python number, which the kernel gets as an argument."""
    return Call(pick(rng, (*_TWO, *_IN_PLACE[:2], *_NUMBERS)), (activation(rng), pick(rng, (0.125, 0.5, 2.0, 1e-6))))


def _draw_in_place(rng: Rng) -> Call:
    """Residuals, accumulated gradients and updates: the result takes the place of the first operand."""
    x = activation(rng)
    scaled = options(alpha=-0.01) if chance(rng, 0.15) else ()
    op = pick(rng, _IN_PLACE, (0.6, 0.25, 0.05, 0.1))
    return Call(op, (x, _draw_operand(rng, x)), scaled if op == "aten::add_.Tensor" else (), written=(0, 1))


def _draw_three(rng: Rng) -> Call:
    x = activation(rng)
    same = TensorArg(x.shape, x.dtype)
    second = TensorArg(_draw_broadcast(rng, x.shape), x.dtype) if chance(rng, 0.2) else same
    op = pick(rng, (*_THREE, *_BETWEEN))
    if op in _BETWEEN:
        return Call(op, (x, same, 0.1), written=(0, 1))
    divided = TensorArg(second.shape, x.dtype, values="positive")
    return Call(op, (x, same, divided if "div" in op else second), options(value=pick(rng, (1, -0.001))), written=(0, 1))


def _draw_masked(rng: Rng) -> Call:
    """A boolean mask selects: causal masks, dropout by hand, clipped gradients."""
    x = activation(rng)
    shape = _draw_broadcast(rng, x.shape) if chance(rng, 0.3) and len(x.shape) > 1 else x.shape
    mask = TensorArg(shape, "bool", values="mask")
    forms = (
        Call("aten::masked_fill.Scalar", (x, mask, -10000.0)),
        Call("aten::masked_fill_.Scalar", (x, mask, 0.0)),
        Call("aten::where.self", (mask, x, TensorArg(x.shape, x.dtype)), written=(1,)),
        Call("aten::where.self", (mask, x, TensorArg((), x.dtype)), written=(1,)),
        Call("aten::mul.Tensor", (x, mask)),
    )
    return pick(rng, forms)


def _draw_compared(rng: Rng) -> Call:
    op = pick(rng, _COMPARED)
    whole = chance(rng, 0.5)
    shape = activation_shape(rng)
    x = TensorArg(shape, "int64", high=1000) if whole else TensorArg(shape, floating(rng))
    return Call(op, (x, 0 if op.endswith("Scalar") else x))


def _draw_integers(rng: Rng) -> Call:
    """Positions, offsets and masks are integers and booleans."""
    x = TensorArg((log_int(rng, 256, 4_000_000),), pick(rng, ("int64", "int32")), high=100_000)
    mask = TensorArg(x.shape, "bool", values="mask")
    forms = (
        Call("aten::add.Tensor", (x, 1)),
        Call("aten::mul.Tensor", (x, x)),
        Call("aten::sub.Tensor", (x, x)),
        Call("aten::remainder.Scalar", (x, 1009)),
        Call("aten::bitwise_and.Tensor", (mask, mask)),
        Call("aten::logical_not.default", (mask,)),
    )
    return pick(rng, forms)


def _draw_row_wise_adagrad(rng: Rng) -> Call:
    """Its steps after the mean of squares per row: accumulate, root, floor, and the update of the whole table."""
    rows, dim = log_int(rng, 1000, 500_000), pick(rng, (16, 32, 64, 128))
    state, table = TensorArg((rows,), values="positive"), TensorArg((min(rows, 40_000_000 // dim), dim))
    root = TensorArg((table.shape[0], 1), values="positive")
    forms = (
        Call("aten::pow.Tensor_Scalar", (table, 2)),
        Call("aten::add_.Tensor", (state, TensorArg((rows,), values="positive")), written=(1,)),
        Call("aten::sqrt.default", (state,)),
        Call("aten::add_.Tensor", (state, 1e-8)),
        Call("aten::addcdiv_.default", (table, TensorArg(table.shape), root), options(value=-0.01), written=(1, 2)),
    )
    return pick(rng, forms)


# What element-wise ops launch: one kernel over the broadcast shape, by dtypes and strides.

# Ops whose result is boolean.
_TRUTHS = ("eq", "ne", "lt", "gt", "ge", "le", "logical_not", "logical_and", "logical_or", "isinf", "isnan")
# Ops that take a mask beside their operands without converting anything.
_MASKED = ("masked_fill", "where", "native_dropout_backward")
# Operands whose dtypes tell one functor from another.
_TAGGED = 3


def launches(call: Call) -> list[Launch]:
    """The kernel of an element-wise op; a masked fill that is not in place copies first."""
    inputs = tensors(call)
    if not inputs:
        raise InputError(f"{call.op}: no tensor among its arguments, expected at least one")
    name = base_name(call.op)
    kind, in_place = name.rstrip("_"), name.endswith("_")
    tag = _tag(call, kind, inputs)
    if kind == "masked_fill" and not in_place:
        x = inputs[0]
        copied = replace(hot(x.shape, x.dtype, 2 * x.nbytes), strides=x.strides)
        return [memcpy(x, empty_like(x)), pointwise((copied, inputs[1]), copied, tag=tag, existing=True)]
    dtype = _result_dtype(kind, inputs)
    output = inputs[0] if in_place else fresh(broadcast([item.shape for item in inputs]), dtype)
    return [pointwise(inputs, output, tag=tag, casts=_casts(kind, inputs), existing=in_place)]


def _tag(call: Call, kind: str, inputs: Sequence[Operand]) -> str:
    own = str(value(call, 1)) if kind == "pow" else str(keyword(call, "approximate", ""))
    return own + ",".join(item.dtype for item in inputs[:_TAGGED])


def _casts(kind: str, inputs: Sequence[Operand]) -> bool:
    return kind not in _MASKED and len({item.dtype for item in inputs}) > 1


def _result_dtype(kind: str, inputs: Sequence[Operand]) -> str:
    """The dtype that ATen promotes to: of tensors with dimensions before those without, of floats before integers."""
    if kind in _TRUTHS:
        return "bool"
    if kind in _MASKED:
        return inputs[1 if kind == "where" else 0].dtype
    sized = [one for one in inputs if one.shape] or list(inputs)
    floats = {one.dtype for one in sized if "float" in one.dtype}
    if floats:
        return floats.pop() if len(floats) == 1 else "float32"
    return max(sized, key=lambda one: one.item_bytes).dtype


FAMILY = Family(
    name="elementwise",
    ops=(
        *_ONE,
        *("aten::pow.Tensor_Scalar", "aten::clamp.default"),
        *_TWO,
        *_IN_PLACE,
        *_COMPARED,
        *_THREE,
        *(*_BETWEEN, *_NUMBERS, "aten::masked_fill.Scalar", "aten::masked_fill_.Scalar", "aten::where.self"),
        *("aten::remainder.Scalar", "aten::bitwise_and.Tensor", "aten::logical_not.default"),
    ),
    sweep=mixture(
        *((2, _draw_one), (0.6, _draw_power), (3, _draw_two), (1.2, _draw_scalar), (2, _draw_in_place)),
        *((1, _draw_three), (1, _draw_masked), (0.5, _draw_compared), (0.4, _draw_integers)),
        (0.4, _draw_row_wise_adagrad),
    ),
    weight=12.0,
    rules=launches,
)
