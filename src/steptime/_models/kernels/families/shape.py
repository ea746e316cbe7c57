"""Ops that put tensors together or take them apart: cat, stack, split, and the backward of slices and selections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from steptime._models.kernels.call import Argument, TensorArg, contiguous
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import INDEXED, WITH_INDEX, GpuCall, Launch, Operand, fresh, hot
from steptime._models.kernels.launches.indexed import over_indices
from steptime._models.kernels.launches.iterator import asked_bytes, copies, fill
from steptime._models.kernels.sweep import SEQUENCES, USUAL_BYTES, Draw, Drawn, KernelSweep, Shape
from steptime.errors import InputError

_JOINED = "cat(*parts, axis)"
_MOVED = ("constant_pad_nd(*x, [1, 1, 1, 1], 0.0)", "repeat(*x, [times, 1])", "roll(*x, [shift], [axis])", "flip(*x, [axis])")
_TRIANGLES = ("tril(*x)", "triu(*x)")


def _draw_interaction(draw: Draw) -> Drawn:
    """DLRM: dense features and one looked-up vector per table, side by side; behind the interaction, features and triangle."""
    batch, dim = draw.log_int(64, 65536), draw.pick((8, 16, 32, 64, 128))
    dense = TensorArg((batch, dim), draw.floating())
    if draw.chance(0.3):
        return {"parts": (dense, TensorArg((batch, draw.log_int(10, 1500)), dense.dtype)), "axis": 1}
    return {"parts": (dense,) * draw.log_int(2, 64), "axis": 1}


def _draw_branches(draw: Draw) -> Drawn:
    """Inception's branches along the channels, or gradients of query, key and value along the features."""
    dtype = draw.floating()
    if draw.chance(0.5):
        batch, side = draw.log_int(1, 128), draw.pick((8, 17, 35))
        channels = [draw.pick((32, 64, 96, 192, 320, 384)) for _ in range(int(draw.rng.integers(2, 6)))]
        return {"parts": tuple(TensorArg((batch, count, side, side), dtype) for count in channels), "axis": 1}
    part = TensorArg((draw.log_int(1, 64), draw.pick(SEQUENCES), draw.width(64, 2048)), dtype)
    return {"parts": (part,) * draw.pick((2, 3)), "axis": -1}


def _draw_flattened(draw: Draw) -> Drawn:
    """Gradients of many sizes in one flat buffer."""
    return {"parts": tuple(TensorArg((draw.log_int(16, 2_000_000),)) for _ in range(draw.log_int(2, 128))), "axis": 0}


def _draw_stacked(draw: Draw) -> Drawn:
    part = TensorArg(draw.activation_shape(4_000_000), draw.floating())
    axis = draw.pick((0, 0, 1 if len(part.shape) > 1 else 0))
    return {"parts": (part,) * draw.log_int(2, 32), "axis": axis}


def _draw_split(draw: Draw) -> Drawn:
    """Parts copied out of one buffer, as sharded data parallelism does after it gathered its parameters."""
    sizes = tuple(draw.log_int(8, 4096) for _ in range(draw.log_int(2, 32)))
    ranks = draw.pick((1, 2, 4, 8)) if draw.chance(0.5) else draw.log_int(16, 8192)
    return {"x": TensorArg((ranks, sum(sizes)), draw.floating()), "sizes": sizes}


def _within(whole: Shape, gradient: TensorArg, **bounds: Argument) -> Drawn | None:
    """The gradient of a part of the whole, unless that is larger than usual."""
    usual = replace(gradient, shape=whole).nbytes <= USUAL_BYTES
    return {"whole": whole, "gradient": gradient, **bounds} if usual else None


def _draw_slice_gradient(draw: Draw) -> Drawn | None:
    """A slice's gradient in zeros of the whole's shape: one third of a projection, or the tokens before the last."""
    rows, features, dtype = draw.tokens(), draw.width(16), draw.floating()
    if draw.chance(0.5):
        parts = draw.pick((2, 3, 4))
        start = draw.below(parts) * features
        gradient = TensorArg((rows, features), dtype)
        return _within((rows, parts * features), gradient, start=start, end=start + features)
    batch, sequence = draw.log_int(1, 32), draw.pick(SEQUENCES)
    gradient = TensorArg((batch, sequence - 1, features), dtype)
    return _within((batch, sequence, features), gradient, start=0, end=sequence - 1)


def _draw_selection_gradient(draw: Draw) -> Drawn | None:
    """One token's gradient (BERT's pooler takes the first) in zeros of the whole's shape."""
    batch, sequence, features = draw.log_int(1, 128), draw.pick(SEQUENCES), draw.width(16)
    gradient = TensorArg((batch, features), draw.floating())
    return _within((batch, sequence, features), gradient, index=draw.below(sequence))


