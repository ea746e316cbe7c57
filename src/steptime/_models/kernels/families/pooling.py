"""Pooling of images, forward and backward: maximum, average, adaptive average."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from steptime._models.kernels.call import TensorArg, contiguous
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import HOT, GpuCall, Grids, Launch, Operand, floor_power, fresh
from steptime._models.kernels.launches.iterator import cleared, copies
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
    return {"x": x, "y": y, "places": TensorArg(y.shape, "int64", y.strides, high=x.shape[2] ** 2)}


def _draw_windows(draw: Draw) -> Drawn:
    (x, last), (window, stride, padding) = _draw_images(draw), draw.pick(_WINDOWS)
    side = (x.shape[2] + 2 * padding - window) // stride + 1
    return _drawn(x, last, side) | {"window": (window,) * 2, "stride": (stride,) * 2, "padding": (padding,) * 2}


def _draw_adaptive(draw: Draw) -> Drawn:
    (x, last), side = _draw_images(draw), draw.pick((1, 2, 3, 6, 7))
    return _drawn(x, last, side) | {"side": side}


# How pooling kernels divide their work: a thread per output, or tiles of threads where channels lie side by side.

_THREADS, _WARP, _SECTOR_BYTES = 256, 32, 32
# Channels-last grids: threads of a block, places of a thread along each side. Those that explain the measured times best:
# forward as in ATen, backward of the maximum, backward of adaptive means.
_FORWARD = ((1024, 2), (512, 2))
_BACKWARD = ((256, 16), (256, 8), (1024, 2))
_SPREAD = ((1024, 2), (512, 4))


@dataclass(frozen=True, slots=True)
class _Pooling:
    """Samples, channels, sides of input and output, window and stride, and whether channels lie side by side."""

    samples: int
    channels: int
    side: tuple[int, int]
    result: tuple[int, int]
    window: tuple[int, int]
    stride: tuple[int, int]
    last: bool
    item: int

    @property
    def planes(self) -> int:
        """Images of one channel."""
        return self.samples * self.channels

    @property
    def inputs(self) -> int:
        """Elements of an input plane."""
        return self.side[0] * self.side[1]

    @property
    def outputs(self) -> int:
        """Elements of an output plane."""
        return self.result[0] * self.result[1]

    @property
    def cell(self) -> float:
        """Inputs for each output."""
        return self.inputs / self.outputs

    @property
    def taps(self) -> int:
        """Elements of a window."""
        return self.window[0] * self.window[1]

    @property
    def overlap(self) -> float:
        """Windows that an input lies in, at least one."""
        return max(1.0, self.window[0] / self.stride[0]) * max(1.0, self.window[1] / self.stride[1])

    @property
    def facts(self) -> dict[str, float]:
        """Sizes."""
        return {
            "plane": self.inputs,
            "result_plane": self.outputs,
            "planes": self.planes,
            "columns": self.channels,
            "samples": self.samples,
            "window": self.window[0],
            "stride": self.stride[0],
            "ratio": self.side[0] / self.result[0],
            "side": self.side[0],
            "result_side": self.result[0],
            "last": self.last,
        }


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
    blocks, sectors = pool.planes * spread, high * math.ceil(wide * pool.item / _SECTOR_BYTES)
    return (
        (blocks, sectors * passes),
        (pool.planes * pool.result[0], high),
        (blocks, pool.cell),
        (pool.planes, pool.inputs),
    )


def _adaptive_threads_backward(pool: _Pooling) -> Grids:
    """The same threads add to every input of their cells."""
    planes = pool.planes
    return (
        (planes * max(1.0, pool.outputs / _THREADS), pool.cell),
        (planes, pool.inputs / _THREADS),
        (planes * pool.outputs / _THREADS, pool.cell),
    )


def _average_tiles(pool: _Pooling) -> Grids:
    """Channels-last means, forward and backward: several ways in which threads may share samples, channels and places."""
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

    `ways` are threads of a block at most and places of a thread along each side.
    """
    results = []
    for most, places in ways:
        blocks, serial = _tile(pool, side, most, places, widened)
        results.append((blocks, serial * each))
    blocks, serial = _tile(pool, side, *ways[0], widened)
    return (*results, (blocks, serial), (blocks, 1.0), (pool.planes * pool.inputs / 1024, 1.0))


