"""Softmax and log-softmax over attention scores, vocabularies and classes, forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import DtypeArg, TensorArg
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Gpu, GpuCall, Grids, Launch, Operand, floor_power, fresh, hot
from steptime._models.kernels.launches.iterator import fill, of_contiguous, pointwise, reduction
from steptime._models.kernels.sweep import SEQUENCES, USUAL_ELEMENTS, VOCABULARIES, Draw, Drawn, KernelSweep, Shape
from steptime._units import dtype_bytes


def _draw_scores(draw: Draw) -> Shape:
    """Batch, heads, queries, keys."""
    sequence = draw.pick(SEQUENCES) if draw.chance(0.6) else draw.size(16, 2048)
    heads = draw.pick((1, 4, 8, 12, 16))
    most = max(1, USUAL_ELEMENTS // (heads * sequence * sequence))
    return draw.log_int(1, min(128, most)), heads, sequence, sequence


def _draw_classes(draw: Draw) -> Shape:
    """Rows, classes."""
    classes = draw.pick((*VOCABULARIES, 10, 1000)) if draw.chance(0.5) else draw.size(2, 65536)
    return draw.log_int(8, min(65536, USUAL_ELEMENTS // classes)), classes


def _draw_input(draw: Draw) -> Drawn:
    """A shape and the axis to normalise, seldom another than the last; logarithms are mostly of classes."""
    shape = _draw_scores(draw) if draw.chance(0.1 if "log" in draw.form() else 0.85) else _draw_classes(draw)
    axis = 1 if len(shape) == 4 and draw.chance(0.08) else -1
    widened = draw.chance(0.12)  # softmax(x, dtype=torch.float32) of a float16 input: the kernel widens what it reads
    dtype = "float16" if widened else draw.floating()
    y = TensorArg(shape, "float32" if widened else dtype)
    return {
        "x": TensorArg(shape, dtype),
        "axis": axis,
        "widened": widened,
        "y": y,
        "y_unit": replace(y, values="unit"),
        "dtype": DtypeArg(dtype),
    }


# What softmax launches: a warp per row where it is short, a block per row in registers or shared memory where it is long.

# Rows that a warp takes (ATen's dispatch_softmax_forward and backward), in elements and in bytes.
_WARP_FORWARD, _WARP_WIDENING, _WARP_BACKWARD, _WARP_BYTES = 2048, 1024, 1024, 8192
# Rows that fit into a block's registers: between 5,248 and 11,200 elements in the measured rows.
_REGISTERS = 9216
# Elements side by side up to which, and rows from which, several threads share a row along another axis than the last.
_FEW_BESIDE = _LONG_ROW = 64
_THREADS = 1024
# How often kernels walk again over rows that are longer than what a block keeps: to sum after the largest, and to write (ATen).
_WALKED_AGAIN = {"cunn_SoftMaxForward": 2, "cunn_SoftMaxBackward": 1}
# Shared memory of a block less what the block reduces in, and the bytes of a vector.
_SHARED_BYTES, _VECTOR_BYTES = 48 * 1024 - 128, 16


def _forward(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    return [_row_kernel(x, call.integer(1), "float32" if call.flag(2) else x.dtype, call.gpu)]


def _logarithmic_backward(call: GpuCall) -> list[Launch]:
    gradient, y = call.tensor(0), call.tensor(1)
    return [_row_kernel(gradient, call.integer(2), call.dtype_at(3, gradient.dtype), call.gpu, result=y)]


def _row_kernel(x: Operand, axis: int, dtype: str, gpu: Gpu, *, result: Operand | None = None) -> Launch:
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
    # Rows that a block cannot keep are walked once for each thing to know of them: of L2, unless all at work exceed it.
    at_work = min(rows, gpu.sms * gpu.threads_per_sm // _THREADS)
    again = hot(x.shape, x.dtype, at_work * columns * x.item_bytes)
    reads = (*((x,) if result is None else (x, result)), *(again,) * _WALKED_AGAIN.get(kernel, 0))
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


def _grids(kernel: str, rows: int, columns: int, inner: int, power: int) -> Grids:
    if kernel.startswith("softmax_warp"):
        # Four warps of a block take a row each, a lane every 32nd element.
        return (rows / 4, power / 32), (rows / 4, 1.0)
    if inner > 1:
        # A block takes neighbours side by side, up to its threads; where they are few, several threads share a column.
        beside, shared = min(inner, _THREADS), _threads_along(columns, inner)
        blocks = rows / inner * math.ceil(inner / beside)
        return (blocks, columns / shared), (blocks * beside * shared / 128, columns / shared), (rows / 128, columns)
    return (rows, columns), (rows, 1.0)


def _threads_along(columns: int, inner: int) -> int:
    """Threads that share an element's row where few elements lie side by side and rows are long, else one (ATen)."""
    if inner > _FEW_BESIDE or columns < _LONG_ROW:
        return 1
    return min(floor_power(_THREADS // inner), floor_power(columns))


def _backward(call: GpuCall) -> list[Launch]:
    """The product of gradient and result, then the kernel over rows that reads both again."""
    gradient, y = call.tensor(0), call.tensor(1)
    since = 3 * gradient.nbytes
    product = replace(hot(gradient.shape, gradient.dtype, since), strides=gradient.strides)
    again = replace(hot(y.shape, y.dtype, since), strides=y.strides)
    first = pointwise((gradient, y), fresh(gradient.shape, gradient.dtype), tag=gradient.dtype)
    return [first, _row_kernel(product, call.integer(2), call.dtype_at(3, gradient.dtype), call.gpu, result=again)]


def _safe(call: GpuCall) -> list[Launch]:
    """Rows that are masked out in full become zeros: they are looked for beside the softmax."""
    x, axis = call.tensor(0), call.integer(1)
    index = axis % len(x.shape)
    masked = hot(x.shape, "bool", x.numel)
    every = hot((*x.shape[:index], 1, *x.shape[index + 1 :]), "bool", 1)
    softmax = hot(x.shape, x.dtype, 2 * x.nbytes)
    return [
        _row_kernel(x, axis, x.dtype, call.gpu),
        pointwise((replace(x, strides=softmax.strides),), fresh(x.shape, "bool"), tag=f"isinf{x.dtype}"),
        *reduction(masked, (axis,), call.gpu, tag="all"),
        fill(fresh((), x.dtype), tag="zero"),
        pointwise((every, fresh((), x.dtype), softmax), fresh(x.shape, x.dtype), tag=f"where{x.dtype}"),
    ]


FAMILY = Family(
    name="softmax",
    sweep=KernelSweep(
        (1, _draw_input, (0.4, "_log_softmax(*x, axis, widened)"), (0.6, "_softmax(*x, axis, widened)")),
        (
            *(1, _draw_input, (0.4, "_log_softmax_backward_data(*y, y, axis, dtype)")),
            (0.6, "_softmax_backward_data(*y, y_unit, axis, dtype)"),
        ),
        # As the plain form of attention takes it: rows that are masked out altogether give zeros.
        (0.1, lambda draw: {"x": TensorArg(_draw_scores(draw), draw.floating())}, "_safe_softmax(*x, -1)"),
    ),
    weight=3.5,
    rules={
        **dict.fromkeys(("_softmax", "_log_softmax"), of_contiguous(_forward, 0)),
        "_softmax_backward_data": of_contiguous(_backward, 0, 1),
        "_log_softmax_backward_data": of_contiguous(_logarithmic_backward, 0, 1),
        "_safe_softmax": of_contiguous(_safe, 0),
    },
)
