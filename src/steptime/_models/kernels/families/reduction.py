"""Reductions over the last, the first, several or all axes: bias gradients, means, maxima, norms, running sums."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from steptime._models.kernels.call import DtypeArg, TensorArg
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import DEFAULTS, MEMSET, GpuCall, Launch, Operand, fresh, hot
from steptime._models.kernels.launches.iterator import fill, of_contiguous, reduction
from steptime._models.kernels.sweep import USUAL_ELEMENTS, VOCABULARIES, Draw, Drawn, KernelSweep


def _draw_bias_gradient(draw: Draw) -> Drawn:
    """The output gradient of a linear layer, of which the sum over rows is keepdim as a row."""
    rows, features = draw.tokens(), draw.width(1, 16384)
    return {"x": TensorArg((rows, min(features, USUAL_ELEMENTS // rows)), draw.floating())}


def _draw_summed(draw: Draw) -> Drawn:
    """Reduced over the last axis, the first, all, or all but the channels."""
    x, keepdim = draw.activation(), draw.chance(0.3)
    widened = DtypeArg("float32") if x.dtype != "float32" and draw.chance(0.2) else None
    draw.form()
    rank = len(x.shape)
    axes = [(-1,), (-1,), (0,), tuple(range(rank))]
    if rank >= 3:
        axes += [(0, *range(2, rank)), tuple(range(rank - 1))]
    return {"x": x, "axes": draw.pick(axes), "keepdim": keepdim, "dtype": widened}


def _draw_whole(draw: Draw) -> Drawn:
    draw.form()
    return {"x": draw.activation()}


def _draw_running(draw: Draw) -> Drawn:
    """Positions from an attention mask, offsets from lengths."""
    if draw.chance(0.5):
        return {"x": TensorArg((draw.log_int(1, 512), draw.log_int(16, 4096)), "int64", high=2)}
    return {"x": TensorArg((draw.log_int(16, 1_000_000),), draw.pick(("int64", "float32")), high=100)}


def _draw_predicted(draw: Draw) -> Drawn:
    """The most likely token of each row, and several of them."""
    classes = draw.pick((*VOCABULARIES, 1000, 10))
    return {"x": TensorArg((draw.log_int(1, 1024), classes), draw.floating())}


def _draw_table_rows(draw: Draw) -> Drawn:
    """Row-wise Adagrad's mean of squares per row of a table."""
    dim = draw.pick((16, 32, 64, 128))
    return {"x": TensorArg((draw.log_int(1000, 40_000_000 // dim), dim))}


# What reductions launch: sums, means, extremes, norms, running sums and the largest values of a row.

_BLOCK = 1024  # elements
_SCAN_THREADS = 512  # of a block
_MOST_BLOCKS = 32  # of an SM, however small (CUDA, compute capabilities 8.0 and 9.0)
# Values up to which ATen sorts what it ranked by comparisons.
_BITONIC = 32


def _axes(x: Operand, axes: tuple[int, ...]) -> Iterable[int]:
    return axes or range(len(x.shape))


def _plain(call: GpuCall) -> list[Launch]:
    x, dtype = call.tensor(0), call.dtype_keyword("")
    return reduction(x, _axes(x, call.integers(1)), call.gpu, tag=x.dtype + (f">{dtype}" if dtype else ""))


def _norm(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    return reduction(x, _axes(x, call.integers(2)), call.gpu, tag=x.dtype)


def _dot(call: GpuCall) -> list[Launch]:
    """The library sums products in blocks, then their sums in one; both vectors are read as a reduction reads one."""
    x, other = call.tensor(0), call.tensor(1)
    *before, summed = reduction(x, (0,), call.gpu, tag=x.dtype)
    blocks = hot((max(1, x.numel // _BLOCK),), x.dtype, x.nbytes)
    return [*before, replace(summed, reads=(x, other)), *reduction(blocks, (0,), call.gpu, tag=x.dtype)]


def _extreme(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    if call.overload == "default":
        return reduction(x, range(len(x.shape)), call.gpu, tag=x.dtype)
    return reduction(x, (call.integer(1),), call.gpu, outputs=2, tag=x.dtype, path="-indexed")


def _extremes(call: GpuCall) -> list[Launch]:
    x, axis = call.tensor(0), call.keyword("dim")
    return reduction(x, (axis,) if isinstance(axis, int) else range(len(x.shape)), call.gpu, outputs=2, tag=x.dtype)


def _place(call: GpuCall) -> list[Launch]:
    x, axes = call.tensor(0), call.integers(1)
    if axes and x.shape and x.shape[axes[0]] == 1:
        return [fill(fresh(x.shape, "int64"))]
    return reduction(x, _axes(x, axes), call.gpu, tag=x.dtype, path="-indexed")


def _running(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    result = fresh(x.shape, x.dtype)
    if len(x.shape) == 1:
        tiles = ((x.numel / _BLOCK, 1.0),)
        first = Launch("DeviceScanInitKernel", x.numel, (), (), {}, tiles)
        return [first, Launch("DeviceScanKernel", x.numel, (x,), (result,), {}, tiles, "", x.dtype)]
    axis = call.integer(1) % len(x.shape)
    each = x.shape[axis]
    rows = x.numel // max(1, each)
    facts: dict[str, float] = {"outputs": rows, "reduced": each}
    if axis < len(x.shape) - 1:
        # A thread for every sum, side by side, that walks along it and waits for each element (ATen's scan of an outer
        # dimension).
        beside = math.prod(x.shape[axis + 1 :])
        threads = min(beside, _SCAN_THREADS)
        # As blocks of all threads: those of few lie side by side on an SM, as many as it takes of any.
        beside_it = min(_SCAN_THREADS / threads, _MOST_BLOCKS * _SCAN_THREADS / call.gpu.threads_per_sm)
        blocks = rows / beside * math.ceil(beside / _SCAN_THREADS) / beside_it
        facts = {**facts, "chain_ns": DEFAULTS["chain_ns"] * each}
        grids = ((blocks, each), (blocks, 1.0), (rows / _BLOCK, each))
        return [Launch("tensor_kernel_scan_outer_dim", x.numel, (x,), (result,), facts, grids, "", x.dtype)]
    along = _scanning_threads(rows, each)
    blocks = rows * along / _SCAN_THREADS
    facts = {**facts, "block_height": _SCAN_THREADS // along}
    grids = ((blocks, math.ceil(each / (2 * along))), (blocks, 1.0), (rows / 16, each))
    return [Launch("tensor_kernel_scan_innermost_dim", x.numel, (x,), (result,), facts, grids, "", x.dtype)]


def _scanning_threads(rows: int, each: int) -> int:
    """Threads of a block along a row, two elements each; the others take rows beside it (ATen's scan of an inner dimension).

    As the ratio of both lengths says, but where that goes below zero in whole numbers without a sign, which gives the most.
    """
    excess = _SCAN_THREADS.bit_length() - 1 + max(0, each - 1).bit_length() - max(0, rows - 1).bit_length()
    return _SCAN_THREADS if excess < 0 else min(_SCAN_THREADS, max(16, 1 << excess // 2))


# Rows and their length from which ATen ranks a row by several blocks (its should_use_multiblock).
_SHARED_RANKING = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (math.inf, 400))


def _several_blocks(rows: int, each: int) -> bool:
    return each >= next(least for most, least in _SHARED_RANKING if rows <= most)


def _largest(call: GpuCall) -> list[Launch]:
    x, kept = call.tensor(0), call.integer(1)
    each = x.shape[call.integer(2, -1)] if x.shape else 1
    rows = x.numel // max(1, each)
    facts = {"outputs": rows, "reduced": each, "kept": kept}
    names = ["gatherTopK"] + ["bitonicSortKVInPlace" if kept <= _BITONIC else "radixSortKVInPlace"] * (kept > 1)
    if _several_blocks(rows, each):
        # One pass for every 8 bits of an element.
        passes = ["computeBlockDigitCounts", "computeDigitCumSum", "computeBlockwiseWithinKCounts"] * x.item_bytes
        scans = ["DeviceScanByKeyInitKernel", "DeviceScanByKeyKernel"] * 2
        names = ["fill", MEMSET, MEMSET, *passes, "computeBlockwiseKthCounts", *scans, *names]
    grids = ((x.numel / _BLOCK, 1.0), (rows, each / _BLOCK), (rows, 1.0), (rows, kept))
    return [Launch(name, x.numel, (x,), (), facts, grids, "ranked", x.dtype) for name in names]


FAMILY = Family(
    name="reduction",
    sweep=KernelSweep(
        (2.5, _draw_bias_gradient, "sum.dim_IntList(*x, [0], True)"),
        (2, _draw_summed, "sum.dim_IntList(*x, axes, keepdim, dtype=dtype)", "mean.dim(*x, axes, keepdim, dtype=dtype)"),
        (1, _draw_whole, "sum(*x)", "mean(*x)", "max(*x)", "linalg_vector_norm(*x, 2)"),
        (
            *(0.8, lambda draw: {"x": draw.activation(), "axis": draw.pick((-1, 0))}),
            *("amax(*x, [axis], False)", "max.dim(*x, axis, False)", "argmax(*x, axis)"),
        ),
        (0.4, lambda draw: {"x": draw.activation(), "keepdim": draw.chance(0.5)}, "linalg_vector_norm(*x, 2, [-1], keepdim)"),
        (0.3, _draw_running, "cumsum(*x, -1)"),
        (0.1, lambda draw: {"x": draw.activation(), "axis": draw.pick((-1, 0))}, "cumprod(*x, axis)", "logcumsumexp(*x, axis)"),
        (0.3, _draw_predicted, (0.5, "argmax(*x, -1)"), (0.5, "topk(*x, 5, -1)")),
        (0.4, _draw_table_rows, "mean.dim(*x, [1], False)"),
    ),
    weight=6.0,
    rules={
        **dict.fromkeys(("sum", "mean", "amax", "amin", "prod", "all", "any", "std", "var"), _plain),
        **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
        "dot": _dot,
        **dict.fromkeys(("max", "min"), _extreme),
        **dict.fromkeys(("argmax", "argmin"), _place),
        "aminmax": _extremes,
        **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), of_contiguous(_running, 0)),
        "topk": _largest,
    },
    kin="all amin aminmax any argmin dot min norm prod std var",
)