def _draw_rearranged(draw: Draw) -> Drawn | None:
    """Padding, repeating, rolling, flipping and triangles of masks."""
    dtype, kind = draw.floating(), draw.below(len(_MOVED) + 1)
    if kind == len(_MOVED):
        side = draw.log_int(16, 4096)
        draw.form(_TRIANGLES)
        return {"x": TensorArg((side, side), dtype)}
    form = draw.form(_MOVED[kind : kind + 1])
    if "pad" in form:
        x = TensorArg((draw.log_int(1, 128), draw.size(3, 512), *(draw.log_int(7, 112),) * 2), dtype)
        return {"x": x} if x.nbytes <= USUAL_BYTES else None
    x = TensorArg((draw.tokens(8192), draw.width(16, 2048)), dtype)
    if "repeat" in form:
        return {"x": x, "times": draw.pick((2, 3, 4))}
    shift = draw.pick((1, 3, 7)) if "roll" in form else None
    return {"x": x, "shift": shift, "axis": draw.below(2)}


# What ops that only move elements launch: joining, splitting, padding, repeating, rolling, triangles.

# Tensors that one launch joins (ATen's CatArrayBatchedCopy), and the bytes of its vector.
_MOST_JOINED, _VECTOR_BYTES = 128, 16
_JOINED_BLOCK, _MOVED_BLOCK = 512, 1024  # elements


