"""Launches of norms: layer, RMS and group norm; batch norm has rules of its own beside these.

The grids are those of ATen's layer_norm_kernel.cu and group_norm_kernel.cu: a block per row, per 32 columns or per channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from steptime._models.kernels.call import Call
from steptime._models.kernels.launches import Launch, Operand, fresh, hot
from steptime._models.kernels.launches.arguments import integer, integers, tensor
from steptime._models.kernels.launches.batch_norm import BATCH_NORM
from steptime._models.kernels.launches.names import STRIDED
from steptime._models.kernels.launches.pointwise import pointwise
from steptime._models.kernels.launches.reduce import SMS, reduction
from steptime.errors import InputError

# Threads of a row: of the vectorised kernels (4 elements each), of moments, of the plain ones (ATen).
_VECTOR_THREADS, _MOMENT_THREADS, _THREADS, _WARP = 128, 512, 256, 32
_VECTOR = 4
# Rows that an SM works on at a time, as blocks of 128 threads, and what an H100's or H200's SM has of L1 (datasheet).
_ROWS_OF_SM, _L1_BYTES = 16, 256 << 10
# Weight gradients: (rows below, rows that a block takes at once); ATen's choice, always 8 rows of a thread one after the other.
_ROWS_OF_BLOCK = ((64, 8), (128, 64), (256, 128))
_MOST_ROWS_OF_BLOCK, _ROWS_OF_THREAD = 256, 8
# Rows above which weight gradients are summed in parts where columns are few; parts of 32 rows, at most 32,768 blocks (ATen).
_PARTIAL_ROWS, _PART_ROWS, _MOST_PARTIAL_BLOCKS = 65_536, 32, 32_768
# Samples up to which the weight gradient of a group norm has a thread per channel (ATen).
_FEW_SAMPLES = 128


def launches(call: Call) -> list[Launch]:
    """What a norm launches."""
    rules = _RULES.get(call.op)
    if rules is None:
        raise InputError(f"{call.op}: not an op of the family norm")
    return rules(call)


def _rows(x: Operand, call: Call, place: int) -> tuple[int, int]:
    """Rows, and the columns that are normalised together."""
    normalised = integers(call, place)
    if not normalised or x.shape[-len(normalised) :] != normalised or min(x.shape) <= 0:
        raise InputError(f"{call.op}: normalised shape {normalised} is not how the input {x.shape} ends")
    columns = math.prod(normalised)
    return x.numel // columns, columns


def _row_facts(rows: int, columns: int) -> dict[str, float]:
    return {"rows": rows, "columns": columns, "waves": rows / SMS, "aligned_8": columns % 8 == 0}


def _read_again(columns: int, *operands: Operand) -> tuple[Operand, ...]:
    """What a row that is walked twice reads again from L2: all of it, where the rows of an SM do not fit its L1."""
    row_bytes = sum(columns * one.item_bytes for one in operands)
    return tuple(hot(one.shape, one.dtype, 0) for one in operands) if row_bytes * _ROWS_OF_SM > _L1_BYTES else ()


def _by_row(
    kernel: str, reads: tuple[Operand, ...], writes: tuple[Operand, ...], rows: int, columns: int, threads: int
) -> Launch:
    """A block per row whose threads walk along it."""
    grids = (
        (float(rows), float(columns)),
        (float(rows), 1.0),
        (float(rows), float(math.ceil(columns / threads))),
    )
    path = "warp" if threads == _WARP else ""
    return Launch(kernel, reads[0].numel, reads, writes, _row_facts(rows, columns), grids, path, reads[0].dtype)


def _layer_norm(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    rows, columns = _rows(x, call, 1)
    result = (fresh(x.shape, x.dtype),)
    if columns % _VECTOR == 0:
        return [_by_row("vectorized_layer_norm_kernel", (x,), result, rows, columns, _VECTOR * _VECTOR_THREADS)]
    again = (hot(x.shape, x.dtype, x.nbytes),)
    return [
        _by_row("RowwiseMomentsCUDAKernel", (x,), (), rows, columns, _MOMENT_THREADS),
        _by_row("LayerNormForwardCUDAKernel", again, result, rows, columns, _THREADS),
    ]


def _layer_norm_backward(weight_sums: int) -> Callable[[Call], list[Launch]]:
    """`weight_sums` is how many gradients are summed over rows: weight and bias, or weight alone."""

    def rules(call: Call) -> list[Launch]:
        gradient, x = tensor(call, 0), tensor(call, 1)
        rows, columns = _rows(x, call, 2)
        vector = columns % _VECTOR == 0
        kernel = "layer_norm_grad_input_kernel" + ("_vectorized" if vector else "")
        threads = _VECTOR_THREADS * (_VECTOR if vector else 1)
        reads = (gradient, x, *_read_again(columns, gradient, x))
        first = _by_row(kernel, reads, (fresh(x.shape, x.dtype),), rows, columns, threads)
        return [first, *_weight_gradients(gradient, x, rows, columns, weight_sums)]

    return rules


def _weight_gradients(gradient: Operand, x: Operand, rows: int, columns: int, sums: int) -> list[Launch]:
    """Sums over rows: a block per 32 columns, or many blocks and a sum of their parts where rows are many and columns few."""
    wide = math.ceil(columns / _WARP)
    parted = rows > _PARTIAL_ROWS and columns // _WARP < SMS // 2
    if parted:
        parts = min(_MOST_PARTIAL_BLOCKS // wide, math.ceil(rows / _PART_ROWS))
        blocks, serial, share, path = wide * parts, math.ceil(rows / parts), _PART_ROWS, "parts"
    else:
        share = next((own for below, own in _ROWS_OF_BLOCK if rows < below), _MOST_ROWS_OF_BLOCK)
        parts, blocks, serial, path = 1, wide, _ROWS_OF_THREAD * math.ceil(rows / share), f"rows-{share}"
    ragged = rows % share != 0 or columns % _WARP != 0
    facts = _row_facts(rows, columns) | {"rows": serial, "ragged": ragged, "parts": parts}
    again = tuple(hot(one.shape, one.dtype, 3 * x.nbytes) for one in (gradient, x))
    grids = ((float(blocks), float(serial)), (float(blocks), 1.0), (x.numel / 1024, 1.0))
    found = [Launch("GammaBetaBackwardCUDAKernelTemplate", x.numel, again, (), facts, grids, path, x.dtype)]
    if parted:
        partial = hot((parts, columns), x.dtype, 1)
        for _ in range(sums):
            found += reduction(partial, (0,), tag="partial")
    return found


def _groups(call: Call, x: Operand, place: int) -> tuple[int, int, int, int]:
    """Samples, channels, elements of a channel, groups."""
    samples, channels, plane, groups = (integer(call, place + offset) for offset in range(4))
    if samples * channels * plane != x.numel or groups <= 0 or channels % groups:
        raise InputError(f"{call.op}: {samples} x {channels} x {plane} in {groups} groups is not the input {x.shape}")
    return samples, channels, plane, groups


def _group_facts(samples: int, channels: int, plane: int, groups: int) -> dict[str, float]:
    return {
        "rows": samples * groups,
        "columns": channels * plane // groups,
        "samples": samples,
        "plane": plane,
        "channels": channels,
        "groups": groups,
        "waves": samples * groups / SMS,
    }


def _group_norm(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    samples, channels, plane, groups = sizes = _groups(call, x, 3)
    facts = _group_facts(*sizes)
    rows, columns = samples * groups, channels * plane // groups
    each = fresh((samples, channels, 1), x.dtype)
    shape = (samples, channels, plane)
    planes = pointwise((hot(shape, x.dtype, x.nbytes), each, each), fresh(shape, x.dtype), tag=x.dtype)
    return [
        _by_row("RowwiseMomentsCUDAKernel", (x,), (), rows, columns, _group_threads(columns)),
        _parameters("ComputeFusedParamsCUDAKernel", x, facts, samples, channels, groups),
        planes,
    ]


def _group_threads(length: int) -> int:
    """Threads that walk along one group or channel (ATen)."""
    return _WARP if length < _MOMENT_THREADS else _MOMENT_THREADS


def _parameters(kernel: str, x: Operand, facts: dict[str, float], samples: int, channels: int, groups: int) -> Launch:
    """Scale and shift of every sample and channel."""
    grids = ((float(samples * groups), channels / groups), (samples * channels / _THREADS, 1.0))
    return Launch(kernel, samples * channels, (), (), facts, grids, "", x.dtype)


def _group_norm_backward(call: Call) -> list[Launch]:
    gradient, x = tensor(call, 0), tensor(call, 1)
    samples, channels, plane, groups = sizes = _groups(call, x, 5)
    facts = _group_facts(*sizes)
    in_group = channels // groups
    small = pointwise(
        (fresh((samples, groups, 1), x.dtype), fresh((1, groups, in_group), x.dtype)),
        fresh((samples, groups, in_group), "float32"),
        tag=x.dtype,
        kernel=STRIDED,
    )
    shape, each = (samples, channels, plane), fresh((samples, channels, 1), "float32")
    again = tuple(hot(shape, one.dtype, 2 * x.nbytes) for one in (gradient, x))
    planes = pointwise((*again, each, each), fresh(shape, x.dtype), tag=x.dtype, kernel=STRIDED)
    return [
        _plane_sums(gradient, x, facts, samples * channels, plane),
        small,
        _parameters("ComputeBackwardFusedParamsCUDAKernel", x, facts, samples, channels, groups),
        planes,
        _group_weights(x, facts, samples, channels),
    ]


def _plane_sums(gradient: Operand, x: Operand, facts: dict[str, float], planes: int, plane: int) -> Launch:
    serial = math.ceil(plane / _group_threads(plane))
    grids = ((float(planes), float(plane)), (float(planes), 1.0), (float(planes), float(serial)))
    path = "warp" if plane < _MOMENT_THREADS else "block"
    return Launch("ComputeInternalGradientsCUDAKernel", x.numel, (gradient, x), (), facts, grids, path, x.dtype)


def _group_weights(x: Operand, facts: dict[str, float], samples: int, channels: int) -> Launch:
    kernel = "GammaBetaBackwardCUDAKernel" + ("1" if samples <= _FEW_SAMPLES else "2")
    grids = ((channels / _THREADS, float(samples)), (channels / _WARP, float(samples)))
    return Launch(kernel, samples * channels, (), (), facts, grids, "", x.dtype)


_RULES: dict[str, Callable[[Call], list[Launch]]] = {
    "aten::native_layer_norm.default": _layer_norm,
    "aten::_fused_rms_norm.default": _layer_norm,
    "aten::native_layer_norm_backward.default": _layer_norm_backward(2),
    "aten::_fused_rms_norm_backward.default": _layer_norm_backward(1),
    "aten::native_group_norm.default": _group_norm,
    "aten::native_group_norm_backward.default": _group_norm_backward,
    **BATCH_NORM,
}
