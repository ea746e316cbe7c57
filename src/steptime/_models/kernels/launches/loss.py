"""Launches of losses: chains of element-wise kernels that end in a reduction, and the kernels of negative log likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from steptime._models.kernels.call import Call
from steptime._models.kernels.launches import Launch, Operand, fresh, hot
from steptime._models.kernels.launches.arguments import integer, tensor
from steptime._models.kernels.launches.copies import memcpy
from steptime._models.kernels.launches.gathering import touched
from steptime._models.kernels.launches.pointwise import pointwise
from steptime._models.kernels.launches.reduce import reduction
from steptime._models.kernels.launches.zeros import cleared
from steptime.errors import InputError

_NONE, _MEAN = 0, 1  # values of `reduction` in ATen
# One block sums the losses of all rows: its threads are the power of two nearest to rows / 16, from 32 to 1,024 (ATen).
_ROWS_OF_THREAD, _LEAST_THREADS, _MOST_THREADS = 16, 32, 1024
# Losses of pixels: threads of a block, and blocks' worth of a sample's pixels for which it gets one block (ATen).
_PIXEL_THREADS, _PIXEL_BLOCKS = 1024, 128


def launches(call: Call) -> list[Launch]:
    """What a loss or its gradient launches."""
    rules = _RULES.get(call.op)
    if rules is None:
        raise InputError(f"{call.op}: not an op of the family loss")
    return rules(call)


def _again(x: Operand) -> Operand:
    """What the launch before has written, of the shape of `x`."""
    return hot(x.shape, x.dtype, 2 * x.nbytes)


def _summed(x: Operand) -> list[Launch]:
    return reduction(_again(x), range(len(x.shape)), tag=x.dtype)


def _scores(call: Call, place: int) -> Operand:
    x = tensor(call, place)
    if len(x.shape) < 2:
        raise InputError(f"{call.op}: scores {x.shape} have no classes")
    return x


def _one_block(kernel: str, x: Operand, reads: tuple[Operand, ...], writes: tuple[Operand, ...] = ()) -> Launch:
    """Rows of scores met by the threads of one block."""
    rows, classes = x.shape[0], x.shape[1]
    nearest = 2 ** round(math.log2(max(1, rows // _ROWS_OF_THREAD)))
    threads = min(_MOST_THREADS, max(_LEAST_THREADS, nearest))
    passes = math.ceil(rows / threads)
    facts = {"labels": rows, "columns": classes, "threads": threads, "footprint_bytes": x.nbytes}
    grids = (
        (1.0, float(passes)),
        (1.0, passes * math.log2(1 + x.nbytes / 1e4) / 10),
        (1.0, passes * min(1.0, classes / 32)),
    )
    return Launch(kernel, rows, reads, writes, facts, grids, "", x.dtype)


def _nll(call: Call) -> list[Launch]:
    x = _scores(call, 0)
    reads = (touched(x, x.shape[0]), tensor(call, 1))
    return [_one_block("nll_loss_forward_reduce_cuda_kernel_2d", x, reads)]


def _nll_backward(call: Call) -> list[Launch]:
    x = _scores(call, 1)
    result = fresh(x.shape, x.dtype)
    added = _one_block("nll_loss_backward_reduce_cuda_kernel_2d", x, (tensor(call, 2),), (touched(result, x.shape[0]),))
    return [cleared(result), added]


def _by_pixel(kernel: str, x: Operand, reads: tuple[Operand, ...], writes: tuple[Operand, ...] = ()) -> Launch:
    """A block of 1,024 threads per sample, more where it has more than 131,072 pixels (ATen)."""
    pixels, samples = x.numel // x.shape[1], x.shape[0]
    facts = {"rows": pixels, "columns": x.shape[1], "samples": samples, "footprint_bytes": x.nbytes}
    blocks = samples * max(1, math.ceil(pixels / samples / _PIXEL_THREADS) // _PIXEL_BLOCKS)
    passes = math.ceil(pixels / blocks / _PIXEL_THREADS)
    # A warp meets the planes of its pixels' classes: 32 neighbours are 4 sectors of one plane, or one each of as many.
    sectors = min(1.0, x.shape[1] / 8)
    grids = ((float(blocks), float(passes)), (float(blocks), passes * sectors), (pixels / _PIXEL_THREADS, 1.0))
    return Launch(kernel, pixels, reads, writes, facts, grids, "", x.dtype)


def _nll_pixels(call: Call) -> list[Launch]:
    x, zero = _scores(call, 0), cleared(fresh((), tensor(call, 0).dtype))
    average = Launch("nll_loss2d_forward_size_average_kernel", 1, grids=((1.0, 1.0),))
    reads = (touched(x, x.numel // x.shape[1]), tensor(call, 1))
    return [zero, zero, _by_pixel("nll_loss2d_forward_kernel", x, reads), average]


def _nll_pixels_backward(call: Call) -> list[Launch]:
    x = _scores(call, 1)
    result = fresh(x.shape, x.dtype)
    written = (touched(result, x.numel // x.shape[1]),)
    return [cleared(result), _by_pixel("nll_loss2d_backward_kernel", x, (tensor(call, 2),), written)]


def _mse(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    differences = pointwise((x, tensor(call, 1)), fresh(x.shape, x.dtype), tag=x.dtype)
    return [differences, *(_summed(x) if integer(call, 2, _MEAN) != _NONE else ())]


def _cross_entropy(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    losses = pointwise((x, tensor(call, 1)), fresh(x.shape, x.dtype), tag=x.dtype)
    if integer(call, 3, _MEAN) == _NONE:
        return [losses]
    return [losses, *_summed(x), memcpy(hot((), x.dtype, 4), fresh((), x.dtype))]


def _cross_entropy_of_logits(call: Call) -> list[Launch]:
    x, target = tensor(call, 0), tensor(call, 1)
    again, result = _again(x), fresh(x.shape, x.dtype)
    # The logarithm of the sigmoid, ones, less the target, times the logits, less the logarithm.
    found = [pointwise((x,), result, tag="logarithm" + x.dtype), cleared(result)]
    chain = ((again, target), (again, _again(x)), (again, again))
    found += [pointwise(reads, result, tag=f"{place}{x.dtype}") for place, reads in enumerate(chain)]
    return found + (_summed(x) if integer(call, 4, _MEAN) != _NONE else [])


def _spread(gradient: Operand, x: Operand) -> Operand:
    """The gradient of a sum as every element sees it."""
    return replace(gradient, shape=x.shape, strides=(0,) * len(x.shape)) if gradient.shape == () else gradient


def _cross_entropy_backward(call: Call) -> list[Launch]:
    gradient, x, target = (tensor(call, place) for place in range(3))
    found = [pointwise((_spread(gradient, x), x, target), fresh(x.shape, x.dtype), tag=x.dtype)]
    if integer(call, 4, _MEAN) == _MEAN:
        found.append(pointwise((_again(x),), _again(x), tag="divided" + x.dtype, existing=True))
    return found


def _mse_backward(call: Call) -> list[Launch]:
    gradient, x, target = (tensor(call, place) for place in range(3))
    result = fresh(x.shape, x.dtype)
    return [cleared(result), pointwise((x, target, _spread(gradient, x)), result, tag="backward" + x.dtype)]


_RULES: dict[str, Callable[[Call], list[Launch]]] = {
    "aten::nll_loss_forward.default": _nll,
    "aten::nll_loss_backward.default": _nll_backward,
    "aten::nll_loss2d_forward.default": _nll_pixels,
    "aten::nll_loss2d_backward.default": _nll_pixels_backward,
    "aten::mse_loss.default": _mse,
    "aten::mse_loss_backward.default": _mse_backward,
    "aten::binary_cross_entropy.default": _cross_entropy,
    "aten::binary_cross_entropy_backward.default": _cross_entropy_backward,
    "aten::binary_cross_entropy_with_logits.default": _cross_entropy_of_logits,
}
