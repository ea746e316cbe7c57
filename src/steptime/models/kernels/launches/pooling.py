"""Launches of pooling: a thread per output or input where planes lie one by one, tiles of threads where channels do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from steptime.errors import InputError
from steptime.models.kernels.call import Call
from steptime.models.kernels.launches import Launch, Operand, contiguous, fresh
from steptime.models.kernels.launches.arguments import integers, tensor
from steptime.models.kernels.launches.copies import copies
from steptime.models.kernels.launches.pointwise import fill

_THREADS, _WARP, _SECTOR_BYTES = 256, 32, 32
# Channels-last grids: threads of a block, places of a thread along each side. Those that explain the measured times best:
# forward as in ATen, backward of the maximum, backward of adaptive means.
_FORWARD = ((1024, 2), (512, 2))
_BACKWARD = ((256, 16), (256, 8), (1024, 2))
_SPREAD = ((1024, 2), (512, 4))


@dataclass(frozen=True, slots=True)
class _Pool:
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


def launches(call: Call) -> list[Launch]:
    """What pooling launches."""
    rules = _RULES.get(call.op)
    if rules is None:
        raise InputError(f"{call.op}: not an op of the family pooling")
    return rules(call)


def _pair(call: Call, place: int, default: tuple[int, int]) -> tuple[int, int]:
    given = integers(call, place)
    if not given:
        return default
    return (given[0], given[-1])


def _pool(call: Call, x: Operand, result: tuple[int, int], window: tuple[int, int], stride: tuple[int, int]) -> _Pool:
    if len(x.shape) != 4 or min(*x.shape, *result, *window, *stride) <= 0:
        raise InputError(
            f"{call.op}: input {x.shape} and output {result} with windows of {window} every {stride} cannot be pooled"
        )
    last = x.strides[1] == 1 and x.shape[1] > 1 and x.strides != contiguous(x.shape)
    return _Pool(x.shape[0], x.shape[1], (x.shape[2], x.shape[3]), result, window, stride, last, x.item_bytes)


def _windows(call: Call, x: Operand) -> _Pool:
    """A forward call: input, window, stride, padding."""
    window = _pair(call, 1, (1, 1))
    stride, padding = _pair(call, 2, window), _pair(call, 3, (0, 0))
    if len(x.shape) != 4:
        raise InputError(f"{call.op}: input {x.shape} is no batch of images")
    rows, columns = ((x.shape[2 + axis] + 2 * padding[axis] - window[axis]) // stride[axis] + 1 for axis in (0, 1))
    return _pool(call, x, (rows, columns), window, stride)


def _windows_backward(call: Call, gradient: Operand, x: Operand) -> _Pool:
    """A backward call: gradient, input, window, stride."""
    window = _pair(call, 2, (1, 1))
    if len(gradient.shape) != 4:
        raise InputError(f"{call.op}: gradient {gradient.shape} is no batch of images")
    return _pool(call, x, (gradient.shape[2], gradient.shape[3]), window, _pair(call, 3, window))


def _result(pool: _Pool, dtype: str) -> Operand:
    return fresh((pool.samples, pool.channels, *pool.result), dtype)


def _dense(one: Operand) -> tuple[Operand, list[Launch]]:
    """The tensor itself, or a copy of it without holes and what makes it."""
    if one.dense:
        return one, []
    made = fresh(one.shape, one.dtype)
    return replace(made, origin="hot"), copies(made, one)


def _maximum(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    pool = _windows(call, x)
    writes = (_result(pool, x.dtype), _result(pool, "int64"))
    kernel = "max_pool_forward_nhwc" if pool.last else "max_pool_forward_nchw"
    grids = _tiles(pool, pool.result, pool.taps, _FORWARD) if pool.last else _threads(pool)
    return [Launch(kernel, pool.planes * pool.outputs, (x,), writes, pool.facts, grids, "", x.dtype)]


def _maximum_backward(call: Call) -> list[Launch]:
    gradient, before = _dense(tensor(call, 0))
    x = tensor(call, 1)
    pool = _windows_backward(call, gradient, x)
    kernel = "max_pool_backward_nhwc" if pool.last else "max_pool_backward_nchw"
    grids = _tiles(pool, pool.side, pool.overlap, _BACKWARD) if pool.last else _threads_backward(pool)
    result = fresh(x.shape, x.dtype)
    scattered = Launch(kernel, x.numel, (gradient, tensor(call, 7)), (result,), pool.facts, grids, "", x.dtype)
    return [*before, fill(result), scattered]


def _average(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    pool = _windows(call, x)
    kernel = "avg_pool2d_out_cuda_frame" + ("_nhwc" if pool.last else "")
    grids = _average_tiles(pool) if pool.last else _threads(pool)
    return [Launch(kernel, pool.planes * pool.outputs, (x,), (_result(pool, x.dtype),), pool.facts, grids, "", x.dtype)]


def _average_backward(call: Call) -> list[Launch]:
    gradient, before = _dense(tensor(call, 0))
    x = tensor(call, 1)
    pool = _windows_backward(call, gradient, x)
    kernel = "avg_pool2d_backward_out_cuda_frame" + ("_nhwc" if pool.last else "")
    grids = _average_tiles(pool) if pool.last else _threads_backward(pool)
    return [*before, Launch(kernel, x.numel, (gradient,), (fresh(x.shape, x.dtype),), pool.facts, grids, "", x.dtype)]


def _adaptive_pool(call: Call, x: Operand, result: tuple[int, int]) -> _Pool:
    """Windows that cover the input: as large as what they are reduced by, rounded up."""
    if len(x.shape) != 4 or min(result) <= 0:
        raise InputError(f"{call.op}: input {x.shape} cannot be pooled to {result}")
    ratio = (math.ceil(x.shape[2] / result[0]), math.ceil(x.shape[3] / result[1]))
    return _pool(call, x, result, ratio, ratio)


def _adaptive(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    pool = _adaptive_pool(call, x, _pair(call, 1, (1, 1)))
    kernel = "adaptive_average_pool" + ("_nhwc" if pool.last else "")
    grids = _tiles(pool, pool.result, pool.cell, _FORWARD, widened=True) if pool.last else _adaptive_threads(pool)
    return [Launch(kernel, x.numel, (x,), (_result(pool, x.dtype),), pool.facts, grids, "", x.dtype)]


def _adaptive_backward(call: Call) -> list[Launch]:
    gradient, before = _dense(tensor(call, 0))
    x = tensor(call, 1)
    if len(gradient.shape) != 4:
        raise InputError(f"{call.op}: gradient {gradient.shape} is no batch of images")
    pool = _adaptive_pool(call, x, (gradient.shape[2], gradient.shape[3]))
    kernel = "adaptive_average_gradinput_nhwc" if pool.last else "atomic_adaptive_average_gradinput"
    grids = _tiles(pool, pool.side, 1.0, _SPREAD) if pool.last else _adaptive_threads_backward(pool)
    facts = pool.facts | {"uneven": x.shape[2] % pool.result[0] != 0}
    result = fresh(x.shape, x.dtype)
    return [*before, fill(result), Launch(kernel, x.numel, (gradient,), (result,), facts, grids, "", x.dtype)]


def _threads(pool: _Pool) -> tuple[tuple[float, float], ...]:
    """A thread per output walks its window."""
    blocks = pool.planes * pool.outputs / _THREADS
    return ((blocks, float(pool.taps)), (blocks, 1.0))


def _threads_backward(pool: _Pool) -> tuple[tuple[float, float], ...]:
    """A thread per input meets the windows that it lies in."""
    blocks = pool.planes * pool.inputs / _THREADS
    return ((blocks, pool.overlap), (blocks, 1.0), (pool.inputs / _THREADS, float(pool.planes)))


def _longest(length: int, result: int) -> int:
    """The longest stretch of `length` that becomes one of `result`: they overlap where it does not divide."""
    return max(-(-(place + 1) * length // result) - place * length // result for place in range(result))


def _adaptive_threads(pool: _Pool) -> tuple[tuple[float, float], ...]:
    """A block of 32 x 8 threads per plane, several where channels are few; a thread per output walks its cell row by row."""
    high, wide = (_longest(pool.side[axis], pool.result[axis]) for axis in (0, 1))
    spread = max(1, 16 // pool.channels)
    passes = math.ceil(pool.result[1] / _WARP) * math.ceil(pool.result[0] / (8 * spread))
    blocks, sectors = float(pool.planes * spread), high * math.ceil(wide * pool.item / _SECTOR_BYTES)
    return (
        (blocks, float(sectors * passes)),
        (float(pool.planes * pool.result[0]), float(high)),
        (blocks, pool.cell),
        (float(pool.planes), float(pool.inputs)),
    )


def _adaptive_threads_backward(pool: _Pool) -> tuple[tuple[float, float], ...]:
    """The same threads add to every input of their cells."""
    planes = float(pool.planes)
    return (
        (planes * max(1.0, pool.outputs / _THREADS), pool.cell),
        (planes, pool.inputs / _THREADS),
        (planes * pool.outputs / _THREADS, pool.cell),
    )


def _average_tiles(pool: _Pool) -> tuple[tuple[float, float], ...]:
    samples, lanes = float(pool.samples), pool.samples * pool.channels / _WARP
    return (
        (samples, float(pool.outputs * pool.taps)),
        (samples * pool.outputs, float(pool.taps)),
        (lanes, float(pool.outputs)),
        (lanes, float(pool.inputs)),
        (samples, float(pool.inputs)),
        (samples, float(pool.result[0] * pool.taps)),
        (pool.planes * pool.outputs / 512, float(pool.taps)),
        (lanes, pool.cell),
    )


def _power(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def _tiles(
    pool: _Pool, side: tuple[int, int], each: float, ways: tuple[tuple[int, int], ...], *, widened: bool = False
) -> tuple[tuple[float, float], ...]:
    """Channels-last kernels: tiles of threads over channels and both sides of the image, each with a few of every kind.

    `ways` are threads of a block at most and places of a thread along each side; the first is ATen's, others are near it.
    """
    found = []
    for most, places in ways:
        blocks, serial = _tile(pool, side, most, places, widened)
        found.append((blocks, serial * each))
    blocks, serial = _tile(pool, side, *ways[0], widened)
    return (*found, (blocks, serial), (blocks, 1.0), (pool.planes * pool.inputs / 1024, 1.0))


def _tile(pool: _Pool, side: tuple[int, int], most: int, places: int, widened: bool) -> tuple[float, float]:
    """Blocks, and how many channels times places a thread of one takes.

    `widened` says that threads which small sides leave over go along channels.
    """
    width = min(_power(pool.channels), _WARP)
    height = min(_power(side[1]), most // width)
    depth = max(1, min(_power(side[0]), most // width // height))
    if widened:
        width = min(_power(pool.channels), most // height // depth)
    groups = math.ceil(pool.channels / (width * 4))
    channels = math.ceil(pool.channels / (width * groups))
    across, down = math.ceil(side[1] / (height * places)), math.ceil(side[0] / (depth * places))
    serial = channels * math.ceil(side[1] / (across * height)) * math.ceil(side[0] / (down * depth))
    return float(pool.samples * groups * across * down), float(serial)


_RULES: dict[str, Callable[[Call], list[Launch]]] = {
    "aten::max_pool2d_with_indices.default": _maximum,
    "aten::max_pool2d_with_indices_backward.default": _maximum_backward,
    "aten::avg_pool2d.default": _average,
    "aten::avg_pool2d_backward.default": _average_backward,
    "aten::_adaptive_avg_pool2d.default": _adaptive,
    "aten::_adaptive_avg_pool2d_backward.default": _adaptive_backward,
}
