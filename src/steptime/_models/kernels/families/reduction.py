"""Reductions over the last, the first, several or all axes: bias gradients, means, maxima, norms, running sums."""

from __future__ import annotations

from collections.abc import Iterable

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._models.kernels.draw import (
    USUAL_BYTES,
    VOCABULARIES,
    Rng,
    activation,
    chance,
    floating,
    log_int,
    mixture,
    options,
    pick,
    tokens,
    width,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import GpuCall, Launch, Operand, fresh
from steptime._models.kernels.launches.arguments import base_name, integer, integers, keyword, overload, tensor
from steptime._models.kernels.launches.names import MEMSET
from steptime._models.kernels.launches.pointwise import fill
from steptime._models.kernels.launches.reduce import reduction
from steptime.errors import InputError


def _draw_axes(rng: Rng, rank: int) -> tuple[int, ...]:
    """The last axis, the first, all, or all but the channels."""
    forms = [(-1,), (-1,), (0,), tuple(range(rank))]
    if rank >= 3:
        forms += [(0, *range(2, rank)), tuple(range(rank - 1))]
    return pick(rng, forms)


def _draw_bias_gradient(rng: Rng) -> Call:
    """The sum over rows of a linear layer's output gradient, kept as a row."""
    rows, features = tokens(rng), width(rng, 1, 16384)
    features = min(features, USUAL_BYTES // 4 // rows)
    return Call("aten::sum.dim_IntList", (TensorArg((rows, features), floating(rng)), (0,), True))


def _draw_summed(rng: Rng) -> Call:
    x, kept = activation(rng), chance(rng, 0.3)
    widened = options(dtype=DtypeArg("float32")) if x.dtype != "float32" and chance(rng, 0.2) else ()
    op = pick(rng, ("aten::sum.dim_IntList", "aten::mean.dim"))
    return Call(op, (x, _draw_axes(rng, len(x.shape)), kept), widened)


def _draw_whole(rng: Rng) -> Call:
    forms: tuple[tuple[str, tuple[Argument, ...]], ...] = (
        ("aten::sum.default", ()),
        ("aten::mean.default", ()),
        ("aten::max.default", ()),
        ("aten::linalg_vector_norm.default", (2,)),
    )
    op, rest = pick(rng, forms)
    return Call(op, (activation(rng), *rest))


def _draw_greatest(rng: Rng) -> Call:
    x = activation(rng)
    axis = pick(rng, (-1, 0))
    forms = (
        Call("aten::amax.default", (x, (axis,), False)),
        Call("aten::max.dim", (x, axis, False)),
        Call("aten::argmax.default", (x, axis)),
    )
    return pick(rng, forms)


def _draw_norm(rng: Rng) -> Call:
    x = activation(rng)
    return Call("aten::linalg_vector_norm.default", (x, 2, (-1,), chance(rng, 0.5)))


def _draw_running(rng: Rng) -> Call:
    """Positions from an attention mask, offsets from lengths."""
    if chance(rng, 0.5):
        x = TensorArg((log_int(rng, 1, 512), log_int(rng, 16, 4096)), "int64", high=2)
    else:
        x = TensorArg((log_int(rng, 16, 1_000_000),), pick(rng, ("int64", "float32")), high=100)
    return Call("aten::cumsum.default", (x, -1))


def _draw_predicted(rng: Rng) -> Call:
    """The most likely token of each row, and several of them."""
    classes = pick(rng, (*VOCABULARIES, 1000, 10))
    x = TensorArg((log_int(rng, 1, 1024), classes), floating(rng))
    return Call("aten::argmax.default", (x, -1)) if chance(rng, 0.5) else Call("aten::topk.default", (x, 5, -1))


def _draw_table_rows(rng: Rng) -> Call:
    """Row-wise Adagrad's mean of squares per row of a table."""
    dim = pick(rng, (16, 32, 64, 128))
    return Call("aten::mean.dim", (TensorArg((log_int(rng, 1000, 40_000_000 // dim), dim)), (1,), False))


# What reductions launch: sums, means, extremes, norms, running sums and the largest values of a row.

_PLAIN = ("sum", "mean", "amax", "amin", "prod", "all", "any", "norm", "std", "var")
_BLOCK = 1024  # elements
# Rows longer than this are ranked by several blocks: between 1,000 and 30,522 in the measured rows.
_TOPK_ONE_BLOCK = 4096


def launches(call: GpuCall) -> list[Launch]:
    """The kernels of one op of the family."""
    name, x = base_name(call.op), tensor(call, 0)
    if name in _PLAIN:
        given = keyword(call, "dtype")
        wanted = f">{given.name}" if isinstance(given, DtypeArg) else ""
        return reduction(x, _axes(x, integers(call, 1)), call.gpu, tag=x.dtype + wanted)
    if name == "linalg_vector_norm":
        return reduction(x, _axes(x, integers(call, 2)), call.gpu, tag=x.dtype)
    if name in ("max", "min"):
        if overload(call.op) == "default":
            return reduction(x, range(len(x.shape)), call.gpu, tag=x.dtype)
        return reduction(x, (integer(call, 1),), call.gpu, outputs=2, tag=x.dtype, path="-indexed")
    if name in ("argmax", "argmin"):
        return _place(call, x)
    if name == "cumsum":
        return _running(x)
    if name == "topk":
        return _largest(x)
    raise InputError(f"{call.op}: no rule says what it launches")


def _axes(x: Operand, given: tuple[int, ...]) -> Iterable[int]:
    return given or range(len(x.shape))


def _place(call: GpuCall, x: Operand) -> list[Launch]:
    axes = integers(call, 1)
    if axes and x.shape and x.shape[axes[0]] == 1:
        return [fill(fresh(x.shape, "int64"))]
    return reduction(x, _axes(x, axes), call.gpu, tag=x.dtype, path="-indexed")


def _running(x: Operand) -> list[Launch]:
    result = fresh(x.shape, x.dtype)
    if len(x.shape) == 1:
        tiles = ((x.numel / _BLOCK, 1.0),)
        first = Launch("DeviceScanInitKernel", x.numel, (), (), {}, tiles)
        return [first, Launch("DeviceScanKernel", x.numel, (x,), (result,), {}, tiles, "", x.dtype)]
    each = x.shape[-1]
    rows = x.numel // max(1, each)
    facts = {"outputs": rows, "reduced": each}
    # A block of 16 rows of threads walks each row, two elements a thread (ATen's scan).
    grids = ((rows / 16, float(each)), (float(rows), float(each)))
    return [Launch("tensor_kernel_scan_innermost_dim", x.numel, (x,), (result,), facts, grids, "", x.dtype)]


def _largest(x: Operand) -> list[Launch]:
    each = x.shape[-1]
    facts = {"outputs": x.numel // max(1, each), "reduced": each}

    def kernel(name: str) -> Launch:
        return Launch(name, x.numel, (x,), (), facts, ((x.numel / _BLOCK, 1.0),), "ranked", x.dtype)

    last = ["gatherTopK", "bitonicSortKVInPlace"]
    if each <= _TOPK_ONE_BLOCK:
        return [kernel(name) for name in last]
    # One pass for every 8 bits of an element.
    passes = ["computeBlockDigitCounts", "computeDigitCumSum", "computeBlockwiseWithinKCounts"] * x.item_bytes
    scans = ["DeviceScanByKeyInitKernel", "DeviceScanByKeyKernel"] * 2
    names = ["fill", MEMSET, MEMSET, *passes, "computeBlockwiseKthCounts", *scans, *last]
    return [kernel(name) for name in names]


FAMILY = Family(
    name="reduction",
    ops=(
        *("aten::sum.dim_IntList", "aten::mean.dim", "aten::sum.default", "aten::mean.default", "aten::max.default"),
        *("aten::amax.default", "aten::max.dim", "aten::argmax.default", "aten::linalg_vector_norm.default"),
        *("aten::cumsum.default", "aten::topk.default"),
    ),
    sweep=mixture(
        *((2.5, _draw_bias_gradient), (2, _draw_summed), (1, _draw_whole), (0.8, _draw_greatest), (0.4, _draw_norm)),
        *((0.3, _draw_running), (0.3, _draw_predicted), (0.4, _draw_table_rows)),
    ),
    weight=6.0,
    rules=launches,
)