def _tile(pool: _Pooling, side: tuple[int, int], most: int, places: int, widened: bool) -> tuple[float, float]:
    """Blocks, and how many channels times places a thread of one takes.

    `widened` says that threads which small sides leave over go along channels.
    """
    width = min(floor_power(pool.channels), _WARP)
    height = min(floor_power(side[1]), most // width)
    depth = max(1, min(floor_power(side[0]), most // width // height))
    if widened:
        width = min(floor_power(pool.channels), most // height // depth)
    groups = math.ceil(pool.channels / (width * 4))
    channels = math.ceil(pool.channels / (width * groups))
    across, down = math.ceil(side[1] / (height * places)), math.ceil(side[0] / (depth * places))
    serial = channels * math.ceil(side[1] / (across * height)) * math.ceil(side[0] / (down * depth))
    return pool.samples * groups * across * down, serial


# What pooling launches.


def _pair(call: GpuCall, place: int, default: tuple[int, int]) -> tuple[int, int]:
    sizes = call.integers(place)
    return (sizes[0], sizes[-1]) if sizes else default


def _pool(call: GpuCall, x: Operand, result: tuple[int, int], window: tuple[int, int], stride: tuple[int, int]) -> _Pooling:
    if len(x.shape) != 4 or min(*x.shape, *result, *window, *stride) <= 0:
        raise InputError(
            f"{call.op}: input {x.shape} and output {result} with windows of {window} every {stride} cannot be pooled"
        )
    last = x.strides[1] == 1 and x.shape[1] > 1 and x.strides != contiguous(x.shape)
    return _Pooling(x.shape[0], x.shape[1], (x.shape[2], x.shape[3]), result, window, stride, last, x.item_bytes)


def _places(length: int, window: int, stride: int, padding: int, *, rounded_up: bool) -> int:
    """Windows along one side; one that would start in the padding behind the input is left out (ATen)."""
    span = length + 2 * padding - window
    if not rounded_up:
        return span // stride + 1
    count = -(-span // stride) + 1
    return count - 1 if (count - 1) * stride >= length + padding else count


def _windows(call: GpuCall, x: Operand, *, dilated: bool) -> _Pooling:
    """A forward call: input, window, stride, padding, where windows can be `dilated` how much, whether sides are rounded up."""
    window = _pair(call, 1, (1, 1))
    stride, padding = _pair(call, 2, window), _pair(call, 3, (0, 0))
    dilation = _pair(call, 4, (1, 1)) if dilated else (1, 1)
    if len(x.shape) != 4 or min(stride) <= 0:
        raise InputError(f"{call.op}: input {x.shape} is no batch of images, or windows are every {stride}")
    rounded_up = call.flag(5 if dilated else 4)
    rows, columns = (
        _places(x.shape[2 + axis], dilation[axis] * (window[axis] - 1) + 1, stride[axis], padding[axis], rounded_up=rounded_up)
        for axis in (0, 1)
    )
    return _pool(call, x, (rows, columns), window, stride)


def _windows_backward(call: GpuCall, gradient: Operand, x: Operand) -> _Pooling:
    """A backward call: gradient, input, window, stride."""
    window = _pair(call, 2, (1, 1))
    if len(gradient.shape) != 4:
        raise InputError(f"{call.op}: gradient {gradient.shape} is no batch of images")
    return _pool(call, x, (gradient.shape[2], gradient.shape[3]), window, _pair(call, 3, window))


def _result(pool: _Pooling, dtype: str) -> Operand:
    return fresh((pool.samples, pool.channels, *pool.result), dtype)


def _dense(x: Operand) -> tuple[Operand, list[Launch]]:
    """The tensor itself, or a copy of it without holes and what makes it."""
    if x.dense:
        return x, []
    result = fresh(x.shape, x.dtype)
    return replace(result, origin=HOT), copies(result, x)


def _maximum(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    pool = _windows(call, x, dilated=True)
    writes = (_result(pool, x.dtype), _result(pool, "int64"))
    kernel = "max_pool_forward_nhwc" if pool.last else "max_pool_forward_nchw"
    grids = _tiles(pool, pool.result, pool.taps, _FORWARD) if pool.last else _threads(pool)
    return [Launch(kernel, pool.planes * pool.outputs, (x,), writes, pool.facts, grids, "", x.dtype)]


def _maximum_backward(call: GpuCall) -> list[Launch]:
    gradient, before = _dense(call.tensor(0))
    x = call.tensor(1)
    pool = _windows_backward(call, gradient, x)
    kernel = "max_pool_backward_nhwc" if pool.last else "max_pool_backward_nchw"
    grids = _tiles(pool, pool.side, pool.overlap, _BACKWARD) if pool.last else _threads_backward(pool)
    result = fresh(x.shape, x.dtype)
    scattered = Launch(kernel, x.numel, (gradient, call.tensor(7)), (result,), pool.facts, grids, "", x.dtype)
    return [*before, cleared(result), scattered]


def _average(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    pool = _windows(call, x, dilated=False)
    kernel = "avg_pool2d_out_cuda_frame" + ("_nhwc" if pool.last else "")
    grids = _average_tiles(pool) if pool.last else _threads(pool)
    return [Launch(kernel, pool.planes * pool.outputs, (x,), (_result(pool, x.dtype),), pool.facts, grids, "", x.dtype)]


def _average_backward(call: GpuCall) -> list[Launch]:
    gradient, before = _dense(call.tensor(0))
    x = call.tensor(1)
    pool = _windows_backward(call, gradient, x)
    kernel = "avg_pool2d_backward_out_cuda_frame" + ("_nhwc" if pool.last else "")
    grids = _average_tiles(pool) if pool.last else _threads_backward(pool)
    return [*before, Launch(kernel, x.numel, (gradient,), (fresh(x.shape, x.dtype),), pool.facts, grids, "", x.dtype)]


def _adaptive_pool(call: GpuCall, x: Operand, result: tuple[int, int]) -> _Pooling:
    """Windows that cover the input: as large as what they are reduced by, rounded up."""
    if len(x.shape) != 4 or min(result) <= 0:
        raise InputError(f"{call.op}: input {x.shape} cannot be pooled to {result}")
    ratio = (math.ceil(x.shape[2] / result[0]), math.ceil(x.shape[3] / result[1]))
    return _pool(call, x, result, ratio, ratio)


def _adaptive(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    pool = _adaptive_pool(call, x, _pair(call, 1, (1, 1)))
    kernel = "adaptive_average_pool" + ("_nhwc" if pool.last else "")
    grids = _tiles(pool, pool.result, pool.cell, _FORWARD, widened=True) if pool.last else _adaptive_threads(pool)
    return [Launch(kernel, x.numel, (x,), (_result(pool, x.dtype),), pool.facts, grids, "", x.dtype)]


def _adaptive_backward(call: GpuCall) -> list[Launch]:
    gradient, before = _dense(call.tensor(0))
    x = call.tensor(1)
    if len(gradient.shape) != 4:
        raise InputError(f"{call.op}: gradient {gradient.shape} is no batch of images")
    pool = _adaptive_pool(call, x, (gradient.shape[2], gradient.shape[3]))
    kernel = "adaptive_average_gradinput_nhwc" if pool.last else "atomic_adaptive_average_gradinput"
    grids = _tiles(pool, pool.side, 1.0, _SPREAD) if pool.last else _adaptive_threads_backward(pool)
    facts = pool.facts | {"uneven": x.shape[2] % pool.result[0] != 0}
    result = fresh(x.shape, x.dtype)
    return [*before, cleared(result), Launch(kernel, x.numel, (gradient,), (result,), facts, grids, "", x.dtype)]


FAMILY = Family(
    name="pooling",
    sweep=KernelSweep(
        (1, _draw_windows, "max_pool2d_with_indices(*x, window, stride, padding, [1, 1], False)"),
        (1, _draw_windows, "max_pool2d_with_indices_backward(*y, x, window, stride, padding, [1, 1], False, places)"),
        (0.8, _draw_windows, "avg_pool2d(*x, window, stride, padding, False, True, None)"),
        (0.8, _draw_windows, "avg_pool2d_backward(*y, x, window, stride, padding, False, True, None)"),
        (
            *(1, _draw_adaptive, (0.5, "_adaptive_avg_pool2d(*x, [side, side])")),
            (0.5, "_adaptive_avg_pool2d_backward(*y, x)"),
        ),
    ),
    weight=2.5,
    rules={
        "max_pool2d_with_indices": _maximum,
        "max_pool2d_with_indices_backward": _maximum_backward,
        "avg_pool2d": _average,
        "avg_pool2d_backward": _average_backward,
        "_adaptive_avg_pool2d": _adaptive,
        "_adaptive_avg_pool2d_backward": _adaptive_backward,
    },
)
