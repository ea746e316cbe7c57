"""Losses, forward and backward: negative log-likelihood (the second half of cross-entropy), binary cross-entropy, squares."""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import (
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    Shape,
    chance,
    floating,
    indices,
    log_int,
    mixture,
    pick,
    scalar,
    size,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Gpu, GpuCall, Launch, Operand, Rules, by_op, fresh, hot
from steptime._models.kernels.launches.arguments import integer, tensor
from steptime._models.kernels.launches.copies import memcpy
from steptime._models.kernels.launches.gathering import touched
from steptime._models.kernels.launches.pointwise import cleared, pointwise
from steptime._models.kernels.launches.reduce import reduction
from steptime.errors import InputError

_MOST_ELEMENTS = USUAL_BYTES // 4
# Values of `reduction` in ATen, and what nn.CrossEntropyLoss ignores unless told.
_NONE, _MEAN, _SUM = 0, 1, 2
_IGNORED = -100


def _draw_labelled(rng: Rng) -> tuple[TensorArg, TensorArg]:
    """Log-probabilities of rows, and their labels. Under autocast the loss runs in single precision."""
    classes = pick(rng, (*VOCABULARIES, 2, 10, 1000)) if chance(rng, 0.6) else size(rng, 2, 65536)
    rows = log_int(rng, 8, min(65536, _MOST_ELEMENTS // classes))
    dtype = "float32" if chance(rng, 0.7) else floating(rng)
    return TensorArg((rows, classes), dtype), indices((rows,), classes)


def _draw_nll(rng: Rng) -> Call:
    log_probabilities, labels = _draw_labelled(rng)
    return Call("aten::nll_loss_forward.default", (log_probabilities, labels, None, _MEAN, _IGNORED))


def _draw_nll_backward(rng: Rng) -> Call:
    log_probabilities, labels = _draw_labelled(rng)
    total = scalar(log_probabilities.dtype, "positive")
    arguments = (scalar(log_probabilities.dtype), log_probabilities, labels, None, _MEAN, _IGNORED, total)
    return Call("aten::nll_loss_backward.default", arguments)


def _draw_pixels(rng: Rng) -> tuple[TensorArg, TensorArg]:
    side, classes = log_int(rng, 16, 512), pick(rng, (2, 19, 21, 150))
    batch = log_int(rng, 1, max(1, min(64, _MOST_ELEMENTS // (classes * side * side))))
    return TensorArg((batch, classes, side, side)), indices((batch, side, side), classes)


def _draw_nll_pixels(rng: Rng) -> Call:
    return Call("aten::nll_loss2d_forward.default", (*_draw_pixels(rng), None, _MEAN, _IGNORED))


def _draw_nll_pixels_backward(rng: Rng) -> Call:
    log_probabilities, labels = _draw_pixels(rng)
    arguments = (scalar(), log_probabilities, labels, None, _MEAN, _IGNORED, scalar(values="positive"))
    return Call("aten::nll_loss2d_backward.default", arguments)


def _draw_outcomes(rng: Rng) -> Shape:
    """One click probability per sample as in DLRM, or several labels."""
    rows = log_int(rng, 32, 262144)
    return pick(rng, ((rows,), (rows, 1), (rows, log_int(rng, 2, 128))))


def _draw_reduction(rng: Rng) -> int:
    return pick(rng, (_MEAN, _SUM, _NONE), (0.8, 0.1, 0.1))


def _draw_bce(rng: Rng) -> Call:
    shape, dtype, reduction = _draw_outcomes(rng), floating(rng), _draw_reduction(rng)
    probability = TensorArg(shape, dtype, values="unit")
    if chance(rng, 0.5):
        return Call("aten::binary_cross_entropy.default", (probability, probability, None, reduction))
    arguments = (TensorArg(shape, dtype), probability, None, None, reduction)
    return Call("aten::binary_cross_entropy_with_logits.default", arguments)


def _draw_bce_backward(rng: Rng) -> Call:
    shape, dtype, reduction = _draw_outcomes(rng), floating(rng), _draw_reduction(rng)
    probability = TensorArg(shape, dtype, values="unit")
    dy = TensorArg(shape, dtype) if reduction == _NONE else scalar(dtype)
    return Call("aten::binary_cross_entropy_backward.default", (dy, probability, probability, None, reduction), written=(0, 1))


def _draw_values(rng: Rng) -> Shape:
    rows = log_int(rng, 32, 65536)
    return pick(rng, ((rows,), (rows, log_int(rng, 1, 512))))


def _draw_mse(rng: Rng) -> Call:
    x = TensorArg(_draw_values(rng), floating(rng))
    return Call("aten::mse_loss.default", (x, x, _draw_reduction(rng)))


def _draw_mse_backward(rng: Rng) -> Call:
    x, reduction = TensorArg(_draw_values(rng), floating(rng)), _draw_reduction(rng)
    dy = x if reduction == _NONE else scalar(x.dtype)
    return Call("aten::mse_loss_backward.default", (dy, x, x, reduction), written=(0, 1))


# Launches of losses: chains of element-wise kernels that end in a reduction, and the kernels of negative log likelihood.

# One block sums the losses of all rows: its threads are the power of two nearest to rows / 16, from 32 to 1,024 (ATen).
_ROWS_OF_THREAD, _LEAST_THREADS, _MOST_THREADS = 16, 32, 1024
# Losses of pixels: threads of a block, and blocks' worth of a sample's pixels for which it gets one block (ATen).
_PIXEL_THREADS, _PIXEL_BLOCKS = 1024, 128


def _again(x: Operand) -> Operand:
    """What the launch before has written, of the shape of `x`."""
    return hot(x.shape, x.dtype, 2 * x.nbytes)


def _summed(x: Operand, gpu: Gpu) -> list[Launch]:
    return reduction(_again(x), range(len(x.shape)), gpu, tag=x.dtype)


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


def _mse(call: GpuCall) -> list[Launch]:
    x = tensor(call, 0)
    differences = pointwise((x, tensor(call, 1)), fresh(x.shape, x.dtype), tag=x.dtype)
    return [differences, *(_summed(x, call.gpu) if integer(call, 2, _MEAN) != _NONE else ())]


def _cross_entropy(call: GpuCall) -> list[Launch]:
    x = tensor(call, 0)
    losses = pointwise((x, tensor(call, 1)), fresh(x.shape, x.dtype), tag=x.dtype)
    if integer(call, 3, _MEAN) == _NONE:
        return [losses]
    return [losses, *_summed(x, call.gpu), memcpy(hot((), x.dtype, 4), fresh((), x.dtype))]


def _cross_entropy_of_logits(call: GpuCall) -> list[Launch]:
    x, target = tensor(call, 0), tensor(call, 1)
    again, result = _again(x), fresh(x.shape, x.dtype)
    # The logarithm of the sigmoid, ones, less the target, times the logits, less the logarithm.
    results = [pointwise((x,), result, tag="logarithm" + x.dtype), cleared(result)]
    chain = ((again, target), (again, _again(x)), (again, again))
    results += [pointwise(reads, result, tag=f"{index}{x.dtype}") for index, reads in enumerate(chain)]
    return results + (_summed(x, call.gpu) if integer(call, 4, _MEAN) != _NONE else [])


def _spread(gradient: Operand, x: Operand) -> Operand:
    """The gradient of a sum as every element sees it."""
    return replace(gradient, shape=x.shape, strides=(0,) * len(x.shape)) if gradient.shape == () else gradient


def _cross_entropy_backward(call: Call) -> list[Launch]:
    gradient, x, target = (tensor(call, place) for place in range(3))
    results = [pointwise((_spread(gradient, x), x, target), fresh(x.shape, x.dtype), tag=x.dtype)]
    if integer(call, 4, _MEAN) == _MEAN:
        results.append(pointwise((_again(x),), _again(x), tag="divided" + x.dtype, existing=True))
    return results


def _mse_backward(call: Call) -> list[Launch]:
    gradient, x, target = (tensor(call, place) for place in range(3))
    result = fresh(x.shape, x.dtype)
    return [cleared(result), pointwise((x, target, _spread(gradient, x)), result, tag="backward" + x.dtype)]


_RULES: dict[str, Rules] = {
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


FAMILY = Family(
    name="loss",
    ops=(
        *("aten::nll_loss_forward.default", "aten::nll_loss_backward.default"),
        *("aten::nll_loss2d_forward.default", "aten::nll_loss2d_backward.default"),
        *("aten::binary_cross_entropy.default", "aten::binary_cross_entropy_backward.default"),
        "aten::binary_cross_entropy_with_logits.default",
        *("aten::mse_loss.default", "aten::mse_loss_backward.default"),
    ),
    sweep=mixture(
        *((1.5, _draw_nll), (1.5, _draw_nll_backward), (0.3, _draw_nll_pixels), (0.3, _draw_nll_pixels_backward)),
        *((1.4, _draw_bce), (0.8, _draw_bce_backward), (0.7, _draw_mse), (0.7, _draw_mse_backward)),
    ),
    weight=3.0,
    rules=by_op(_RULES),
)
