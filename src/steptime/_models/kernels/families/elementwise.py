"""Element-wise arithmetic by operand count: one, two or three, with scalars, broadcasting, views and mixed dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steptime._models.kernels.call import TensorArg, contiguous
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import GpuCall, Launch, Operand, fresh, hot
from steptime._models.kernels.launches.iterator import broadcast, copies, empty_like, memcpy, pointwise
from steptime._models.kernels.sweep import HALVES, Draw, Drawn, KernelSweep, Shape
from steptime._units import dtype_bytes
from steptime.errors import InputError


def _draw_broadcast(draw: Draw, shape: Shape) -> Shape:
    """The shape of an operand that is repeated: over the rows, the features, the pixels, or all but one axis."""
    if len(shape) == 1:
        return draw.pick(((), (1,)))
    axis_kept = draw.below(len(shape))
    per_axis = tuple(length if axis == axis_kept else 1 for axis, length in enumerate(shape))
    return draw.pick(((*shape[:-1], 1), shape[-1:], per_axis, (1, *shape[1:])))


def _draw_operand(draw: Draw, x: TensorArg) -> TensorArg:
    """The other operand: mostly of the same shape and dtype, else broadcast, stored transposed, or of another dtype."""
    kind = draw.rng.random()
    if kind < 0.55:
        return x
    if kind < 0.8:
        return TensorArg(_draw_broadcast(draw, x.shape), x.dtype)
    if kind < 0.9 and len(x.shape) > 1:
        return TensorArg(x.transposed().shape, x.dtype).transposed()
    return TensorArg(x.shape, draw.pick(HALVES) if x.dtype == "float32" else "float32")


def _draw_one(draw: Draw) -> Drawn:
    draw.form()
    x = draw.activation()
    return {"x": x, "positive": replace(x, values="positive")}


def _draw_power(draw: Draw) -> Drawn:
    x = draw.activation()
    return {"x": x, "exponent": draw.pick((2, 2, 3, 0.5)) if "pow" in draw.form() else None}


def _draw_two(draw: Draw) -> Drawn:
    x = draw.activation()
    alpha = draw.pick((-0.01, 0.5)) if "add" in draw.form() and draw.chance(0.1) else None
    return {"x": x, "other": _draw_operand(draw, x), "alpha": alpha}


def _draw_number(draw: Draw) -> Drawn:
    """The other operand is a Python number, which the kernel gets as an argument."""
    draw.form()
    return {"x": draw.activation(), "number": draw.pick((0.125, 0.5, 2.0, 1e-6))}


def _draw_in_place(draw: Draw) -> Drawn:
    """Residuals, accumulated gradients and updates: the result takes the place of the first operand."""
    x, alpha = draw.activation(), -0.01 if draw.chance(0.15) else None
    draw.form()
    return {"x": x, "other": _draw_operand(draw, x), "alpha": alpha}


def _draw_three(draw: Draw) -> Drawn:
    x = draw.activation()
    y = TensorArg(_draw_broadcast(draw, x.shape), x.dtype) if draw.chance(0.2) else x
    value = draw.pick((1, -0.001)) if "lerp" not in draw.form() else None
    return {"x": x, "y": y, "positive": replace(y, values="positive"), "value": value}


def _draw_masked(draw: Draw) -> Drawn:
    """A boolean mask selects: causal masks, dropout by hand, clipped gradients."""
    x = draw.activation()
    shape = _draw_broadcast(draw, x.shape) if draw.chance(0.3) and len(x.shape) > 1 else x.shape
    return {"x": x, "mask": TensorArg(shape, "bool", values="mask"), "scalar": TensorArg((), x.dtype)}


def _draw_compared(draw: Draw) -> Drawn:
    draw.form()
    whole, shape = draw.chance(0.5), draw.activation_shape()
    return {"x": TensorArg(shape, "int64", high=1000) if whole else TensorArg(shape, draw.floating())}


def _draw_integers(draw: Draw) -> Drawn:
    """Positions, offsets and masks are integers and booleans."""
    x = TensorArg((draw.log_int(256, 4_000_000),), draw.pick(("int64", "int32")), high=100_000)
    return {"x": x, "mask": TensorArg(x.shape, "bool", values="mask")}


def _draw_row_wise_adagrad(draw: Draw) -> Drawn:
    """Its steps after the mean of squares per row: accumulate, root, floor, and the update of the whole table."""
    rows, dim = draw.log_int(1000, 500_000), draw.pick((16, 32, 64, 128))
    table = TensorArg((min(rows, 40_000_000 // dim), dim))
    root = TensorArg((table.shape[0], 1), values="positive")
    return {"state": TensorArg((rows,), values="positive"), "table": table, "root": root}


# What element-wise ops launch: one kernel over the broadcast shape, by dtypes and strides.

# Ops whose result is boolean.
_TRUTHS = ("eq", "ne", "lt", "gt", "ge", "le", "logical_not", "logical_and", "logical_or", "isinf", "isnan")
# Ops that take a mask beside their operands without converting anything.
_MASKED = ("masked_fill", "where", "native_dropout_backward")
# Operands whose dtypes tell one functor from another.
_TAGGED = 3


def launches(call: GpuCall) -> list[Launch]:
    """The kernel of an element-wise op; a masked fill that is not in place copies first."""
    every = call.operands()
    inputs = [item for item in every if item.numel] or every  # a buffer that the CPU alone fills is empty
    if not inputs:
        raise InputError(f"{call.op}: no tensor among its arguments, expected at least one")
    kind, in_place = call.name.rstrip("_"), call.name.endswith("_")
    tag = _tag(call, kind, inputs)
    if kind == "masked_fill" and not in_place:
        x = inputs[0]
        copied = replace(hot(x.shape, x.dtype, 2 * x.nbytes), strides=x.strides)
        return [memcpy(x, empty_like(x)), pointwise((copied, inputs[1]), copied, tag=tag, existing=True)]
    if kind == "abs" and "complex" in inputs[0].dtype:
        return _absolute(inputs[0])
    dtype = _result_dtype(kind, inputs)
    output = inputs[0] if in_place else fresh(broadcast([item.shape for item in inputs]), dtype)
    return [pointwise(inputs, output, tag=tag, casts=_casts(kind, inputs), existing=in_place)]


def _absolute(x: Operand) -> list[Launch]:
    """Of complex numbers: a complex result, of which the real parts are copied."""
    result, item = fresh(x.shape, "float32"), x.item_bytes // 2
    parts = replace(
        hot(x.shape, "float32", x.nbytes), strides=tuple(x.item_bytes // item * step for step in contiguous(x.shape))
    )
    made = pointwise((x,), fresh(x.shape, x.dtype), tag=x.dtype, kernel="abs_kernel_vectorized2_kernel")
    return [made, *copies(result, parts)]


def _tag(call: GpuCall, kind: str, inputs: Sequence[Operand]) -> str:
    variant = str(call.value(1)) if kind == "pow" else str(call.keyword("approximate", ""))
    return variant + ",".join(item.dtype for item in inputs[:_TAGGED])


def _casts(kind: str, inputs: Sequence[Operand]) -> bool:
    return kind not in _MASKED and len({item.dtype for item in inputs}) > 1


def _result_dtype(kind: str, inputs: Sequence[Operand]) -> str:
    """The dtype that ATen promotes to: of tensors with dimensions before those without, of floats before integers."""
    if kind in _TRUTHS:
        return "bool"
    if kind in _MASKED:
        return inputs[1 if kind == "where" else 0].dtype
    sized = [x for x in inputs if x.shape] or list(inputs)
    if pairs := [x.dtype for x in sized if "complex" in x.dtype]:
        return max(pairs, key=dtype_bytes)
    floats = {x.dtype for x in sized if "float" in x.dtype}
    if floats:
        return floats.pop() if len(floats) == 1 else "float32"
    return max(sized, key=lambda x: x.item_bytes).dtype


FAMILY = Family(
    name="elementwise",
    sweep=KernelSweep(
        (
            *(2, _draw_one, "neg(*x)", "abs(*x)", "exp(*x)", "log(*positive)", "sqrt(*positive)", "rsqrt(*positive)"),
            *("reciprocal(*positive)", "sin(*x)", "cos(*x)", "erf(*x)", "sqrt_(*positive)"),
        ),
        (0.6, _draw_power, (0.7, "pow.Tensor_Scalar(*x, exponent)"), (0.3, "clamp(*x, -1.0, 1.0)")),
        (
            *(3, _draw_two, (0.45, "add.Tensor(*x, *other, alpha=alpha)"), (0.35, "mul.Tensor(*x, *other)")),
            *((0.08, "sub.Tensor(*x, *other)"), (0.12, "div.Tensor(*x, *other)")),
        ),
        (
            *(1.2, _draw_number, "add.Tensor(*x, number)", "mul.Tensor(*x, number)", "sub.Tensor(*x, number)"),
            *("div.Tensor(*x, number)", "add_.Tensor(*x, number)", "mul_.Tensor(*x, number)"),
            # C++ passes numbers as such: data parallelism's reducer, sparse gradients, row-wise Adagrad.
            *("mul.Scalar(*x, number)", "div_.Scalar(*x, number)", "gt.Scalar(*x, number)"),
        ),
        (
            *(2, _draw_in_place, (0.6, "add_.Tensor(*x, *other, alpha=alpha)"), (0.25, "mul_.Tensor(*x, *other)")),
            *((0.05, "sub_.Tensor(*x, *other)"), (0.1, "div_.Tensor(*x, *other)")),
        ),
        (
            *(1, _draw_three, "addcmul(*x, *x, y, value=value)", "addcdiv(*x, *x, positive, value=value)"),
            *("addcmul_(*x, *x, y, value=value)", "addcdiv_(*x, *x, positive, value=value)"),
            *("lerp.Scalar(*x, *x, 0.1)", "lerp_.Scalar(*x, *x, 0.1)"),
        ),
        (
            *(1, _draw_masked, "masked_fill.Scalar(*x, mask, -10000.0)", "masked_fill_.Scalar(*x, mask, 0.0)"),
            *("where.self(mask, *x, x)", "where.self(mask, *x, scalar)", "mul.Tensor(*x, mask)"),
        ),
        (
            *(0.5, _draw_compared, "eq.Tensor(*x, x)", "ne.Tensor(*x, x)", "lt.Tensor(*x, x)", "gt.Tensor(*x, x)"),
            *("ge.Scalar(*x, 0)", "eq.Scalar(*x, 0)"),
        ),
        (
            *(0.4, _draw_integers, "add.Tensor(*x, 1)", "mul.Tensor(*x, x)", "sub.Tensor(*x, x)"),
            *("remainder.Scalar(*x, 1009)", "bitwise_and.Tensor(*mask, mask)", "logical_not(*mask)"),
        ),
        (
            *(0.4, _draw_row_wise_adagrad, "pow.Tensor_Scalar(*table, 2)", "add_.Tensor(state, *state)", "sqrt(*state)"),
            *("add_.Tensor(*state, 1e-8)", "addcdiv_(table, *table, *root, value=-0.01)"),
        ),
    ),
    weight=12.0,
    rules=launches,
    kin="""
        abs_ acos acosh asin asinh atan atan2 atanh bitwise_and_ bitwise_not bitwise_not_ bitwise_or bitwise_or_ bitwise_xor
        bitwise_xor_ ceil ceil_ clamp_ clamp_max clamp_max_ clamp_min_ copysign cos_ cosh div.Scalar_mode div.Tensor_mode
        div_.Scalar_mode div_.Tensor_mode eq_ erfc erfinv erfinv_ exp2 exp_ expm1 expm1_ floor floor_ floor_divide floor_divide_
        fmax fmin fmod fmod_ frac ge_ gt_ hypot isnan isneginf isposinf le le_ log10 log1p log1p_ log2 log_ logical_and
        logical_and_ logical_not_ logical_or logical_or_ logical_xor logical_xor_ lt_ maximum minimum nan_to_num nan_to_num_ ne_
        neg_ pow_ reciprocal_ remainder_ round round_ rsqrt_ sign sign_ signbit sin_ sinh tan trunc trunc_ xlogy
    """,
)
