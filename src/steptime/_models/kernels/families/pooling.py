"""Pooling of images, forward and backward: maximum, average, adaptive average."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from steptime._models.kernels.call import TensorArg, contiguous
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import HOT, GpuCall, Grids, Launch, Operand, floor_power, fresh
from steptime._models.kernels.launches.iterator import cleared, copies, memcpy
from steptime._models.kernels.sweep import USUAL_ELEMENTS, Draw, Drawn, KernelSweep
from steptime.errors import InputError

# (window, stride, padding): ResNet's, Inception's two, and halving.
_WINDOWS = ((3, 2, 1), (3, 2, 0), (3, 1, 1), (2, 2, 0), (5, 3, 0))


def _draw_images(draw: Draw) -> tuple[TensorArg, bool]:
    """Images, and whether their channels lie side by side."""
    side = draw.pick((7, 8, 14, 17, 28, 35, 56, 71, 112, 147)) if draw.chance(0.8) else draw.log_int(7, 160)
    channels = draw.pick((64, 192, 288, 512, 768, 2048)) if draw.chance(0.6) else draw.size(8, 2048)
    batch = draw.log_int(1, max(1, min(256, USUAL_ELEMENTS // (channels * side * side))))
    return TensorArg((batch, channels, side, side), draw.floating()), draw.chance(0.35)


def _drawn(x: TensorArg, last: bool, side: int) -> dict[str, TensorArg]:
    """Images, those they become, of another side, and the place of each maximum in its plane."""
    y = TensorArg((*x.shape[:2], side, side), x.dtype)
    x, y = (x.channels_last(), y.channels_last()) if last else (x, y)
    return {"x": x, "y": y, "maxima": TensorArg(y.shape, "int64", y.strides, high=x.shape[2] ** 2)}


def _draw_windows(draw: Draw) -> Drawn:
    (x, last), (window, stride, padding) = _draw_images(draw), draw.pick(_WINDOWS)
    side = (x.shape[2] + 2 * padding - window) // stride + 1
    return _drawn(x, last, side) | {"window": (window,) * 2, "stride": (stride,) * 2, "padding": (padding,) * 2}


def _draw_adaptive(draw: Draw) -> Drawn:
    (x, last), side = _draw_images(draw), draw.pick((1, 2, 3, 6, 7))
    return _drawn(x, last, side) | {"side": side}


# How pooling kernels divide their work: a thread per output, or tiles of threads where channels lie side by side.

_THREADS, _WARP, _SECTOR_BYTES = 256, 32, 32
# Channels-last grids: threads of a block, pixels of a thread along each side. Those that explain the measured times best:
# forward as in ATen, backward of the maximum, backward of adaptive means.
_FORWARD = ((1024, 2), (512, 2))
_BACKWARD = ((256, 16), (256, 8), (1024, 2))
_SPREAD = ((1024, 2), (512, 4))


class _Pooling(NamedTuple):
    samples: int
    channels: int
    side: tuple[int, int]  # of the input
    result: tuple[int, int]  # sides of the output
    planes: int  # images of one channel
    inputs: int  # elements of an input plane
    outputs: int  # elements of an output plane
    cell: float  # inputs for each output
    taps: int  # elements of a window
    overlap: float  # windows that an input lies in, at least one
    last: bool  # whether channels lie side by side
    item_bytes: int
    facts: dict[str, float]


def _threads(pool: _Pooling) -> Grids:
    """A thread per output walks its window."""
    blocks = pool.planes * pool.outputs / _THREADS
    return ((blocks, pool.taps), (blocks, 1.0))


def _threads_backward(pool: _Pooling) -> Grids:
    """A thread per input meets the windows that it lies in."""
    blocks = pool.planes * pool.inputs / _THREADS
    return ((blocks, pool.overlap), (blocks, 1.0), (pool.inputs / _THREADS, pool.planes))


def _longest(length: int, result: int) -> int:
    """The longest stretch of `length` that becomes one of `result`: they overlap where it does not divide."""
    return max(-(-(place + 1) * length // result) - place * length // result for place in range(result))


def _adaptive_threads(pool: _Pooling) -> Grids:
    """A block of 32 x 8 threads per plane, several where channels are few; a thread per output walks its cell row by row."""
    high, wide = (_longest(pool.side[axis], pool.result[axis]) for axis in (0, 1))
    spread = max(1, 16 // pool.channels)
    passes = math.ceil(pool.result[1] / _WARP) * math.ceil(pool.result[0] / (8 * spread))
    blocks, sectors = pool.planes * spread, high * math.ceil(wide * pool.item_bytes / _SECTOR_BYTES)
    return ((blocks, sectors * passes), (pool.planes * pool.result[0], high), (blocks, pool.cell), (pool.planes, pool.inputs))


def _adaptive_threads_backward(pool: _Pooling) -> Grids:
    """The same threads add to every input of their cells."""
    planes = pool.planes
    return (
        (planes * max(1.0, pool.outputs / _THREADS), pool.cell),
        (planes, pool.inputs / _THREADS),
        (planes * pool.outputs / _THREADS, pool.cell),
    )


def _average_tiles(pool: _Pooling) -> Grids:
    """Channels-last means, forward and backward: several ways in which threads may share samples, channels and pixels."""
    samples, lanes = pool.samples, pool.samples * pool.channels / _WARP
    return (
        (samples, pool.outputs * pool.taps),
        (samples * pool.outputs, pool.taps),
        (lanes, pool.outputs),
        (lanes, pool.inputs),
        (samples, pool.inputs),
        (samples, pool.result[0] * pool.taps),
        (pool.planes * pool.outputs / 512, pool.taps),
        (lanes, pool.cell),
    )


def _tiles(
    pool: _Pooling, side: tuple[int, int], each: float, ways: tuple[tuple[int, int], ...], *, widened: bool = False
) -> Grids:
    """Channels-last kernels: tiles of threads over channels and both sides of the image, each with a few of every kind.

    `ways` are threads of a block at most and pixels of a thread along each side.
    """
    results = []
    for most, pixels in ways:
        blocks, serial = _tile(pool, side, most, pixels, widened)
        results.append((blocks, serial * each))
    blocks, serial = _tile(pool, side, *ways[0], widened)
    return (*results, (blocks, serial), (blocks, 1.0), (pool.planes * pool.inputs / 1024, 1.0))


def _tile(pool: _Pooling, side: tuple[int, int], most: int, pixels: int, widened: bool) -> tuple[float, float]:
    """Blocks, and how many channels times pixels a thread of one takes.

    `widened` says that threads which small sides leave over go along channels.
    """
    width = min(floor_power(pool.channels), _WARP)
    height = min(floor_power(side[1]), most // width)
    depth = max(1, min(floor_power(side[0]), most // width // height))
    if widened:
        width = min(floor_power(pool.channels), most // height // depth)
    groups = math.ceil(pool.channels / (width * 4))
    channels = math.ceil(pool.channels / (width * groups))
    across, down = math.ceil(side[1] / (height * pixels)), math.ceil(side[0] / (depth * pixels))
    serial = channels * math.ceil(side[1] / (across * height)) * math.ceil(side[0] / (down * depth))
    return pool.samples * groups * across * down, serial


# What pooling launches: the kernel where planes lie one by one, and the one where channels lie side by side.
_KERNELS: dict[str, tuple[tuple[str, Callable[[_Pooling], Grids]], tuple[str, Callable[[_Pooling], Grids]]]] = {
    "max_pool2d_with_indices": (
        ("max_pool_forward_nchw", _threads),
        ("max_pool_forward_nhwc", lambda pool: _tiles(pool, pool.result, pool.taps, _FORWARD)),
    ),
    "max_pool2d_with_indices_backward": (
        ("max_pool_backward_nchw", _threads_backward),
        ("max_pool_backward_nhwc", lambda pool: _tiles(pool, pool.side, pool.overlap, _BACKWARD)),
    ),
    "avg_pool2d": (("avg_pool2d_out_cuda_frame", _threads), ("avg_pool2d_out_cuda_frame_nhwc", _average_tiles)),
    "avg_pool2d_backward": (
        ("avg_pool2d_backward_out_cuda_frame", _threads_backward),
        ("avg_pool2d_backward_out_cuda_frame_nhwc", _average_tiles),
    ),
    "_adaptive_avg_pool2d": (
        ("adaptive_average_pool", _adaptive_threads),
        ("adaptive_average_pool_nhwc", lambda pool: _tiles(pool, pool.result, pool.cell, _FORWARD, widened=True)),
    ),
    "_adaptive_avg_pool2d_backward": (
        ("atomic_adaptive_average_gradinput", _adaptive_threads_backward),
        ("adaptive_average_gradinput_nhwc", lambda pool: _tiles(pool, pool.side, 1.0, _SPREAD)),
    ),
}


# A thread per output of volumes too.
_OF_VOLUMES = ("avg_pool3d", "avg_pool3d_backward", "max_pool3d_with_indices", "max_pool3d_with_indices_backward")
_KERNELS |= {name: _KERNELS[name.replace("3d", "2d")] for name in _OF_VOLUMES}


def _sizes(call: GpuCall, position: int, default: tuple[int, ...]) -> tuple[int, ...]:
    sizes = call.integers(position) or default
    return sizes if len(sizes) == len(default) else sizes[:1] * len(default)


def _folded(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Two sides of an image; of a volume, its depth and rows are one."""
    return math.prod(sizes[:-1]), sizes[-1]


