"""Ops that put tensors together or take them apart: cat, stack, split, and the backward of slices and selections."""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import Argument, Call, TensorArg, contiguous
from steptime._models.kernels.draw import (
    SEQUENCES,
    USUAL_BYTES,
    Rng,
    activation_shape,
    chance,
    fits,
    floating,
    log_int,
    mixture,
    pick,
    size,
    tokens,
    width,
)
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Launch, Operand, Rules, by_op, fresh, hot
from steptime._models.kernels.launches.arguments import base_name, integer, integers, tensor, tensor_list
from steptime._models.kernels.launches.copies import copies
from steptime._models.kernels.launches.names import INDEXED
from steptime._models.kernels.launches.pointwise import fill
from steptime.errors import InputError

_MOST_BYTES = 2 * USUAL_BYTES


def _draw_interaction(rng: Rng) -> Call | None:
    """DLRM: dense features and one looked-up vector per table, side by side; behind the interaction, features and triangle."""
    batch, dim = log_int(rng, 64, 65536), pick(rng, (8, 16, 32, 64, 128))
    dtype = floating(rng)
    if chance(rng, 0.3):
        pairs = log_int(rng, 10, 1500)
        parts: tuple[TensorArg, ...] = TensorArg((batch, dim), dtype), TensorArg((batch, pairs), dtype)
    else:
        parts = (TensorArg((batch, dim), dtype),) * log_int(rng, 2, 64)
    return fits(Call("aten::cat.default", (parts, 1)), most_bytes=_MOST_BYTES)


def _draw_branches(rng: Rng) -> Call | None:
    """Inception's branches along the channels, or gradients of query, key and value along the features."""
    dtype = floating(rng)
    if chance(rng, 0.5):
        batch, side = log_int(rng, 1, 128), pick(rng, (8, 17, 35))
        channels = [pick(rng, (32, 64, 96, 192, 320, 384)) for _ in range(int(rng.integers(2, 6)))]
        parts = tuple(TensorArg((batch, count, side, side), dtype) for count in channels)
        return fits(Call("aten::cat.default", (parts, 1)), most_bytes=_MOST_BYTES)
    part = TensorArg((log_int(rng, 1, 64), pick(rng, SEQUENCES), width(rng, 64, 2048)), dtype)
    return fits(Call("aten::cat.default", ((part,) * pick(rng, (2, 3)), -1)), most_bytes=_MOST_BYTES)


def _draw_flattened(rng: Rng) -> Call | None:
    """Gradients of many sizes in one flat buffer."""
    parts = tuple(TensorArg((log_int(rng, 16, 2_000_000),), "float32") for _ in range(log_int(rng, 2, 128)))
    return fits(Call("aten::cat.default", (parts, 0)), most_bytes=_MOST_BYTES)


def _draw_stacked(rng: Rng) -> Call | None:
    part = TensorArg(activation_shape(rng, 4_000_000), floating(rng))
    axis = pick(rng, (0, 0, 1 if len(part.shape) > 1 else 0))
    return fits(Call("aten::stack.default", ((part,) * log_int(rng, 2, 32), axis)), most_bytes=_MOST_BYTES)


def _draw_split(rng: Rng) -> Call | None:
    """Parts copied out of one buffer, as sharded data parallelism does after it gathered its parameters."""
    parts = tuple(log_int(rng, 8, 4096) for _ in range(log_int(rng, 2, 32)))
    ranks = pick(rng, (1, 2, 4, 8)) if chance(rng, 0.5) else log_int(rng, 16, 8192)
    whole = TensorArg((ranks, sum(parts)), floating(rng))
    return fits(Call("aten::split_with_sizes_copy.default", (whole, parts, 1)), most_bytes=_MOST_BYTES)


def _draw_slice_gradient(rng: Rng) -> Call | None:
    """A slice's gradient in zeros of the whole's shape: one third of a projection, or the tokens before the last."""
    rows, features = tokens(rng), width(rng, 16)
    dtype = floating(rng)
    if chance(rng, 0.5):
        parts = pick(rng, (2, 3, 4))
        place = int(rng.integers(parts)) * features
        arguments: tuple[Argument, ...] = (
            TensorArg((rows, features), dtype),
            (rows, parts * features),
            1,
            place,
            place + features,
            1,
        )
    else:
        batch, sequence = log_int(rng, 1, 32), pick(rng, SEQUENCES)
        kept = TensorArg((batch, sequence - 1, features), dtype)
        arguments = (kept, (batch, sequence, features), 1, 0, sequence - 1, 1)
    op = "aten::slice_backward.default"
    return _with_whole(op, arguments, dtype)


