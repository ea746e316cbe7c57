"""What ops that only move elements launch: joining, splitting, padding, repeating, rolling, triangles."""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import Call, contiguous
from steptime._models.kernels.launches import Launch, Operand, Rules, fresh, hot
from steptime._models.kernels.launches.arguments import base_name, integer, integers, tensor, tensor_list
from steptime._models.kernels.launches.copies import copies
from steptime._models.kernels.launches.names import INDEXED
from steptime._models.kernels.launches.pointwise import fill
from steptime.errors import InputError

# Tensors that one launch joins (ATen's CatArrayBatchedCopy), and the bytes of its vector.
_MOST_JOINED, _VECTOR_BYTES = 128, 16
_JOINED_BLOCK, _MOVED_BLOCK = 512, 1024  # elements


def launches(call: Call) -> list[Launch]:
    """The kernels of one op of the family."""
    rule = _RULES.get(base_name(call.op))
    if rule is None:
        raise InputError(f"{call.op}: no rule says what it launches")
    return rule(call)


def _joined(call: Call) -> list[Launch]:
    parts = tensor_list(call, 0)
    if not parts:
        raise InputError(f"{call.op}: an empty list, expected at least one tensor")
    if len(parts) == 1:
        return copies(fresh(parts[0].shape, parts[0].dtype), parts[0])
    axis = integer(call, 1, 0) % (len(parts[0].shape) + (base_name(call.op) == "stack"))
    item = parts[0].item_bytes
    # What of each part lies in one piece in the result.
    runs = [math.prod(part.shape[axis:]) for part in parts]
    total, largest = sum(part.numel for part in parts), max(part.numel for part in parts)
    vectors = all(run % (_VECTOR_BYTES // item) == 0 for run in runs)
    kernel = "CatArrayBatchedCopy_vectorized" if vectors else "CatArrayBatchedCopy_alignedK_contig"
    facts: dict[str, float] = {
        "items": len(parts),
        "run_bytes": max(runs) * item,
        "least_run_bytes": min(runs) * item,
        "outer": total / max(1, sum(runs)),
        "largest_share": largest / max(1, total),
        "largest": largest,
        "aligned_4": all(run * item % 4 == 0 for run in runs),
        "aligned_8": all(run * item % 8 == 0 for run in runs),
        "first_axis": axis == 0,
    }
    grids = ((float(len(parts)), float(largest)), (float(len(parts)), 1.0), (largest / _JOINED_BLOCK, float(len(parts))))
    found = []
    for start in range(0, len(parts), _MOST_JOINED):
        count = sum(part.numel for part in parts[start : start + _MOST_JOINED])
        read = replace(parts[0], shape=(count,), strides=(1,))
        written = fresh((count,), parts[0].dtype)
        found.append(Launch(kernel, count, (read,), (written,), facts, grids, "", parts[0].dtype))
    return found


def _split(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    axis = integer(call, 2, 0) % len(x.shape)
    found = []
    for size in integers(call, 1):
        part = tuple(size if place == axis else own for place, own in enumerate(x.shape))
        found += copies(fresh(part, x.dtype), replace(x, shape=part))
    return found


def _into_zeros(call: Call) -> list[Launch]:
    """Zeros of the whole, and the gradient copied into its place."""
    gradient = tensor(call, 0)
    shape, axis = integers(call, 1), integer(call, 2)
    axis %= len(shape)
    zeros = fresh(shape, gradient.dtype)
    strides = zeros.strides if len(gradient.shape) == len(shape) else zeros.strides[:axis] + zeros.strides[axis + 1 :]
    place = replace(hot(gradient.shape, gradient.dtype, zeros.nbytes), strides=strides)
    return [fill(zeros), *copies(place, gradient)]


def _padded(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    shape, padding = list(x.shape), integers(call, 1)
    for place in range(len(padding) // 2):
        shape[-1 - place] += padding[2 * place] + padding[2 * place + 1]
    whole = fresh(tuple(shape), x.dtype)
    inner = replace(hot(x.shape, x.dtype, whole.nbytes), strides=whole.strides)
    return [fill(whole), *copies(inner, x)]


def _repeated(call: Call) -> list[Launch]:
    """One copy over (times, size) of every axis, the first with stride 0 in the source."""
    x, times = tensor(call, 0), integers(call, 1)
    sizes = (1,) * (len(times) - len(x.shape)) + x.shape
    own = (0,) * (len(times) - len(x.shape)) + x.strides
    steps = contiguous(tuple(size * count for size, count in zip(sizes, times, strict=True)))
    shape, source, target = [], [], []
    for size, count, stride, step in zip(sizes, times, own, steps, strict=True):
        shape += [count, size]
        source += [0, stride]
        target += [step * size, step]
    written = replace(fresh(tuple(shape), x.dtype), strides=tuple(target))
    return copies(written, replace(x, shape=tuple(shape), strides=tuple(source)))


def _moved(kernel: str, x: Operand, axes: tuple[int, ...]) -> Launch:
    facts = {"size_0": x.shape[-1] if x.shape else 1, "axis": axes[0] % len(x.shape) if axes else 0}
    path = "moved" if kernel == INDEXED else ""
    return Launch(kernel, x.numel, (x,), (fresh(x.shape, x.dtype),), facts, ((x.numel / _MOVED_BLOCK, 1.0),), path, x.dtype)


_RULES: dict[str, Rules] = {
    "cat": _joined,
    "stack": _joined,
    "split_with_sizes_copy": _split,
    "slice_backward": _into_zeros,
    "select_backward": _into_zeros,
    "constant_pad_nd": _padded,
    "repeat": _repeated,
    "roll": lambda call: [_moved("roll_cuda_kernel", tensor(call, 0), integers(call, 2))],
    "flip": lambda call: [_moved(INDEXED, tensor(call, 0), integers(call, 1))],
    "tril": lambda call: [_moved("triu_tril_kernel", tensor(call, 0), ())],
    "triu": lambda call: [_moved("triu_tril_kernel", tensor(call, 0), ())],
}