def _joined(call: GpuCall) -> list[Launch]:
    parts = call.tensor_list(0)
    if not parts:
        raise InputError(f"{call.op}: an empty list, expected at least one tensor")
    if len(parts) == 1:
        return copies(fresh(parts[0].shape, parts[0].dtype), parts[0])
    axis = call.integer(1, 0) % (len(parts[0].shape) + (call.name == "stack"))
    if call.name == "cat" and len({part.dtype for part in parts}) > 1:
        return _copied_one_by_one(parts, axis)
    item = parts[0].item_bytes
    # What of each part lies in one piece in the result.
    runs = [math.prod(part.shape[axis:]) for part in parts]
    total, largest = sum(part.numel for part in parts), max(part.numel for part in parts)
    vectors = all(run % (_VECTOR_BYTES // item) == 0 for run in runs)
    kernel = "CatArrayBatchedCopy_vectorized" if vectors else "CatArrayBatchedCopy_alignedK_contig"
    if call.name == "cat" and not _laid_alike(parts):
        kernel = "CatArrayBatchedCopy"
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
        "sector_bytes": sum(map(asked_bytes, parts)) if kernel == "CatArrayBatchedCopy" else 0.0,
    }
    grids = ((len(parts), largest), (len(parts), 1.0), (largest / _JOINED_BLOCK, len(parts)))
    results = []
    for start in range(0, len(parts), _MOST_JOINED):
        count = sum(part.numel for part in parts[start : start + _MOST_JOINED])
        read = replace(parts[0], shape=(count,), strides=(1,))
        written = fresh((count,), parts[0].dtype)
        results.append(Launch(kernel, count, (read,), (written,), facts, grids, "", parts[0].dtype))
    return results


def _copied_one_by_one(parts: Sequence[Operand], axis: int) -> list[Launch]:
    """Tensors of several dtypes: each is copied to its place in the widest of them (native/cuda/Shape.cu, cat_out_cuda)."""
    widest = max(parts, key=lambda part: part.item_bytes).dtype
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    strides = fresh(tuple(shape), widest).strides
    return [launch for part in parts for launch in copies(replace(fresh(part.shape, widest), strides=strides), part)]


def _laid_alike(parts: Sequence[Operand]) -> bool:
    """Whether all parts are row-major, or all channels-last: others are joined by a kernel that walks strides."""
    channels = all(len(part.shape) == 4 and _in_order(part, (0, 2, 3, 1)) for part in parts)
    return channels or all(_in_order(part, range(len(part.shape))) for part in parts)


def _in_order(part: Operand, order: Iterable[int]) -> bool:
    shape, strides = zip(*((part.shape[axis], part.strides[axis]) for axis in order), strict=True) if part.shape else ((), ())
    alike = zip(shape, strides, contiguous(shape), strict=True)
    return all(stride == expected for size, stride, expected in alike if size != 1)


def _split(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    axis = call.integer(2, 0) % len(x.shape)
    results = []
    for length in call.integers(1):
        part = tuple(length if index == axis else item for index, item in enumerate(x.shape))
        results += copies(fresh(part, x.dtype), replace(x, shape=part))
    return results


def _into_zeros(call: GpuCall) -> list[Launch]:
    """Zeros of the whole, and the gradient copied into its place."""
    gradient = call.tensor(0)
    shape, axis = call.integers(1), call.integer(2)
    axis %= len(shape)
    zeros = fresh(shape, gradient.dtype)
    strides = zeros.strides if len(gradient.shape) == len(shape) else zeros.strides[:axis] + zeros.strides[axis + 1 :]
    target = replace(hot(gradient.shape, gradient.dtype, zeros.nbytes), strides=strides)
    return [fill(zeros), *copies(target, gradient)]


def _windows_gradient(call: GpuCall) -> list[Launch]:
    """Zeros of the whole, numbers along the windows, and their gradients added up (native/cuda/UnfoldBackwardKernel.cu)."""
    gradient, shape = call.tensor(0), call.integers(1)
    numbers = over_indices(WITH_INDEX, shape[call.integer(2) % len(shape)], path="indices")
    return [fill(fresh(shape, gradient.dtype)), numbers, *copies(fresh(gradient.shape, gradient.dtype), gradient)]


def _padded(call: GpuCall) -> list[Launch]:
    """The whole filled and the inner part copied; where it is only cut, as in gradients of it, a copy (native/PadNd.cpp)."""
    x = call.tensor(0)
    shape, padding = list(x.shape), call.integers(1)
    for index in range(len(padding) // 2):
        shape[-1 - index] += padding[2 * index] + padding[2 * index + 1]
    whole = fresh(tuple(shape), x.dtype)
    if all(each <= 0 for each in padding):
        return copies(whole, replace(x, shape=whole.shape))
    inner = replace(hot(x.shape, x.dtype, whole.nbytes), strides=whole.strides)
    return [fill(whole), *copies(inner, x)]


def _repeated(call: GpuCall) -> list[Launch]:
    """One copy over (times, size) of every axis, the first with stride 0 in the source."""
    x, times = call.tensor(0), call.integers(1)
    sizes = (1,) * (len(times) - len(x.shape)) + x.shape
    strides = (0,) * (len(times) - len(x.shape)) + x.strides
    steps = contiguous(tuple(length * count for length, count in zip(sizes, times, strict=True)))
    shape, source, target = [], [], []
    for length, count, stride, step in zip(sizes, times, strides, steps, strict=True):
        shape += [count, length]
        source += [0, stride]
        target += [step * length, step]
    written = replace(fresh(tuple(shape), x.dtype), strides=tuple(target))
    return copies(written, replace(x, shape=tuple(shape), strides=tuple(source)))


def _moved(kernel: str, x: Operand, axes: tuple[int, ...]) -> Launch:
    facts = {"size_0": x.shape[-1] if x.shape else 1, "axis": axes[0] % len(x.shape) if axes else 0}
    path = "moved" if kernel == INDEXED else ""
    return Launch(kernel, x.numel, (x,), (fresh(x.shape, x.dtype),), facts, ((x.numel / _MOVED_BLOCK, 1.0),), path, x.dtype)


def _rolled(call: GpuCall) -> list[Launch]:
    """Axis after axis, each into a tensor of its own; without axes, as one row."""
    x, axes = call.tensor(0), call.integers(2)
    results = []
    for axis in axes or (0,):
        results.append(_moved("roll_cuda_kernel", x, (axis,)))
        x = hot(x.shape, x.dtype, 2 * x.nbytes)
    return results


FAMILY = Family(
    name="shape",
    sweep=KernelSweep(
        *((1.5, _draw_interaction, _JOINED), (1, _draw_branches, _JOINED), (0.5, _draw_flattened, _JOINED)),
        (0.8, _draw_stacked, "stack(*parts, axis)"),
        (0.8, _draw_split, "split_with_sizes_copy(*x, sizes, 1)"),
        (1, _draw_slice_gradient, "slice_backward(*gradient, whole, 1, start, end, 1)"),
        (0.5, _draw_selection_gradient, "select_backward(*gradient, whole, 1, index)"),
        (0.6, _draw_rearranged, *_MOVED, *_TRIANGLES),
        most_bytes=2 * USUAL_BYTES,
    ),
    kin="unfold_backward",
    weight=4.5,
    rules={
        **dict.fromkeys(("cat", "stack"), _joined),
        "split_with_sizes_copy": _split,
        **dict.fromkeys(("slice_backward", "select_backward"), _into_zeros),
        "unfold_backward": _windows_gradient,
        "constant_pad_nd": _padded,
        "repeat": _repeated,
        "roll": _rolled,
        "flip": lambda call: [_moved(INDEXED, call.tensor(0), call.integers(1))],
        **dict.fromkeys(("tril", "triu"), lambda call: [_moved("triu_tril_kernel", call.tensor(0), ())]),
    },
)
