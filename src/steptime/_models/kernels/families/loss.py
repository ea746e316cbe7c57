"""Losses, forward and backward: negative log-likelihood (the second half of cross-entropy), binary cross-entropy, squares."""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import SCATTER_GATHER, Gpu, GpuCall, Launch, Operand, fresh, hot
from steptime._models.kernels.launches.indexed import scatter_grids, touched
from steptime._models.kernels.launches.iterator import cleared, memcpy, of_contiguous, pointwise, reduction
from steptime._models.kernels.sweep import USUAL_ELEMENTS, VOCABULARIES, Draw, Drawn, KernelSweep, Shape, indices
from steptime.errors import InputError

# Values of `reduction` in ATen. nn.CrossEntropyLoss ignores the label -100 unless told.
_NONE, _MEAN, _SUM = 0, 1, 2


def _labelled(x: TensorArg, labels: TensorArg) -> Drawn:
    scalar = TensorArg((), x.dtype)
    return {"x": x, "labels": labels, "gradient": scalar, "total": replace(scalar, values="positive")}


def _draw_labelled(draw: Draw) -> Drawn:
    """Log-probabilities of rows, and their labels. Under autocast the loss runs in single precision."""
    classes = draw.pick((*VOCABULARIES, 2, 10, 1000)) if draw.chance(0.6) else draw.size(2, 65536)
    rows = draw.log_int(8, min(65536, USUAL_ELEMENTS // classes))
    dtype = "float32" if draw.chance(0.7) else draw.floating()
    return _labelled(TensorArg((rows, classes), dtype), indices((rows,), classes))


def _draw_pixels(draw: Draw) -> Drawn:
    side, classes = draw.log_int(16, 512), draw.pick((2, 19, 21, 150))
    batch = draw.log_int(1, max(1, min(64, USUAL_ELEMENTS // (classes * side * side))))
    return _labelled(TensorArg((batch, classes, side, side)), indices((batch, side, side), classes))


def _reduced(draw: Draw, shape: Shape) -> Drawn:
    """Values, probabilities, how their losses are reduced, and the gradient of that."""
    x, reduction = TensorArg(shape, draw.floating()), draw.pick((_MEAN, _SUM, _NONE), (0.8, 0.1, 0.1))
    gradient = x if reduction == _NONE else TensorArg((), x.dtype)
    return {"x": x, "probability": replace(x, values="unit"), "gradient": gradient, "reduction": reduction}


def _draw_outcomes(draw: Draw) -> Drawn:
    """One click probability per sample as in DLRM, or several labels."""
    rows = draw.log_int(32, 262144)
    return _reduced(draw, draw.pick(((rows,), (rows, 1), (rows, draw.log_int(2, 128)))))


def _draw_values(draw: Draw) -> Drawn:
    rows = draw.log_int(32, 65536)
    return _reduced(draw, draw.pick(((rows,), (rows, draw.log_int(1, 512)))))


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


def _one_block(kernel: str, x: Operand, reads: tuple[Operand, ...], writes: tuple[Operand, ...]) -> Launch:
    """Rows of scores met by the threads of one block."""
    rows, classes = x.shape[0], x.shape[1]
    nearest = 2 ** round(math.log2(max(1, rows // _ROWS_OF_THREAD)))
    threads = min(_MOST_THREADS, max(_LEAST_THREADS, nearest))
    passes = math.ceil(rows / threads)
    facts = {"labels": rows, "columns": classes, "threads": threads, "footprint_bytes": x.nbytes}
    grids = ((1.0, passes), (1.0, passes * math.log2(1 + x.nbytes / 1e4) / 10), (1.0, passes * min(1.0, classes / 32)))
    return Launch(kernel, rows, reads, writes, facts, grids, "", x.dtype)


def _by_pixel(kernel: str, x: Operand, reads: tuple[Operand, ...], writes: tuple[Operand, ...]) -> Launch:
    """A block of 1,024 threads per sample, more where it has more than 131,072 pixels (ATen)."""
    pixels, samples = x.numel // x.shape[1], x.shape[0]
    facts = {"rows": pixels, "columns": x.shape[1], "samples": samples, "footprint_bytes": x.nbytes}
    blocks = samples * max(1, math.ceil(pixels / samples / _PIXEL_THREADS) // _PIXEL_BLOCKS)
    passes = math.ceil(pixels / blocks / _PIXEL_THREADS)
    # A warp meets the planes of its pixels' classes: 32 neighbours are 4 sectors of one plane, or one each of as many.
    sectors = min(1.0, x.shape[1] / 8)
    grids = ((blocks, passes), (blocks, passes * sectors), (pixels / _PIXEL_THREADS, 1.0))
    return Launch(kernel, pixels, reads, writes, facts, grids, "", x.dtype)


def _nll(call: GpuCall) -> list[Launch]:
    """A label of every row or pixel picks one of its scores."""
    way, pixels = call.name.rpartition("_")[2], "2d" in call.name
    first = 1 if way == "backward" else 0
    x, labels = call.tensor(first), call.tensor(first + 1)
    if len(x.shape) < 2:
        raise InputError(f"{call.op}: scores {x.shape} have no classes")
    picked, result = x.numel // x.shape[1], fresh(x.shape, x.dtype)
    reads, writes = ((touched(x, picked), labels), ()) if way == "forward" else ((labels,), (touched(result, picked),))
    if call.integer(first + 3, _MEAN) == _NONE:
        return _not_reduced(x, labels, call.tensor(0), result, backward=way == "backward")
    if pixels:
        kernel = _by_pixel(f"nll_loss2d_{way}_kernel", x, reads, writes)
    else:
        kernel = _one_block(f"nll_loss_{way}_reduce_cuda_kernel_2d", x, reads, writes)
    if way == "backward":
        return [cleared(result), kernel]
    zero, average = cleared(fresh((), x.dtype)), Launch("nll_loss2d_forward_size_average_kernel", 1, grids=((1.0, 1.0),))
    return [zero, zero, kernel, average] if pixels else [kernel]


def _not_reduced(x: Operand, labels: Operand, gradient: Operand, result: Operand, *, backward: bool) -> list[Launch]:
    """Every row or pixel by itself: a gather along the classes, or the gradient scattered into zeros."""
    grids, met = scatter_grids(labels.numel), touched(result if backward else x, labels.numel)
    rows = labels.numel
    facts = {"rows": rows, "columns": x.shape[1], "picked": 1, "footprint_bytes": x.nbytes, "reuse": 0.0}
    reads, writes = ((labels, gradient), met) if backward else ((labels, met), fresh(labels.shape, x.dtype))
    launch = Launch(SCATTER_GATHER, rows, reads, (writes,), facts, grids, "written" if backward else "", x.dtype)
    return [cleared(result), launch] if backward else [launch]


def _mse(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    differences = pointwise((x, call.tensor(1)), fresh(x.shape, x.dtype), tag=x.dtype)
    return [differences, *(_summed(x, call.gpu) if call.integer(2, _MEAN) != _NONE else ())]


def _cross_entropy(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    losses = pointwise((x, call.tensor(1)), fresh(x.shape, x.dtype), tag=x.dtype)
    if call.integer(3, _MEAN) == _NONE:
        return [losses]
    return [losses, *_summed(x, call.gpu), memcpy(hot((), x.dtype, 4), fresh((), x.dtype))]


def _cross_entropy_of_logits(call: GpuCall) -> list[Launch]:
    x, target = call.tensor(0), call.tensor(1)
    again, result = _again(x), fresh(x.shape, x.dtype)
    # The logarithm of the sigmoid, ones, less the target, times the logits, less the logarithm.
    results = [pointwise((x,), result, tag="logarithm" + x.dtype), cleared(result)]
    chain = ((again, target), (again, _again(x)), (again, again))
    results += [pointwise(reads, result, tag=f"{index}{x.dtype}") for index, reads in enumerate(chain)]
    return results + (_summed(x, call.gpu) if call.integer(4, _MEAN) != _NONE else [])


def _spread(gradient: Operand, x: Operand) -> Operand:
    """The gradient of a sum as every element sees it."""
    return replace(gradient, shape=x.shape, strides=(0,) * len(x.shape)) if gradient.shape == () else gradient


def _cross_entropy_backward(call: GpuCall) -> list[Launch]:
    gradient, x, target = (call.tensor(position) for position in range(3))
    results = [pointwise((_spread(gradient, x), x, target), fresh(x.shape, x.dtype), tag=x.dtype)]
    if call.integer(4, _MEAN) == _MEAN:
        results.append(pointwise((_again(x),), _again(x), tag="divided" + x.dtype, existing=True))
    return results


def _mse_backward(call: GpuCall) -> list[Launch]:
    gradient, x, target = (call.tensor(position) for position in range(3))
    result = fresh(x.shape, x.dtype)
    return [cleared(result), pointwise((x, target, _spread(gradient, x)), result, tag="backward" + x.dtype)]


FAMILY = Family(
    name="loss",
    sweep=KernelSweep(
        (1.5, _draw_labelled, "nll_loss_forward(*x, labels, None, 1, -100)"),
        (1.5, _draw_labelled, "nll_loss_backward(*gradient, x, labels, None, 1, -100, total)"),
        (0.3, _draw_pixels, "nll_loss2d_forward(*x, labels, None, 1, -100)"),
        (0.3, _draw_pixels, "nll_loss2d_backward(*gradient, x, labels, None, 1, -100, total)"),
        (
            *(1.4, _draw_outcomes, (0.5, "binary_cross_entropy(*probability, probability, None, reduction)")),
            (0.5, "binary_cross_entropy_with_logits(*x, probability, None, None, reduction)"),
        ),
        (0.8, _draw_outcomes, "binary_cross_entropy_backward(*gradient, *probability, probability, None, reduction)"),
        (0.7, _draw_values, "mse_loss(*x, x, reduction)"),
        (0.7, _draw_values, "mse_loss_backward(*gradient, *x, x, reduction)"),
    ),
    weight=3.0,
    rules={
        **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), of_contiguous(_nll, 0)),
        **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll),
        **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _mse),
        **dict.fromkeys(("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"), _mse_backward),
        "binary_cross_entropy": _cross_entropy,
        "binary_cross_entropy_backward": _cross_entropy_backward,
        "binary_cross_entropy_with_logits": _cross_entropy_of_logits,
    },
    kin="huber_loss huber_loss_backward smooth_l1_loss smooth_l1_loss_backward",
)
