"""What reductions launch: sums, means, extremes, norms, running sums and the largest values of a row."""

from __future__ import annotations

from collections.abc import Iterable

from steptime._models.kernels.call import Call, DtypeArg
from steptime._models.kernels.launches import Launch, Operand, fresh
from steptime._models.kernels.launches.arguments import base_name, integer, integers, keyword, overload, tensor
from steptime._models.kernels.launches.names import MEMSET
from steptime._models.kernels.launches.pointwise import fill
from steptime._models.kernels.launches.reduce import reduction
from steptime.errors import InputError

_PLAIN = ("sum", "mean", "amax", "amin", "prod", "all", "any", "norm", "std", "var")
_BLOCK = 1024  # elements
# Rows longer than this are ranked by several blocks: between 1,000 and 30,522 in the measured rows.
_TOPK_ONE_BLOCK = 4096


def launches(call: Call) -> list[Launch]:
    """The kernels of one op of the family."""
    name, x = base_name(call.op), tensor(call, 0)
    if name in _PLAIN:
        given = keyword(call, "dtype")
        wanted = f">{given.name}" if isinstance(given, DtypeArg) else ""
        return reduction(x, _axes(x, integers(call, 1)), tag=x.dtype + wanted)
    if name == "linalg_vector_norm":
        return reduction(x, _axes(x, integers(call, 2)), tag=x.dtype)
    if name in ("max", "min"):
        if overload(call.op) == "default":
            return reduction(x, range(len(x.shape)), tag=x.dtype)
        return reduction(x, (integer(call, 1),), outputs=2, tag=x.dtype, path="-indexed")
    if name in ("argmax", "argmin"):
        return _place(call, x)
    if name == "cumsum":
        return _running(x)
    if name == "topk":
        return _largest(x)
    raise InputError(f"{call.op}: no rule says what it launches")


def _axes(x: Operand, given: tuple[int, ...]) -> Iterable[int]:
    return given or range(len(x.shape))


def _place(call: Call, x: Operand) -> list[Launch]:
    axes = integers(call, 1)
    if axes and x.shape and x.shape[axes[0]] == 1:
        return [fill(fresh(x.shape, "int64"))]
    return reduction(x, _axes(x, axes), tag=x.dtype, path="-indexed")


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
