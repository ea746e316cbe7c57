"""Layer, batch, group and RMS norm, forward and backward, as CUDA eager mode dispatches them.

Batch norm goes to cuDNN for images in single precision and float16, to PyTorch's own kernels for bfloat16 and for rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from steptime._models.kernels.call import Argument, TensorArg, contiguous
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import DEFAULTS, HOT, STRIDED, Gpu, GpuCall, Launch, Operand, floor_power, fresh, hot
from steptime._models.kernels.launches.iterator import cleared, memset, of_contiguous, pointwise, reduction
from steptime._models.kernels.sweep import HALVES, SEQUENCES, USUAL_ELEMENTS, Draw, Drawn, KernelSweep, Shape
from steptime.errors import InputError


def _draw_rows(draw: Draw) -> Drawn:
    """An activation that is normalised over its features."""
    features = draw.width(16, 16384)
    front: Shape = (draw.log_int(1, 64), draw.pick(SEQUENCES)) if draw.chance(0.6) else (draw.tokens(),)
    if math.prod(front) * features > USUAL_ELEMENTS:
        front = (draw.log_int(1, 1024),)
    dtype = draw.floating()
    return {
        "x": TensorArg((*front, features), dtype),
        "features": features,
        "weight": TensorArg((features,), dtype),
        "mean": TensorArg((*front, 1)),
        "rstd": TensorArg((*front, 1), values="positive"),
    }


def _draw_images(draw: Draw) -> Shape:
    """Shapes behind the convolutions of ResNet and Inception, and others."""
    side = draw.pick((7, 8, 14, 17, 28, 35, 56, 73, 112)) if draw.chance(0.8) else draw.log_int(4, 147)
    named = (64, 128, 192, 256, 320, 384, 512, 768, 1024, 2048)
    channels = draw.pick(named) if draw.chance(0.6) else draw.size(8, 2048)
    most = max(1, USUAL_ELEMENTS // (channels * side * side))
    return draw.log_int(1, min(256, most)), channels, side, side


def _batch_norm(x: TensorArg, dtype: str) -> dict[str, Argument]:
    """The input and, by channel, weights and running statistics of a dtype, and the statistics that the forward saves."""
    channels = x.shape[1:2]
    return {
        "x": x,
        "weight": TensorArg(channels, dtype),
        "running_mean": TensorArg(channels, dtype),
        "running_variance": TensorArg(channels, dtype, values="positive"),
        "mean": TensorArg(channels),
        "rstd": TensorArg(channels, values="positive"),
    }


def _draw_cudnn(draw: Draw) -> Drawn:
    """Backward N, C, H, W in this order of memory only: cuDNN then reserves nothing that its backward has to be given."""
    x = TensorArg(_draw_images(draw), draw.pick(("float32", "float16"), (0.7, 0.3)))
    x = x.channels_last() if "backward" not in draw.form() and draw.chance(0.4) else x
    return _batch_norm(x, "float32") | {"reserved": TensorArg((0,), "uint8", high=2)}


def _draw_native(draw: Draw) -> Drawn:
    """Rows of features, or images; autocast leaves weights and statistics in single precision."""
    if draw.chance(0.4):
        dtype, features = draw.floating(), draw.size(8, 8192)
        return _batch_norm(TensorArg((draw.log_int(16, min(65536, USUAL_ELEMENTS // features)), features), dtype), "float32")
    x = TensorArg(_draw_images(draw), draw.pick(HALVES, (0.8, 0.2)))
    x = x.channels_last() if draw.chance(0.5) else x
    return _batch_norm(x, "float32" if draw.chance(0.7) else x.dtype)


def _draw_groups(draw: Draw) -> Drawn:
    batch, channels, *image = shape = _draw_images(draw)
    groups = draw.pick([count for count in (1, 8, 16, 32) if channels % count == 0])
    dtype = draw.floating()
    return {
        "x": TensorArg(shape, dtype),
        "weight": TensorArg((channels,), dtype),
        "mean": TensorArg((batch, groups), dtype),
        "rstd": TensorArg((batch, groups), dtype, values="positive"),
        "batch": batch,
        "channels": channels,
        "plane": math.prod(image),
        "groups": groups,
    }


# Launches of layer, RMS and group norm.
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


def _rows(x: Operand, call: GpuCall, position: int) -> tuple[int, int]:
    """Rows, and the columns that are normalised together."""
    normalised = call.integers(position)
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
    grids = ((rows, columns), (rows, 1.0), (rows, math.ceil(columns / threads)))
    path = "warp" if threads == _WARP else ""
    return Launch(kernel, reads[0].numel, reads, writes, _row_facts(rows, columns, gpu), grids, path, reads[0].dtype)


def norm_rows(kernel: str, reads: tuple[Operand, ...], writes: tuple[Operand, ...], columns: int, gpu: Gpu) -> Launch:
    """A vectorised kernel with a block per row."""
    return _by_row(kernel, reads, writes, reads[0].numel // columns, columns, _VECTOR * _VECTOR_THREADS, gpu)


def _layer_norm(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    rows, columns = _rows(x, call, 1)
    result = (fresh(x.shape, x.dtype),)
    if columns % _VECTOR == 0:
        return [_by_row("vectorized_layer_norm_kernel", (x,), result, rows, columns, _VECTOR * _VECTOR_THREADS, call.gpu)]
    again = (hot(x.shape, x.dtype, x.nbytes),)
    return [
        _by_row("RowwiseMomentsCUDAKernel", (x,), (), rows, columns, _MOMENT_THREADS, call.gpu),
        _by_row("LayerNormForwardCUDAKernel", again, result, rows, columns, _THREADS, call.gpu),
    ]


def _layer_norm_backward(call: GpuCall) -> list[Launch]:
    gradient, x = call.tensor(0), call.tensor(1)
    rows, columns = _rows(x, call, 2)
    vector = columns % _VECTOR == 0
    kernel = "layer_norm_grad_input_kernel" + ("_vectorized" if vector else "")
    threads = _VECTOR_THREADS * (_VECTOR if vector else 1)
    reads = (gradient, x, *_read_again(columns, call.gpu, gradient, x))
    first = _by_row(kernel, reads, (fresh(x.shape, x.dtype),), rows, columns, threads, call.gpu)
    # Summed over rows: the gradients of weight and bias, or of the weight alone, where there are any.
    rms = "rms" in call.name
    mask = call.value(5 if rms else 7)
    wanted = mask if isinstance(mask, list | tuple) else (True,) * (2 if rms else 3)
    sums = sum(map(bool, wanted[1:]))
    of_weights = _weight_gradients(gradient, x, rows, columns, sums, call.gpu) if sums else []
    return [*([first] if wanted[0] else []), *of_weights]


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
    grids = ((blocks, serial), (blocks, 1.0), (x.numel / 1024, 1.0))
    results = [Launch("GammaBetaBackwardCUDAKernelTemplate", x.numel, again, (), facts, grids, path, x.dtype)]
    if parted:
        partial = hot((parts, columns), x.dtype, 1)
        for _ in range(sums):
            results += reduction(partial, (0,), gpu, tag="partial")
    return results


def _group_norm(call: GpuCall) -> list[Launch]:
    """Sums over groups or channels, scale and shift of every sample and channel, and these applied to every element."""
    backward = call.name.endswith("_backward")
    gradient, x = call.tensor(0), call.tensor(1 if backward else 0)
    samples, channels, plane, groups = (call.integer((5 if backward else 3) + offset) for offset in range(4))
    if samples * channels * plane != x.numel or groups <= 0 or channels % groups:
        raise InputError(f"{call.op}: {samples} x {channels} x {plane} in {groups} groups is not the input {x.shape}")
    rows, in_group, shape = samples * groups, channels // groups, (samples, channels, plane)
    facts = {
        "rows": rows,
        "columns": channels * plane // groups,
        "samples": samples,
        "plane": plane,
        "channels": channels,
        "groups": groups,
        "waves": rows / call.gpu.sms,
    }
    by_channel = ((samples * channels / _THREADS, 1.0),)
    parameters = Launch("ComputeFusedParamsCUDAKernel", samples * channels, (), (), facts, by_channel, "", x.dtype)
    if plane == 1:
        return _group_norm_of_rows(call, facts)
    if not backward:
        columns, each = in_group * plane, fresh((samples, channels, 1), x.dtype)
        planes = pointwise((hot(shape, x.dtype, x.nbytes), each, each), fresh(shape, x.dtype), tag=x.dtype)
        return [_moments(x, rows, columns, call.gpu), parameters, planes]
    of_groups = (fresh((samples, groups, 1), x.dtype), fresh((1, groups, in_group), x.dtype))
    small = pointwise(of_groups, fresh((samples, groups, in_group), "float32"), tag=x.dtype, kernel=STRIDED)
    each = fresh((samples, channels, 1), "float32")
    again = tuple(hot(shape, item.dtype, 2 * x.nbytes) for item in (gradient, x))
    planes = pointwise((*again, each, each), fresh(shape, x.dtype), tag=x.dtype, kernel=STRIDED)
    summed = (hot((samples, channels), "float32", 8 * samples * channels),) * 2
    return [
        _plane_sums(gradient, x, facts, samples * channels, plane),
        small,
        _over_groups("ComputeBackwardFusedParamsCUDAKernel", summed, rows, in_group, call.gpu),
        planes,
        _group_weights(summed, facts, x.dtype),
    ]


def _over_groups(kernel: str, reads: tuple[Operand, ...], rows: int, columns: int, gpu: Gpu) -> Launch:
    """A block for every group of a sample: one warp, where a group has few columns."""
    return _by_row(kernel, reads, (), rows, columns, _WARP if columns < _MOMENT_THREADS else _MOMENT_THREADS, gpu)


def _moments(x: Operand, rows: int, columns: int, gpu: Gpu) -> Launch:
    return _over_groups("RowwiseMomentsCUDAKernel", (x,), rows, columns, gpu)


def _group_norm_of_rows(call: GpuCall, facts: dict[str, float]) -> list[Launch]:
    """Channels without a plane need no sums over it (GroupNorm1dForward, GroupNorm1dBackward): from the elements at once.

    What sums over groups and samples is the code of the kernels for planes, which read sums where these read elements.
    """
    backward = call.name.endswith("_backward")
    gradient, x = call.tensor(0), call.tensor(1 if backward else 0)
    samples, channels, groups = int(facts["samples"]), int(facts["channels"]), int(facts["groups"])
    shape = (samples, groups, channels // groups)
    of_rows, of_channels = fresh((samples, groups, 1), "float32"), fresh((1, *shape[1:]), x.dtype)
    again = tuple(hot(shape, item.dtype, 2 * x.nbytes) for item in ((gradient, x) if backward else (x,)))
    applied = pointwise((*again, *(of_rows,) * 2, of_channels), fresh(shape, x.dtype), tag=x.dtype, kernel=STRIDED)
    if not backward:
        return [_moments(x, samples * groups, shape[2], call.gpu), applied]
    sums = _over_groups("ComputeBackwardFusedParamsCUDAKernel", (gradient, x), samples * groups, shape[2], call.gpu)
    return [_of_rows(sums, "Compute"), applied, _of_rows(_group_weights(again, facts, x.dtype), "GammaBeta")]


def _of_rows(launch: Launch, begins: str) -> Launch:
    """A kernel for planes as the one for rows, whose name says so."""
    return replace(launch, kernel=launch.kernel.replace(begins, f"{begins}1d", 1), timed_as=launch.kernel)


def _plane_sums(gradient: Operand, x: Operand, facts: dict[str, float], planes: int, plane: int) -> Launch:
    threads, path = (_WARP, "warp") if plane < _MOMENT_THREADS else (_MOMENT_THREADS, "block")
    grids = ((planes, plane), (planes, 1.0), (planes, math.ceil(plane / threads)))
    return Launch("ComputeInternalGradientsCUDAKernel", x.numel, (gradient, x), (), facts, grids, path, x.dtype)


def _group_weights(reads: tuple[Operand, ...], facts: dict[str, float], dtype: str) -> Launch:
    """Gradients of weights: a thread walks over the samples of a channel, or a block over 32 samples of 32 channels at once."""
    samples, channels = int(facts["samples"]), facts["channels"]
    few = samples <= _FEW_SAMPLES
    blocks, steps = (channels / _THREADS, samples) if few else (channels / _WARP, math.ceil(samples / _WARP))
    facts = {**facts, "chain_ns": DEFAULTS["chain_ns"] * steps}
    kernel = f"GammaBetaBackwardCUDAKernel{1 if few else 2}"
    # Blocks are so few that all of them walk side by side.
    return Launch(kernel, samples * channels, reads, (), facts, ((1.0, steps), (blocks, 1.0)), "", dtype)


# Launches of batch norms: cuDNN's, a block per channel or all channels side by side, and ATen's own with its grids.

# Values of a channel that cuDNN keeps on chip, so that it reads them once. Seen in the measured rows: forward between 25,088
# and 31,974, backward between 13,475 and 15,484; in pairs of halves, for an even plane, forward between 74,240 and 81,920,
# backward between 40,960 and 45,056.
_KEPT_FORWARD, _KEPT_BACKWARD = (28_672, 77_824), (14_336, 43_008)
# ATen's batch norm: threads of a block; rows that a thread of a channels-last kernel takes at once, most blocks
# along rows and the fewest that are worth a second stage.
_CHANNEL_THREADS, _ROWS_AT_ONCE, _MOST_STAGED, _LEAST_STAGED = 512, 16, 128, 8
# ATen's normalising kernel: threads of a block at least, blocks at most.
_NORMALISING_THREADS, _NORMALISING_BLOCKS = 64, 262_144


class _NormImages(NamedTuple):
    samples: int
    channels: int
    plane: int  # elements of an image of one channel
    rows: int  # elements of a channel
    last: bool  # whether channels lie side by side
    solid: bool  # whether they do in volumes, for which ATen has fewer kernels
    gpu: Gpu
    facts: dict[str, float]


def _images(call: GpuCall, x: Operand) -> _NormImages:
    if len(x.shape) < 2 or x.numel == 0:
        raise InputError(f"{call.op}: input {x.shape} has no samples and channels")
    samples, channels, *image = x.shape
    plane, last = math.prod(image), x.strides[1] == 1 and x.strides != contiguous(x.shape)
    facts = {
        "rows": samples * plane,
        "columns": channels,
        "samples": samples,
        "plane": plane,
        "waves": channels / call.gpu.sms,
        "aligned_4": plane % 4 == 0,
        "aligned_8": plane % 8 == 0,
        "odd_channels": channels % 4 != 0,
        "last": last,
    }
    return _NormImages(samples, channels, plane, samples * plane, last, last and len(image) == 3, call.gpu, facts)


def _by_channel(
    kernel: str, reads: tuple[Operand, ...], writes: tuple[Operand, ...], images: _NormImages, serial: int, tag: str
) -> Launch:
    """A block per channel, whose threads go over it in so many steps."""
    channels = images.channels
    grids = ((channels, images.rows), (channels, images.samples), (channels, serial), (channels, 1.0))
    return Launch(kernel, reads[0].numel, reads, writes, images.facts, grids, "", tag)


def _cudnn_by_channel(
    kernel: str, otherwise: str, reads: tuple[Operand, ...], images: _NormImages, on_chip: tuple[int, int]
) -> Launch:
    """The kernel that reads once, if a channel fits, else the other one."""
    x = reads[0]
    pairs = x.dtype == "float16" and images.plane % 2 == 0
    once = images.rows <= on_chip[pairs]
    name = kernel + (("_1C11_singleread" + ("_spec" if pairs else "")) if once else otherwise)
    serial = images.samples * math.ceil(images.plane / _CHANNEL_THREADS)
    return _by_channel(name, reads, (fresh(x.shape, x.dtype),), images, serial, x.dtype)


def _cudnn_side_by_side(kernel: str, reads: tuple[Operand, ...], images: _NormImages) -> list[Launch]:
    """All channels side by side."""
    grids = (
        (images.channels / _WARP, images.rows / 128),
        (images.channels / 64, images.rows),
        (images.rows / 16 * max(1.0, images.channels / 128), 1.0),
    )
    x = reads[0]
    result = fresh(x.shape, x.dtype)
    return [memset(4 * images.channels), Launch(kernel, x.numel, reads, (result,), images.facts, grids, "", x.dtype)]


def _cudnn(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    images = _images(call, x)
    if images.last:
        return _cudnn_side_by_side("batchnorm_fwtr_nhwc_semiPersist", (x,), images)
    return [_cudnn_by_channel("bn_fw_tr", "_1C11_kernel_NCHW", (x,), images, _KEPT_FORWARD)]


def _cudnn_backward(call: GpuCall) -> list[Launch]:
    x, gradient = call.tensor(0), call.tensor(1)
    images = _images(call, x)
    if images.last:
        return _cudnn_side_by_side("batchnorm_bwtr_nhwc_semiPersist", (x, gradient), images)
    return [_cudnn_by_channel("bn_bw", "_1C11_kernel_new", (x, gradient), images, _KEPT_BACKWARD)]


def _channels_last(
    sums: str, applied: str, reads: tuple[Operand, ...], again: tuple[Operand, ...], images: _NormImages, tag: str
) -> list[Launch]:
    """Two kernels over rows of channels. Several blocks along rows meet at semaphores, which are zeroed first."""
    # ATen's grid: threads of a block across channels and along rows, blocks along rows and across channels.
    width = min(floor_power(images.channels), _WARP)
    height = min(floor_power(math.ceil(images.rows / _ROWS_AT_ONCE)), _CHANNEL_THREADS // width)
    if width * height != _CHANNEL_THREADS:
        width = min(floor_power(images.channels), _CHANNEL_THREADS // height)
    along = min(math.ceil(images.rows / (height * _ROWS_AT_ONCE)), _MOST_STAGED)
    along = along if along >= _LEAST_STAGED else 1
    blocks, path = math.ceil(images.channels / width) * along, "staged" if along > 1 else ""
    facts = images.facts | {"blocks": blocks, "along": along, "height": height}
    grids = (
        (blocks, images.rows / (height * along)),
        (blocks, 1.0),
        (images.rows / 16 * max(1.0, images.channels / 128), 1.0),
        (images.channels / _WARP, along),
    )
    elements, result = reads[0].numel, fresh(reads[-1].shape, reads[-1].dtype)
    return [
        *([cleared(fresh((blocks,), "int32"))] if along > 1 else []),
        Launch(sums, elements, reads, (), facts, grids, path, tag),
        Launch(applied, elements, again, (result,), facts, grids, path, tag),
    ]


def _width(elements: int) -> int:
    """Threads along a plane: the least of ATen's sizes that covers it."""
    return next((size for size in (32, 64, 128, 256) if elements <= size), _CHANNEL_THREADS)


