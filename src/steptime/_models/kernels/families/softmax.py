"""Softmax and log-softmax over attention scores, vocabularies and classes, forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import Call, DtypeArg, TensorArg
from steptime._models.kernels.draw import (
    SEQUENCES,
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    Shape,
    chance,
    floating,
    log_int,
    mixture,
    pick,
    size,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Gpu, GpuCall, Launch, Operand, fresh, hot
from steptime._models.kernels.launches.arguments import base_name, dtype_at, flag, integer, tensor
from steptime._models.kernels.launches.pointwise import fill, pointwise
from steptime._models.kernels.launches.reduce import reduction
from steptime._units import dtype_bytes
from steptime.errors import InputError

_MOST_ELEMENTS = USUAL_BYTES // 4


def _draw_scores(rng: Rng) -> Shape:
    """Batch, heads, queries, keys."""
    sequence = pick(rng, SEQUENCES) if chance(rng, 0.6) else size(rng, 16, 2048)
    heads = pick(rng, (1, 4, 8, 12, 16))
    most = max(1, _MOST_ELEMENTS // (heads * sequence * sequence))
    return log_int(rng, 1, min(128, most)), heads, sequence, sequence


def _draw_classes(rng: Rng) -> Shape:
    """Rows, classes."""
    classes = pick(rng, (*VOCABULARIES, 10, 1000)) if chance(rng, 0.5) else size(rng, 2, 65536)
    return log_int(rng, 8, min(65536, _MOST_ELEMENTS // classes)), classes


def _draw_case(rng: Rng, scores_share: float) -> tuple[Shape, int]:
    """A shape and the axis to normalise, seldom another than the last."""
    shape = _draw_scores(rng) if chance(rng, scores_share) else _draw_classes(rng)
    return shape, (1 if len(shape) == 4 and chance(rng, 0.08) else -1)


def _draw_forward(rng: Rng) -> Call:
    logarithmic = chance(rng, 0.4)
    shape, axis = _draw_case(rng, 0.1 if logarithmic else 0.85)
    widened = chance(rng, 0.12)  # softmax(x, dtype=torch.float32) of a float16 input: the kernel widens what it reads
    dtype = "float16" if widened else floating(rng)
    op = "aten::_log_softmax.default" if logarithmic else "aten::_softmax.default"
    return Call(op, (TensorArg(shape, dtype), axis, widened))


def _draw_safe(rng: Rng) -> Call:
    """As the plain form of attention takes it: rows that are masked out altogether give zeros."""
    return Call("aten::_safe_softmax.default", (TensorArg(_draw_scores(rng), floating(rng)), -1))


def _draw_backward(rng: Rng) -> Call:
    logarithmic = chance(rng, 0.4)
    shape, axis = _draw_case(rng, 0.1 if logarithmic else 0.85)
    widened = chance(rng, 0.12)
    input_dtype = "float16" if widened else floating(rng)
    dtype = "float32" if widened else input_dtype
    op = "aten::_log_softmax_backward_data.default" if logarithmic else "aten::_softmax_backward_data.default"
    y = TensorArg(shape, dtype, values="normal" if logarithmic else "unit")
    return Call(op, (TensorArg(shape, dtype), y, axis, DtypeArg(input_dtype)))


# What softmax launches: a warp per row where it is short, a block per row in registers or shared memory where it is long.

# Rows that a warp takes (ATen's dispatch_softmax_forward and backward), in elements and in bytes.
_WARP_FORWARD, _WARP_WIDENING, _WARP_BACKWARD, _WARP_BYTES = 2048, 1024, 1024, 8192
# Rows that fit into a block's registers: between 5,248 and 11,200 elements in the measured rows.
_REGISTERS = 9216
# Shared memory of a block less what the block reduces in, and the bytes of a vector.
_SHARED_BYTES, _VECTOR_BYTES = 48 * 1024 - 128, 16


def launches(call: GpuCall) -> list[Launch]:
    """The kernels of one op of the family."""
    name = base_name(call.op)
    if name in ("_softmax", "_log_softmax"):
        x = tensor(call, 0)
        return [row_kernel(x, integer(call, 1), "float32" if flag(call, 2) else x.dtype, call.gpu)]
    if name == "_log_softmax_backward_data":
        gradient, y = tensor(call, 0), tensor(call, 1)
        return [row_kernel(gradient, integer(call, 2), dtype_at(call, 3, gradient.dtype), call.gpu, result=y)]
    if name == "_softmax_backward_data":
        return _backward(call)
    if name == "_safe_softmax":
        return _safe(tensor(call, 0), integer(call, 1), call.gpu)
    raise InputError(f"{call.op}: no rule says what it launches")


def row_kernel(x: Operand, axis: int, dtype: str, gpu: Gpu, *, result: Operand | None = None) -> Launch:
    """The kernel that normalises along an axis; with the forward's `result`, that of the backward."""
    index = axis % len(x.shape)
    columns = x.shape[index]
    inner = math.prod(x.shape[index + 1 :])
    rows = math.prod(x.shape[:index]) * inner
    power = 1 << max(0, columns - 1).bit_length()
    facts: dict[str, float] = {
        "rows": rows,
        "columns": columns,
        "inner": inner,
        "power": power,
        "padding": power / max(1, columns),
        "aligned_16": columns % (_VECTOR_BYTES // x.item_bytes) == 0,
        "aligned_4": columns % 4 == 0,
        "waves": rows / gpu.sms,
    }
    kernel = _kernel(x, columns, inner, dtype, backward=result is not None)
    reads = (x,) if result is None else (x, result)
    grids = _grids(kernel, rows, columns, inner, power)
    return Launch(kernel, x.numel, reads, (fresh(x.shape, dtype),), facts, grids, "", f"{x.dtype}>{dtype}")


def _kernel(x: Operand, columns: int, inner: int, dtype: str, *, backward: bool) -> str:
    way = "Backward" if backward else "Forward"
    item, out = x.item_bytes, dtype_bytes(dtype)
    if inner > 1:
        return f"cunn_SpatialSoftMax{way}"
    widening = out > item or (backward and out < item)
    if backward:
        short = columns <= _WARP_BACKWARD
    else:
        short = columns <= (_WARP_WIDENING if widening else _WARP_FORWARD) and columns * item <= _WARP_BYTES
    if short:
        return f"softmax_warp_{way.lower()}"
    if not backward and not widening and columns < _REGISTERS:
        return "cunn_SoftMaxForwardReg"
    shared = columns % (_VECTOR_BYTES // item) == 0 and columns * item < _SHARED_BYTES
    return f"cunn_SoftMax{way}" + ("Smem" if shared else "")


def _grids(kernel: str, rows: int, columns: int, inner: int, power: int) -> tuple[tuple[float, float], ...]:
    if kernel.startswith("softmax_warp"):
        # Four warps of a block take a row each, a lane every 32nd element.
        return (rows / 4, power / 32), (rows / 4, 1.0)
    if inner > 1:
        return (rows / 128, float(columns)), (rows / inner, float(columns))
    return (float(rows), float(columns)), (float(rows), 1.0)


def _backward(call: GpuCall) -> list[Launch]:
    """The product of gradient and result, then the kernel over rows that reads both again."""
    gradient, y = tensor(call, 0), tensor(call, 1)
    since = 3 * gradient.nbytes
    product = replace(hot(gradient.shape, gradient.dtype, since), strides=gradient.strides)
    again = replace(hot(y.shape, y.dtype, since), strides=y.strides)
    first = pointwise((gradient, y), fresh(gradient.shape, gradient.dtype), tag=gradient.dtype)
    return [first, row_kernel(product, integer(call, 2), dtype_at(call, 3, gradient.dtype), call.gpu, result=again)]


def _safe(x: Operand, axis: int, gpu: Gpu) -> list[Launch]:
    """Rows that are masked out in full become zeros: they are looked for beside the softmax."""
    index = axis % len(x.shape)
    masked = hot(x.shape, "bool", x.numel)
    every = hot((*x.shape[:index], 1, *x.shape[index + 1 :]), "bool", 1)
    softmax = hot(x.shape, x.dtype, 2 * x.nbytes)
    return [
        row_kernel(x, axis, x.dtype, gpu),
        pointwise((replace(x, strides=softmax.strides),), fresh(x.shape, "bool"), tag=f"isinf{x.dtype}"),
        *reduction(masked, (axis,), gpu, tag="all"),
        fill(fresh((), x.dtype), tag="zero"),
        pointwise((every, fresh((), x.dtype), softmax), fresh(x.shape, x.dtype), tag=f"where{x.dtype}"),
    ]


FAMILY = Family(
    name="softmax",
    ops=(
        "aten::_softmax.default",
        "aten::_log_softmax.default",
        "aten::_softmax_backward_data.default",
        "aten::_log_softmax_backward_data.default",
        "aten::_safe_softmax.default",
    ),
    sweep=mixture((1, _draw_forward), (1, _draw_backward), (0.1, _draw_safe)),
    weight=3.5,
    rules=launches,
)