def _draw_selection_gradient(rng: Rng) -> Call | None:
    """One token's gradient (BERT's pooler takes the first) in zeros of the whole's shape."""
    batch, sequence, features = log_int(rng, 1, 128), pick(rng, SEQUENCES), width(rng, 16)
    dtype = floating(rng)
    arguments = (TensorArg((batch, features), dtype), (batch, sequence, features), 1, int(rng.integers(sequence)))
    return _with_whole("aten::select_backward.default", arguments, dtype)


def _with_whole(op: str, arguments: tuple[Argument, ...], dtype: str) -> Call | None:
    whole = arguments[1]
    assert isinstance(whole, tuple)
    shape = tuple(length for length in whole if isinstance(length, int))
    return fits(Call(op, arguments), (shape, dtype), most_bytes=USUAL_BYTES)


def _draw_rearranged(rng: Rng) -> Call | None:
    """Padding, repeating, rolling, flipping and triangles of masks."""
    dtype = floating(rng)
    kind = pick(rng, ("pad", "repeat", "roll", "flip", "tril"))
    if kind == "pad":
        x = TensorArg((log_int(rng, 1, 128), size(rng, 3, 512), *(log_int(rng, 7, 112),) * 2), dtype)
        return fits(Call("aten::constant_pad_nd.default", (x, (1, 1, 1, 1), 0.0)), most_bytes=USUAL_BYTES)
    if kind == "tril":
        side = log_int(rng, 16, 4096)
        return Call(pick(rng, ("aten::tril.default", "aten::triu.default")), (TensorArg((side, side), dtype),))
    x = TensorArg((tokens(rng, 8192), width(rng, 16, 2048)), dtype)
    if kind == "repeat":
        return Call("aten::repeat.default", (x, (pick(rng, (2, 3, 4)), 1)))
    if kind == "roll":
        return Call("aten::roll.default", (x, (pick(rng, (1, 3, 7)),), (int(rng.integers(2)),)))
    return Call("aten::flip.default", (x, (int(rng.integers(2)),)))


# What ops that only move elements launch: joining, splitting, padding, repeating, rolling, triangles.

# Tensors that one launch joins (ATen's CatArrayBatchedCopy), and the bytes of its vector.
_MOST_JOINED, _VECTOR_BYTES = 128, 16
_JOINED_BLOCK, _MOVED_BLOCK = 512, 1024  # elements


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
    results = []
    for start in range(0, len(parts), _MOST_JOINED):
        count = sum(part.numel for part in parts[start : start + _MOST_JOINED])
        read = replace(parts[0], shape=(count,), strides=(1,))
        written = fresh((count,), parts[0].dtype)
        results.append(Launch(kernel, count, (read,), (written,), facts, grids, "", parts[0].dtype))
    return results


def _split(call: Call) -> list[Launch]:
    x = tensor(call, 0)
    axis = integer(call, 2, 0) % len(x.shape)
    results = []
    for length in integers(call, 1):
        part = tuple(length if index == axis else item for index, item in enumerate(x.shape))
        results += copies(fresh(part, x.dtype), replace(x, shape=part))
    return results


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
    for index in range(len(padding) // 2):
        shape[-1 - index] += padding[2 * index] + padding[2 * index + 1]
    whole = fresh(tuple(shape), x.dtype)
    inner = replace(hot(x.shape, x.dtype, whole.nbytes), strides=whole.strides)
    return [fill(whole), *copies(inner, x)]


def _repeated(call: Call) -> list[Launch]:
    """One copy over (times, size) of every axis, the first with stride 0 in the source."""
    x, times = tensor(call, 0), integers(call, 1)
    sizes = (1,) * (len(times) - len(x.shape)) + x.shape
    own = (0,) * (len(times) - len(x.shape)) + x.strides
    steps = contiguous(tuple(length * count for length, count in zip(sizes, times, strict=True)))
    shape, source, target = [], [], []
    for length, count, stride, step in zip(sizes, times, own, steps, strict=True):
        shape += [count, length]
        source += [0, stride]
        target += [step * length, step]
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


FAMILY = Family(
    name="shape",
    ops=(
        *("aten::cat.default", "aten::stack.default", "aten::split_with_sizes_copy.default"),
        *("aten::slice_backward.default", "aten::select_backward.default", "aten::constant_pad_nd.default"),
        *("aten::repeat.default", "aten::roll.default", "aten::flip.default", "aten::tril.default", "aten::triu.default"),
    ),
    sweep=mixture(
        *((1.5, _draw_interaction), (1, _draw_branches), (0.5, _draw_flattened), (0.8, _draw_stacked)),
        *((0.8, _draw_split), (1, _draw_slice_gradient), (0.5, _draw_selection_gradient), (0.6, _draw_rearranged)),
    ),
    weight=4.5,
    rules=by_op(_RULES),
)