def _by_plane(kernel: str, reads: tuple[Operand, ...], writes: tuple[Operand, ...], images: _NormImages, tag: str) -> Launch:
    """A block per channel: threads along the plane, and along samples where the plane leaves some."""
    width = _width(images.plane)
    serial = math.ceil(images.samples / (_CHANNEL_THREADS // width)) * math.ceil(images.plane / width)
    return _by_channel(kernel, reads, writes, images, serial, tag)


def _normalising(
    x: Operand,
    result: Operand,
    images: _NormImages,
    tag: str,
    more: tuple[Operand, ...] = (),
    kernel: str = "batch_norm_transform_input_kernel",
) -> Launch:
    width = max(_width(images.plane // 4), min(_width(images.plane), _NORMALISING_THREADS))
    height = max(1, _NORMALISING_THREADS // width)
    along = max(1, min(_NORMALISING_BLOCKS // images.channels, math.ceil(images.samples / height)))
    serial = math.ceil(images.samples / (height * along)) * math.ceil(images.plane / width)
    blocks = images.channels * along
    grids = (
        # Blocks are of 64 to 512 threads: so many SMs they fill.
        (blocks * width * height / images.gpu.threads_per_sm, serial),
        (blocks, serial),
        (images.channels, images.rows),
        (images.channels * images.samples, 1.0),
    )
    return Launch(kernel, x.numel, (x, *more), (result,), images.facts, grids, "", tag)


def _reduced(x: Operand, images: _NormImages, tag: str) -> list[Launch]:
    """Mean and variance of the channels of volumes that lie side by side: a reduction, of bfloat16 as single precision."""
    if x.dtype != "bfloat16":
        return reduction(x, (0, 2, 3, 4), images.gpu, outputs=2, tag=tag)
    wide = replace(hot(x.shape, "float32", 2 * x.nbytes), strides=x.strides)
    cast = pointwise((x,), replace(fresh(x.shape, "float32"), strides=x.strides), tag="bfloat16>float32", casts=True)
    return [cast, *reduction(wide, (0, 2, 3, 4), images.gpu, outputs=2, tag=tag)]


def _over_volumes(reads: tuple[Operand, ...], images: _NormImages, tag: str) -> Launch:
    """An element-wise kernel over volumes and a few numbers of each channel."""
    each = Operand((1, images.channels, 1, 1, 1), "float32", (images.channels, 1, 1, 1, 1))
    return pointwise((*reads, each, each, each), reads[-1], tag=tag, kernel=STRIDED)


def _statistics(x: Operand, images: _NormImages, tag: str) -> list[Launch]:
    """Mean and variance of every channel."""
    if images.last or images.plane == 1:
        return _channels_last(*_LAST_FORWARD, (x,), (x,), images, tag)[:-1]
    return [_by_plane(_COLLECTED, (x,), (), images, tag)]


def _applied(x: Operand, images: _NormImages, tag: str) -> Launch:
    """Every element normed with them."""
    if images.solid:
        return _over_volumes((x,), images, tag)
    if images.last or images.plane == 1:
        return _channels_last(*_LAST_FORWARD, (x,), (x,), images, tag)[-1]
    return _normalising(x, fresh(x.shape, x.dtype), images, tag)


_COLLECTED = "batch_norm_collect_statistics_kernel"
# For channels that lie side by side: what sums, and what goes over all elements.
_LAST_FORWARD = ("batch_norm_collect_statistics_channels_last_kernel", "batch_norm_transform_input_channels_last_kernel")
_LAST_BACKWARD = ("batch_norm_backward_reduce_channels_last_kernel", "batch_norm_backward_elemt_channels_last_kernel")


def _weight_dtype(call: GpuCall, place: int) -> str:
    """That of the weights, or of what is normalised where there are none."""
    weight = call.optional_tensor(place)
    return call.tensor(0).dtype if weight is None else weight.dtype


def _kept(call: GpuCall, images: _NormImages) -> Launch:
    """Means and variances into those that the layer keeps; where it keeps none, one over the root of variances."""
    kept = call.optional_tensor(3)
    if kept is None:
        variances = hot((images.channels,), "float32", 4 * images.channels)
        return pointwise((variances,), variances, tag="float32")
    return Launch(
        "unrolled_elementwise_kernel_for_multi_outputs",
        images.channels,
        facts={"columns": images.channels},
        grids=((images.channels / 1024, 1.0),),
        tag=kept.dtype,
    )


def _native(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    images, tag = _images(call, x), x.dtype + _weight_dtype(call, 1)
    again = replace(x, origin=HOT, since_bytes=x.nbytes)
    sums = _reduced(x, images, tag) if images.solid else _statistics(x, images, tag)
    return [*sums, _kept(call, images), _applied(again, images, tag)]


def _native_backward(call: GpuCall) -> list[Launch]:
    gradient, x = call.tensor(0), call.tensor(1)
    images, tag = _images(call, x), x.dtype + _weight_dtype(call, 2)
    if images.last or images.plane == 1:
        again = tuple(replace(item, origin=HOT, since_bytes=2 * x.nbytes) for item in (gradient, x))
        *sums, applied = _channels_last(*_LAST_BACKWARD, (gradient, x), again, images, tag)
        return [*sums, _over_volumes(again, images, tag) if images.solid else applied]
    return [_by_plane("batch_norm_backward_kernel", (gradient, x), (fresh(x.shape, x.dtype),), images, tag)]


# `nn.SyncBatchNorm` calls the halves of a batch norm one by one, with a collective between (native/cuda/Normalization.cu).
# Where channels do not lie side by side, those backward are kernels with the grids of those forward, and read one tensor more.


def _synchronized_forward(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    images, tag = _images(call, x), x.dtype + "float32"
    return [_applied(x, images, tag)] if call.name == "batch_norm_elemt" else _statistics(x, images, tag)


def _synchronized_backward(call: GpuCall) -> list[Launch]:
    gradient, x = call.tensor(0), call.tensor(1)
    images, tag, sums = _images(call, x), x.dtype + "float32", call.name == "batch_norm_backward_reduce"
    if images.last or images.plane == 1:
        *summed, applied = _channels_last(*_LAST_BACKWARD, (gradient, x), (gradient, x), images, tag)
        return summed if sums else [applied]
    if sums:
        return [_by_plane("batch_norm_backward_reduce_kernel", (gradient, x), (), images, tag)]
    return [_normalising(gradient, fresh(x.shape, x.dtype), images, tag, (x,), "batch_norm_backward_elemt_kernel")]


def _gathered(call: GpuCall) -> list[Launch]:
    """Statistics of all ranks summed up: a thread for every channel goes over the ranks."""
    means = call.tensor(1)
    ranks, channels = means.shape
    grids = ((channels / _CHANNEL_THREADS, ranks), (1.0, ranks))
    facts = {"rows": ranks, "columns": channels}
    reads, writes = (means, means), (fresh((channels,), means.dtype),) * 2
    return [Launch("batch_norm_reduce_statistics_kernel", means.numel, reads, writes, facts, grids, "", means.dtype)]


FAMILY = Family(
    name="norm",
    sweep=KernelSweep(
        (1.5, _draw_rows, "native_layer_norm(*x, [features], weight, weight, 1e-5)"),
        (1.5, _draw_rows, "native_layer_norm_backward(*x, x, [features], mean, rstd, weight, weight, [True, True, True])"),
        (0.8, _draw_rows, "_fused_rms_norm(*x, [features], weight, 1e-6)"),
        (0.8, _draw_rows, "_fused_rms_norm_backward(*x, x, [features], rstd, weight, [True, True])"),
        (1, _draw_cudnn, "cudnn_batch_norm(*x, weight, weight, running_mean, running_variance, True, 0.1, 1e-5)"),
        (
            *(1, _draw_cudnn),
            "cudnn_batch_norm_backward(x, *x, weight, running_mean, running_variance, mean, rstd, 1e-5, reserved)",
        ),
        (1, _draw_native, "native_batch_norm(*x, weight, weight, running_mean, running_variance, True, 0.1, 1e-5)"),
        (
            *(1, _draw_native),
            "native_batch_norm_backward"
            "(*x, x, weight, running_mean, running_variance, mean, rstd, True, 1e-5, [True, True, True])",
        ),
        (0.6, _draw_groups, "native_group_norm(*x, weight, weight, batch, channels, plane, groups, 1e-5)"),
        (
            *(0.6, _draw_groups),
            "native_group_norm_backward(*x, x, mean, rstd, weight, batch, channels, plane, groups, [True, True, True])",
        ),
    ),
    weight=8.0,
    rules={
        **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), of_contiguous(_layer_norm, 0)),
        **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), of_contiguous(_layer_norm_backward, 0, 1)),
        **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), _group_norm),
        "cudnn_batch_norm": _cudnn,
        "cudnn_batch_norm_backward": _cudnn_backward,
        "native_batch_norm": _native,
        "native_batch_norm_backward": _native_backward,
        **dict.fromkeys(("batch_norm_stats", "batch_norm_elemt"), _synchronized_forward),
        **dict.fromkeys(("batch_norm_backward_reduce", "batch_norm_backward_elemt"), _synchronized_backward),
        "batch_norm_gather_stats_with_counts": _gathered,
    },
    kin="""
        batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats_with_counts
        batch_norm_stats
    """,
)
