"""Pooling of images, forward and backward: maximum, average, adaptive average."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from steptime._models.kernels.call import Call, TensorArg, contiguous
from steptime._models.kernels.draw import USUAL_BYTES, Rng, Shape, chance, channels_last, floating, log_int, mixture, pick, size
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Launch, Operand, fresh
from steptime._models.kernels.launches.arguments import flag, integers, tensor
from steptime._models.kernels.launches.copies import copies
from steptime._models.kernels.launches.pointwise import cleared
from steptime._models.kernels.launches.pooling_grids import (
    BACKWARD,
    FORWARD,
    SPREAD,
    Pool,
    adaptive_threads,
    adaptive_threads_backward,
    average_tiles,
    threads,
    threads_backward,
    tiles,
)
from steptime.errors import InputError

_MOST_ELEMENTS = USUAL_BYTES // 4
# (window, stride, padding): ResNet's, Inception's two, and halving.
_WINDOWS = ((3, 2, 1), (3, 2, 0), (3, 1, 1), (2, 2, 0), (5, 3, 0))


@dataclass(frozen=True)
class _Images:
    shape: Shape
    dtype: str
    last: bool

    def tensor(self, *image: int) -> TensorArg:
        """The images, or those of another size."""
        shape = (*self.shape[:2], *image) if image else self.shape
        return channels_last(shape, self.dtype) if self.last else TensorArg(shape, self.dtype)


def _draw_images(rng: Rng) -> _Images:
    side = pick(rng, (7, 8, 14, 17, 28, 35, 56, 71, 112, 147)) if chance(rng, 0.8) else log_int(rng, 7, 160)
    channels = pick(rng, (64, 192, 288, 512, 768, 2048)) if chance(rng, 0.6) else size(rng, 8, 2048)
    batch = log_int(rng, 1, max(1, min(256, _MOST_ELEMENTS // (channels * side * side))))
    return _Images((batch, channels, side, side), floating(rng), chance(rng, 0.35))


def _pooled(side: int, window: int, stride: int, padding: int) -> int:
    return (side + 2 * padding - window) // stride + 1


def _draw_maximum(rng: Rng) -> Call:
    images, (window, stride, padding) = _draw_images(rng), pick(rng, _WINDOWS)
    arguments = (images.tensor(), (window,) * 2, (stride,) * 2, (padding,) * 2, (1, 1), False)
    return Call("aten::max_pool2d_with_indices.default", arguments)


def _draw_maximum_backward(rng: Rng) -> Call:
    images, (window, stride, padding) = _draw_images(rng), pick(rng, _WINDOWS)
    side = images.shape[2]
    result = images.tensor(*(_pooled(side, window, stride, padding),) * 2)
    # The place of each maximum in its plane.
    places = TensorArg(result.shape, "int64", result.strides, high=side * side)
    arguments = (result, images.tensor(), (window,) * 2, (stride,) * 2, (padding,) * 2, (1, 1), False, places)
    return Call("aten::max_pool2d_with_indices_backward.default", arguments)


def _draw_average(rng: Rng) -> Call:
    images, (window, stride, padding) = _draw_images(rng), pick(rng, _WINDOWS)
    arguments = (images.tensor(), (window,) * 2, (stride,) * 2, (padding,) * 2, False, True, None)
    return Call("aten::avg_pool2d.default", arguments)


def _draw_average_backward(rng: Rng) -> Call:
    images, (window, stride, padding) = _draw_images(rng), pick(rng, _WINDOWS)
    result = images.tensor(*(_pooled(images.shape[2], window, stride, padding),) * 2)
    arguments = (result, images.tensor(), (window,) * 2, (stride,) * 2, (padding,) * 2, False, True, None)
    return Call("aten::avg_pool2d_backward.default", arguments)


def _draw_adaptive(rng: Rng) -> Call:
    images, side = _draw_images(rng), pick(rng, (1, 2, 3, 6, 7))
    if chance(rng, 0.5):
        return Call("aten::_adaptive_avg_pool2d.default", (images.tensor(), (side, side)))
    return Call("aten::_adaptive_avg_pool2d_backward.default", (images.tensor(side, side), images.tensor()))


# Launches of pooling: a thread per output or input where planes lie one by one, tiles of threads where channels do.


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


def _pool(call: Call, x: Operand, result: tuple[int, int], window: tuple[int, int], stride: tuple[int, int]) -> Pool:
    if len(x.shape) != 4 or min(*x.shape, *result, *window, *stride) <= 0:
        raise InputError(
            f"{call.op}: input {x.shape} and output {result} with windows of {window} every {stride} cannot be pooled"
        )
    last = x.strides[1] == 1 and x.shape[1] > 1 and x.strides != contiguous(x.shape)
    return Pool(x.shape[0], x.shape[1], (x.shape[2], x.shape[3]), result, window, stride, last, x.item_bytes)


def _places(length: int, window: int, stride: int, padding: int, *, rounded_up: bool) -> int:
    """Windows along one side; one that would start in the padding behind the input is left out (ATen)."""
    span = length + 2 * padding - window
    if not rounded_up:
        return span // stride + 1
    count = -(-span // stride) + 1
    return count - 1 if (count - 1) * stride >= length + padding else count


def _windows(call: Call, x: Operand, *, dilated: bool) -> Pool:
    """A forward call: input, window, stride, padding, where windows can be `dilated` how much, whether sides are rounded up."""
    window = _pair(call, 1, (1, 1))
    stride, padding = _pair(call, 2, window), _pair(call, 3, (0, 0))
    dilation = _pair(call, 4, (1, 1)) if dilated else (1, 1)
    if len(x.shape) != 4 or min(stride) <= 0:
        raise InputError(f"{call.op}: input {x.shape} is no batch of images, or windows are every {stride}")
    rounded_up = flag(call, 5 if dilated else 4)
    rows, columns = (
        _places(x.shape[2 + axis], dilation[axis] * (window[axis] - 1) + 1, stride[axis], padding[axis], rounded_up=rounded_up)
        for axis in (0, 1)
    )
    return _pool(call, x, (rows, columns), window, stride)


def _windows_backward(call: Call, gradient: Operand, x: Operand) -> Pool:
    """A backward call: gradient, input, window, stride."""
    window = _pair(call, 2, (1, 1))
    if len(gradient.shape) != 4:
        raise InputError(f"{call.op}: gradient {gradient.shape} is no batch of images")
    return _pool(call, x, (gradient.shape[2], gradient.shape[3]), window, _pair(call, 3, window))


def _result(pool: Pool, dtype: str) -> Operand:
    return fresh((pool.samples, pool.channels, *pool.result), dtype)


def _dense(one: Operand) -> tuple[Operand, list[Launch]]:
    """The tensor itself, or a copy of it without holes and what makes it."""
    if one.dense:
        return one, []
    result = fresh(one.shape, one.dtype)
    return replace(result, origin="hot"), copies(result, one)


def _maximum(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    pool = _windows(call, x, dilated=True)
    writes = (_result(pool, x.dtype), _result(pool, "int64"))
    kernel = "max_pool_forward_nhwc" if pool.last else "max_pool_forward_nchw"
    grids = tiles(pool, pool.result, pool.taps, FORWARD) if pool.last else threads(pool)
    return [Launch(kernel, pool.planes * pool.outputs, (x,), writes, pool.facts, grids, "", x.dtype)]


def _maximum_backward(call: Call) -> list[Launch]:
    gradient, before = _dense(tensor(call, 0))
    x = tensor(call, 1)
    pool = _windows_backward(call, gradient, x)
    kernel = "max_pool_backward_nhwc" if pool.last else "max_pool_backward_nchw"
    grids = tiles(pool, pool.side, pool.overlap, BACKWARD) if pool.last else threads_backward(pool)
    result = fresh(x.shape, x.dtype)
    scattered = Launch(kernel, x.numel, (gradient, tensor(call, 7)), (result,), pool.facts, grids, "", x.dtype)
    return [*before, cleared(result), scattered]


def _average(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    pool = _windows(call, x, dilated=False)
    kernel = "avg_pool2d_out_cuda_frame" + ("_nhwc" if pool.last else "")
    grids = average_tiles(pool) if pool.last else threads(pool)
    return [Launch(kernel, pool.planes * pool.outputs, (x,), (_result(pool, x.dtype),), pool.facts, grids, "", x.dtype)]


def _average_backward(call: Call) -> list[Launch]:
    gradient, before = _dense(tensor(call, 0))
    x = tensor(call, 1)
    pool = _windows_backward(call, gradient, x)
    kernel = "avg_pool2d_backward_out_cuda_frame" + ("_nhwc" if pool.last else "")
    grids = average_tiles(pool) if pool.last else threads_backward(pool)
    return [*before, Launch(kernel, x.numel, (gradient,), (fresh(x.shape, x.dtype),), pool.facts, grids, "", x.dtype)]


def _adaptive_pool(call: Call, x: Operand, result: tuple[int, int]) -> Pool:
    """Windows that cover the input: as large as what they are reduced by, rounded up."""
    if len(x.shape) != 4 or min(result) <= 0:
        raise InputError(f"{call.op}: input {x.shape} cannot be pooled to {result}")
    ratio = (math.ceil(x.shape[2] / result[0]), math.ceil(x.shape[3] / result[1]))
    return _pool(call, x, result, ratio, ratio)


def _adaptive(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    pool = _adaptive_pool(call, x, _pair(call, 1, (1, 1)))
    kernel = "adaptive_average_pool" + ("_nhwc" if pool.last else "")
    grids = tiles(pool, pool.result, pool.cell, FORWARD, widened=True) if pool.last else adaptive_threads(pool)
    return [Launch(kernel, x.numel, (x,), (_result(pool, x.dtype),), pool.facts, grids, "", x.dtype)]


def _adaptive_backward(call: Call) -> list[Launch]:
    gradient, before = _dense(tensor(call, 0))
    x = tensor(call, 1)
    if len(gradient.shape) != 4:
        raise InputError(f"{call.op}: gradient {gradient.shape} is no batch of images")
    pool = _adaptive_pool(call, x, (gradient.shape[2], gradient.shape[3]))
    kernel = "adaptive_average_gradinput_nhwc" if pool.last else "atomic_adaptive_average_gradinput"
    grids = tiles(pool, pool.side, 1.0, SPREAD) if pool.last else adaptive_threads_backward(pool)
    facts = pool.facts | {"uneven": x.shape[2] % pool.result[0] != 0}
    result = fresh(x.shape, x.dtype)
    return [*before, cleared(result), Launch(kernel, x.numel, (gradient,), (result,), facts, grids, "", x.dtype)]


_RULES: dict[str, Callable[[Call], list[Launch]]] = {
    "aten::max_pool2d_with_indices.default": _maximum,
    "aten::max_pool2d_with_indices_backward.default": _maximum_backward,
    "aten::avg_pool2d.default": _average,
    "aten::avg_pool2d_backward.default": _average_backward,
    "aten::_adaptive_avg_pool2d.default": _adaptive,
    "aten::_adaptive_avg_pool2d_backward.default": _adaptive_backward,
}


FAMILY = Family(
    name="pooling",
    ops=(
        *("aten::max_pool2d_with_indices.default", "aten::max_pool2d_with_indices_backward.default"),
        *("aten::avg_pool2d.default", "aten::avg_pool2d_backward.default"),
        *("aten::_adaptive_avg_pool2d.default", "aten::_adaptive_avg_pool2d_backward.default"),
    ),
    sweep=mixture(
        *((1, _draw_maximum), (1, _draw_maximum_backward), (0.8, _draw_average), (0.8, _draw_average_backward)),
        (1, _draw_adaptive),
    ),
    weight=2.5,
    rules=launches,
)
