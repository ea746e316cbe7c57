"""Layer, batch, group and RMS norm, forward and backward, as CUDA eager mode dispatches them.

Batch norm goes to cuDNN for images in single precision and float16, to PyTorch's own kernels for bfloat16 and for rows.
"""

from __future__ import annotations

import math

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import (
    HALVES,
    SEQUENCES,
    USUAL_BYTES,
    Rng,
    Shape,
    chance,
    channels_last,
    floating,
    log_int,
    mixture,
    pick,
    size,
    tokens,
    width,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Gpu, GpuCall, Launch, Operand, Rules, by_op, fresh, hot
from steptime._models.kernels.launches.arguments import integer, integers, tensor
from steptime._models.kernels.launches.batch_norm import BATCH_NORM
from steptime._models.kernels.launches.names import STRIDED
from steptime._models.kernels.launches.pointwise import pointwise
from steptime._models.kernels.launches.reduce import reduction
from steptime.errors import InputError

_MOST_ELEMENTS = USUAL_BYTES // 4
_BATCH_NORM_EPS = 1e-5
_MOMENTUM = 0.1


def _draw_rows(rng: Rng) -> tuple[Shape, int]:
    """The axes in front and the features of an activation that is normalised over its features."""
    features = width(rng, 16, 16384)
    front: Shape = (log_int(rng, 1, 64), pick(rng, SEQUENCES)) if chance(rng, 0.6) else (tokens(rng),)
    return (front, features) if math.prod(front) * features <= _MOST_ELEMENTS else ((log_int(rng, 1, 1024),), features)


def _draw_layer_norm(rng: Rng) -> Call:
    (front, features), dtype = _draw_rows(rng), floating(rng)
    weight = TensorArg((features,), dtype)
    return Call("aten::native_layer_norm.default", (TensorArg((*front, features), dtype), (features,), weight, weight, 1e-5))


def _draw_layer_norm_backward(rng: Rng) -> Call:
    (front, features), dtype = _draw_rows(rng), floating(rng)
    x, weight = TensorArg((*front, features), dtype), TensorArg((features,), dtype)
    mean, rstd = TensorArg((*front, 1)), TensorArg((*front, 1), values="positive")
    arguments = (x, x, (features,), mean, rstd, weight, weight, (True, True, True))
    return Call("aten::native_layer_norm_backward.default", arguments)


def _draw_rms_norm(rng: Rng) -> Call:
    (front, features), dtype = _draw_rows(rng), floating(rng)
    arguments = (TensorArg((*front, features), dtype), (features,), TensorArg((features,), dtype), 1e-6)
    return Call("aten::_fused_rms_norm.default", arguments)


def _draw_rms_norm_backward(rng: Rng) -> Call:
    (front, features), dtype = _draw_rows(rng), floating(rng)
    x, rstd = TensorArg((*front, features), dtype), TensorArg((*front, 1), values="positive")
    arguments = (x, x, (features,), rstd, TensorArg((features,), dtype), (True, True))
    return Call("aten::_fused_rms_norm_backward.default", arguments)


def _draw_images(rng: Rng) -> Shape:
    """Shapes behind the convolutions of ResNet and Inception, and others."""
    side = pick(rng, (7, 8, 14, 17, 28, 35, 56, 73, 112)) if chance(rng, 0.8) else log_int(rng, 4, 147)
    channels = pick(rng, (64, 128, 192, 256, 320, 384, 512, 768, 1024, 2048)) if chance(rng, 0.6) else size(rng, 8, 2048)
    most = max(1, _MOST_ELEMENTS // (channels * side * side))
    return log_int(rng, 1, min(256, most)), channels, side, side


def _statistics(channels: int) -> tuple[TensorArg, TensorArg]:
    """Running or saved mean and variance."""
    return TensorArg((channels,)), TensorArg((channels,), values="positive")


def _draw_cudnn_batch_norm(rng: Rng) -> Call:
    shape, dtype = _draw_images(rng), pick(rng, ("float32", "float16"), (0.7, 0.3))
    x = channels_last(shape, dtype) if chance(rng, 0.4) else TensorArg(shape, dtype)
    weight = TensorArg((shape[1],))
    arguments = (x, weight, weight, *_statistics(shape[1]), True, _MOMENTUM, _BATCH_NORM_EPS)
    return Call("aten::cudnn_batch_norm.default", arguments)


def _draw_cudnn_batch_norm_backward(rng: Rng) -> Call:
    """N, C, H, W in this order of memory only: cuDNN then reserves nothing that its backward has to be given."""
    shape, dtype = _draw_images(rng), pick(rng, ("float32", "float16"), (0.7, 0.3))
    x, weight, reserved = TensorArg(shape, dtype), TensorArg((shape[1],)), TensorArg((0,), "uint8", high=2)
    arguments = (x, x, weight, *_statistics(shape[1]), *_statistics(shape[1]), _BATCH_NORM_EPS, reserved)
    return Call("aten::cudnn_batch_norm_backward.default", arguments, written=(1,))


def _draw_native_input(rng: Rng) -> tuple[TensorArg, str]:
    """The input and the dtype of weights and statistics: autocast leaves those in single precision."""
    if chance(rng, 0.4):
        dtype = floating(rng)
        features = size(rng, 8, 8192)
        return TensorArg((log_int(rng, 16, min(65536, _MOST_ELEMENTS // features)), features), dtype), "float32"
    shape, dtype = _draw_images(rng), pick(rng, HALVES, (0.8, 0.2))
    x = channels_last(shape, dtype) if chance(rng, 0.5) else TensorArg(shape, dtype)
    return x, "float32" if chance(rng, 0.7) else dtype


def _draw_native_batch_norm(rng: Rng) -> Call:
    x, parameters = _draw_native_input(rng)
    weight = TensorArg((x.shape[1],), parameters)
    running = TensorArg((x.shape[1],), parameters), TensorArg((x.shape[1],), parameters, values="positive")
    return Call("aten::native_batch_norm.default", (x, weight, weight, *running, True, _MOMENTUM, _BATCH_NORM_EPS))


def _draw_native_batch_norm_backward(rng: Rng) -> Call:
    x, parameters = _draw_native_input(rng)
    weight = TensorArg((x.shape[1],), parameters)
    running = TensorArg((x.shape[1],), parameters), TensorArg((x.shape[1],), parameters, values="positive")
    arguments = (x, x, weight, *running, *_statistics(x.shape[1]), True, _BATCH_NORM_EPS, (True, True, True))
    return Call("aten::native_batch_norm_backward.default", arguments)


def _draw_groups(rng: Rng) -> tuple[TensorArg, int]:
    batch, channels, *image = _draw_images(rng)
    groups = pick(rng, [count for count in (1, 8, 16, 32) if channels % count == 0])
    return TensorArg((batch, channels, *image), floating(rng)), groups


def _draw_group_norm(rng: Rng) -> Call:
    x, groups = _draw_groups(rng)
    batch, channels, *image = x.shape
    weight = TensorArg((channels,), x.dtype)
    return Call("aten::native_group_norm.default", (x, weight, weight, batch, channels, math.prod(image), groups, 1e-5))


def _draw_group_norm_backward(rng: Rng) -> Call:
    x, groups = _draw_groups(rng)
    batch, channels, *image = x.shape
    mean, rstd = TensorArg((batch, groups), x.dtype), TensorArg((batch, groups), x.dtype, values="positive")
    sizes = (batch, channels, math.prod(image), groups)
    arguments = (x, x, mean, rstd, TensorArg((channels,), x.dtype), *sizes, (True, True, True))
    return Call("aten::native_group_norm_backward.default", arguments)


# Launches of norms: layer, RMS and group norm; batch norm has rules of its own beside these.
# The grids are those of ATen's layer_norm_kernel.cu and group_norm_kernel.cu: a block per row, per 32 columns or per channel.

# Threads of a row: of the vectorised kernels (4 elements each), of moments, of the plain ones (ATen).
_VECTOR_THREADS, _MOMENT_THREADS, _THREADS, _WARP = 128, 512, 256, 32
_VECTOR = 4
# Rows that an SM works on at a time, as blocks of 128 threads.
_ROWS_OF_SM = 16
# Weight gradients: (rows below, rows that a block takes at once); ATen's choice, always 8 rows of a thread one after the other.
_ROWS_OF_BLOCK = ((64, 8), (128, 64), (256, 128))
_MOST_ROWS_OF_BLOCK, _ROWS_OF_THREAD = 256, 8
# Rows above which weight gradients are summed in parts where columns are few; parts of 32 rows, at most 32,768 blocks (ATen).
_PARTIAL_ROWS, _PART_ROWS, _MOST_PARTIAL_BLOCKS = 65_536, 32, 32_768
# Samples up to which the weight gradient of a group norm has a thread per channel (ATen).
_FEW_SAMPLES = 128


def _rows(x: Operand, call: Call, place: int) -> tuple[int, int]:
    """Rows, and the columns that are normalised together."""
    normalised = integers(call, place)
    if not normalised or x.shape[-len(normalised) :] != normalised or min(x.shape) <= 0:
        raise InputError(f"{call.op}: normalised shape {normalised} is not how the input {x.shape} ends")
    columns = math.prod(normalised)
    return x.numel // columns, columns


def _row_facts(rows: int, columns: int, gpu: Gpu) -> dict[str, float]:
    return {"rows": rows, "columns": columns, "waves": rows / gpu.sms, "aligned_8": columns % 8 == 0}


def _read_again(columns: int, gpu: Gpu, *operands: Operand) -> tuple[Operand, ...]:
    """What a row that is walked twice reads again from L2: all of it, where the rows of an SM do not fit its L1."""
    row_bytes = sum(columns * operand.item_bytes for operand in operands)
    return tuple(hot(operand.shape, operand.dtype, 0) for operand in operands) if row_bytes * _ROWS_OF_SM > gpu.l1_bytes else ()


def _by_row(
    kernel: str, reads: tuple[Operand, ...], writes: tuple[Operand, ...], rows: int, columns: int, threads: int, gpu: Gpu
) -> Launch:
    """A block per row whose threads walk along it."""
    grids = (
        (float(rows), float(columns)),
        (float(rows), 1.0),
        (float(rows), float(math.ceil(columns / threads))),
    )
    path = "warp" if threads == _WARP else ""
    return Launch(kernel, reads[0].numel, reads, writes, _row_facts(rows, columns, gpu), grids, path, reads[0].dtype)


def _layer_norm(call: GpuCall) -> list[Launch]:
    x = tensor(call, 0)
    rows, columns = _rows(x, call, 1)
    result = (fresh(x.shape, x.dtype),)
    if columns % _VECTOR == 0:
        return [_by_row("vectorized_layer_norm_kernel", (x,), result, rows, columns, _VECTOR * _VECTOR_THREADS, call.gpu)]
    again = (hot(x.shape, x.dtype, x.nbytes),)
    return [
        _by_row("RowwiseMomentsCUDAKernel", (x,), (), rows, columns, _MOMENT_THREADS, call.gpu),
        _by_row("LayerNormForwardCUDAKernel", again, result, rows, columns, _THREADS, call.gpu),
    ]


def _layer_norm_backward(weight_sums: int) -> Rules:
    """`weight_sums` is how many gradients are summed over rows: weight and bias, or weight alone."""

    def rules(call: GpuCall) -> list[Launch]:
        gradient, x = tensor(call, 0), tensor(call, 1)
        rows, columns = _rows(x, call, 2)
        vector = columns % _VECTOR == 0
        kernel = "layer_norm_grad_input_kernel" + ("_vectorized" if vector else "")
        threads = _VECTOR_THREADS * (_VECTOR if vector else 1)
        reads = (gradient, x, *_read_again(columns, call.gpu, gradient, x))
        first = _by_row(kernel, reads, (fresh(x.shape, x.dtype),), rows, columns, threads, call.gpu)
        return [first, *_weight_gradients(gradient, x, rows, columns, weight_sums, call.gpu)]

    return rules


def _weight_gradients(gradient: Operand, x: Operand, rows: int, columns: int, sums: int, gpu: Gpu) -> list[Launch]:
    """Sums over rows: a block per 32 columns, or many blocks and a sum of their parts where rows are many and columns few."""
    wide = math.ceil(columns / _WARP)
    parted = rows > _PARTIAL_ROWS and columns // _WARP < gpu.sms // 2
    if parted:
        parts = min(_MOST_PARTIAL_BLOCKS // wide, math.ceil(rows / _PART_ROWS))
        blocks, serial, share, path = wide * parts, math.ceil(rows / parts), _PART_ROWS, "parts"
    else:
        share = next((entry for below, entry in _ROWS_OF_BLOCK if rows < below), _MOST_ROWS_OF_BLOCK)
        parts, blocks, serial, path = 1, wide, _ROWS_OF_THREAD * math.ceil(rows / share), f"rows-{share}"
    ragged = rows % share != 0 or columns % _WARP != 0
    facts = _row_facts(rows, columns, gpu) | {"rows": serial, "ragged": ragged, "parts": parts}
    again = tuple(hot(item.shape, item.dtype, 3 * x.nbytes) for item in (gradient, x))
    grids = ((float(blocks), float(serial)), (float(blocks), 1.0), (x.numel / 1024, 1.0))
    results = [Launch("GammaBetaBackwardCUDAKernelTemplate", x.numel, again, (), facts, grids, path, x.dtype)]
    if parted:
        partial = hot((parts, columns), x.dtype, 1)
        for _ in range(sums):
            results += reduction(partial, (0,), gpu, tag="partial")
    return results


def _groups(call: Call, x: Operand, place: int) -> tuple[int, int, int, int]:
    """Samples, channels, elements of a channel, groups."""
    samples, channels, plane, groups = (integer(call, place + offset) for offset in range(4))
    if samples * channels * plane != x.numel or groups <= 0 or channels % groups:
        raise InputError(f"{call.op}: {samples} x {channels} x {plane} in {groups} groups is not the input {x.shape}")
    return samples, channels, plane, groups


def _group_facts(samples: int, channels: int, plane: int, groups: int, gpu: Gpu) -> dict[str, float]:
    return {
        "rows": samples * groups,
        "columns": channels * plane // groups,
        "samples": samples,
        "plane": plane,
        "channels": channels,
        "groups": groups,
        "waves": samples * groups / gpu.sms,
    }


def _group_norm(call: GpuCall) -> list[Launch]:
    x = tensor(call, 0)
    samples, channels, plane, groups = sizes = _groups(call, x, 3)
    facts = _group_facts(*sizes, call.gpu)
    rows, columns = samples * groups, channels * plane // groups
    each = fresh((samples, channels, 1), x.dtype)
    shape = (samples, channels, plane)
    planes = pointwise((hot(shape, x.dtype, x.nbytes), each, each), fresh(shape, x.dtype), tag=x.dtype)
    return [
        _by_row("RowwiseMomentsCUDAKernel", (x,), (), rows, columns, _group_threads(columns), call.gpu),
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


def _group_norm_backward(call: GpuCall) -> list[Launch]:
    gradient, x = tensor(call, 0), tensor(call, 1)
    samples, channels, plane, groups = sizes = _groups(call, x, 5)
    facts = _group_facts(*sizes, call.gpu)
    in_group = channels // groups
    small = pointwise(
        (fresh((samples, groups, 1), x.dtype), fresh((1, groups, in_group), x.dtype)),
        fresh((samples, groups, in_group), "float32"),
        tag=x.dtype,
        kernel=STRIDED,
    )
    shape, each = (samples, channels, plane), fresh((samples, channels, 1), "float32")
    again = tuple(hot(shape, item.dtype, 2 * x.nbytes) for item in (gradient, x))
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


_RULES: dict[str, Rules] = {
    "aten::native_layer_norm.default": _layer_norm,
    "aten::_fused_rms_norm.default": _layer_norm,
    "aten::native_layer_norm_backward.default": _layer_norm_backward(2),
    "aten::_fused_rms_norm_backward.default": _layer_norm_backward(1),
    "aten::native_group_norm.default": _group_norm,
    "aten::native_group_norm_backward.default": _group_norm_backward,
    **BATCH_NORM,
}


FAMILY = Family(
    name="norm",
    ops=(
        *("aten::native_layer_norm.default", "aten::native_layer_norm_backward.default"),
        *("aten::_fused_rms_norm.default", "aten::_fused_rms_norm_backward.default"),
        *("aten::cudnn_batch_norm.default", "aten::cudnn_batch_norm_backward.default"),
        *("aten::native_batch_norm.default", "aten::native_batch_norm_backward.default"),
        *("aten::native_group_norm.default", "aten::native_group_norm_backward.default"),
    ),
    sweep=mixture(
        *((1.5, _draw_layer_norm), (1.5, _draw_layer_norm_backward), (0.8, _draw_rms_norm)),
        *((0.8, _draw_rms_norm_backward), (1, _draw_cudnn_batch_norm), (1, _draw_cudnn_batch_norm_backward)),
        *((1, _draw_native_batch_norm), (1, _draw_native_batch_norm_backward), (0.6, _draw_group_norm)),
        (0.6, _draw_group_norm_backward),
    ),
    weight=8.0,
    rules=by_op(_RULES),
)