def _places(length: int, window: int, stride: int, padding: int, *, rounded_up: bool) -> int:
    """Windows along one side; one that would start in the padding behind the input is left out (ATen)."""
    span = length + 2 * padding - window
    if not rounded_up:
        return span // stride + 1
    count = -(-span // stride) + 1
    return count - 1 if (count - 1) * stride >= length + padding else count


def _result(call: GpuCall, x: Operand, window: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Sides of what a forward call gives, by padding, dilation where windows can have it, and whether they are rounded up."""
    dilated, ones = "indices" in call.name, (1,) * len(window)
    padding, dilation = _sizes(call, 3, (0,) * len(window)), _sizes(call, 4, ones) if dilated else ones
    rounded_up = call.flag(5 if dilated else 4)
    each = zip(x.shape[2:], window, stride, padding, dilation, strict=True)
    return tuple(_places(side, far * (wide - 1) + 1, step, pad, rounded_up=rounded_up) for side, wide, step, pad, far in each)


def _pooling(call: GpuCall, x: Operand, gradient: Operand | None) -> _Pooling:
    """Input, window, stride and so on; a backward call has the gradient before these."""
    if any(len(images.shape) != (5 if "3d" in call.name else 4) for images in (x, gradient or x)):
        raise InputError(f"{call.op}: input {x.shape} or its gradient is no batch of images")
    first, sides = (1, None) if gradient is None else (2, gradient.shape[2:])
    ones = (1,) * len(x.shape[2:])
    if "adaptive" in call.name:
        # Windows that cover the input: as large as what they are reduced by, rounded up.
        result = sides or _sizes(call, first, ones)
        window = stride = tuple(math.ceil(side / max(1, out)) for side, out in zip(x.shape[2:], result, strict=True))
    else:
        window = _sizes(call, first, ones)
        stride = _sizes(call, first + 1, window)
        result = sides or (_result(call, x, window, stride) if min(stride) > 0 else (0, 0))
    if min(*x.shape, *result, *window, *stride) <= 0:
        raise InputError(
            f"{call.op}: input {x.shape} and output {result} with windows of {window} every {stride} cannot be pooled"
        )
    samples, channels = x.shape[:2]
    overlap = math.prod(max(1.0, wide / step) for wide, step in zip(window, stride, strict=True))
    side, result, window, stride = map(_folded, (x.shape[2:], result, window, stride))
    inputs, outputs, planes = math.prod(side), math.prod(result), samples * channels
    last = x.strides[1] == 1 and channels > 1 and x.strides != contiguous(x.shape)
    facts = {
        "plane": inputs,
        "result_plane": outputs,
        "planes": planes,
        "columns": channels,
        "samples": samples,
        "window": window[0],
        "stride": stride[0],
        "ratio": side[0] / result[0],
        "side": side[0],
        "result_side": result[0],
        "last": last,
    }
    return _Pooling(
        *(samples, channels, side, result, planes, inputs, outputs, inputs / outputs),
        *(window[0] * window[1], overlap, last, x.item_bytes, facts),
    )


def _forward(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    pool = _pooling(call, x, None)
    kernel, grids = _KERNELS[call.name][pool.last]
    dtypes = (x.dtype, "int64") if "indices" in call.name else (x.dtype,)
    writes = tuple(fresh((pool.samples, pool.channels, *pool.result), dtype) for dtype in dtypes)
    elements = x.numel if "adaptive" in call.name else pool.planes * pool.outputs
    return [Launch(kernel, elements, (x,), writes, pool.facts, grids(pool), "", x.dtype)]


def _unfolded(call: GpuCall) -> list[Launch]:
    """Sample after sample, a thread for every window of a channel, which it walks (ATen's Im2Col.cu).

    Padded images are copied first: so it was in 547 of 547 measured calls, and in none of 1,094 without padding.
    """
    x, (window, dilation, padding, stride) = call.tensor(0), (call.integers(position) for position in (1, 2, 3, 4))
    windows = replace(call, op="aten::max_pool2d_with_indices.default", args=(call.args[0], window, stride, padding, dilation))
    sample = replace(x, shape=(1, *x.shape[1:]))
    pool = _pooling(windows, sample, None)
    kept = fresh((pool.channels * pool.taps, pool.outputs), x.dtype)
    launch = Launch("im2col_kernel", pool.planes * pool.outputs, (sample,), (kept,), pool.facts, _threads(pool), "", x.dtype)
    copied = [memcpy(x, fresh(x.shape, x.dtype))] if any(padding) else []
    return [*copied, *[launch] * x.shape[0]]


def _windows_added(call: GpuCall) -> list[Launch]:
    """All samples at once, a thread for every element of the image, which adds up what windows hold of it.

    Where windows leave a rest of the image, columns are copied first (409 of 409 measured calls, and none of 1,344 others).
    """
    x, image = call.tensor(0), call.integers(1)
    window, dilation, padding, stride = (call.integers(position) for position in (2, 3, 4, 5))
    taps = math.prod(window)
    if len(x.shape) != 3 or len(image) != 2 or not taps or not math.prod(stride):
        raise InputError(f"{call.op}: {x.shape} are no columns of windows")
    result = fresh((x.shape[0], x.shape[1] // taps, *image), x.dtype)
    met = max(1.0, taps / math.prod(stride))  # windows that hold an element
    facts: dict[str, float] = {"columns": x.shape[2], "rows": x.shape[0], "size_0": taps, "reuse": met}
    grids = ((result.numel / 512, met), (result.numel / 512, 1.0))
    sides = zip(image, window, dilation, padding, stride, strict=True)
    rest = any((side + 2 * pad - apart * (tap - 1) - 1) % step for side, tap, apart, pad, step in sides)
    copied = [memcpy(x, fresh(x.shape, x.dtype))] if rest else []
    return [*copied, Launch("col2im_batched_kernel", result.numel, (x,), (result,), facts, grids, "", x.dtype)]


def _backward(call: GpuCall) -> list[Launch]:
    """A gradient with holes is copied first; where several outputs add to an input, it is zeroed."""
    gradient, x = call.tensor(0), call.tensor(1)
    launches: list[Launch] = []
    if not gradient.dense:
        dense = fresh(gradient.shape, gradient.dtype)
        launches, gradient = copies(dense, gradient), replace(dense, origin=HOT)
    pool = _pooling(call, x, gradient)
    kernel, grids = _KERNELS[call.name][pool.last]
    uneven = {"uneven": x.shape[2] % pool.result[0] != 0} if "adaptive" in call.name else {}
    facts, result = pool.facts | uneven, fresh(x.shape, x.dtype)
    reads = (gradient, call.tensor(7)) if "indices" in call.name else (gradient,)
    if call.name not in ("avg_pool2d_backward", "avg_pool3d_backward"):
        launches.append(cleared(result))
    return [*launches, Launch(kernel, x.numel, reads, (result,), facts, grids(pool), "", x.dtype)]


FAMILY = Family(
    name="pooling",
    sweep=KernelSweep(
        (1, _draw_windows, "max_pool2d_with_indices(*x, window, stride, padding, [1, 1], False)"),
        (1, _draw_windows, "max_pool2d_with_indices_backward(*y, x, window, stride, padding, [1, 1], False, maxima)"),
        (0.8, _draw_windows, "avg_pool2d(*x, window, stride, padding, False, True, None)"),
        (0.8, _draw_windows, "avg_pool2d_backward(*y, x, window, stride, padding, False, True, None)"),
        (1, _draw_adaptive, (0.5, "_adaptive_avg_pool2d(*x, [side, side])"), (0.5, "_adaptive_avg_pool2d_backward(*y, x)")),
    ),
    weight=2.5,
    rules={name: _backward if name.endswith("_backward") else _forward for name in _KERNELS}
    | {"im2col": _unfolded, "col2im": _windows_added},
    kin=" ".join((*_OF_VOLUMES, "im2col", "col2im")),
)
