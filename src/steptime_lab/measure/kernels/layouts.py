"""Calls of memory-bound ops as unseen models make them: operands permuted, broadcast, large, along other axes."""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import TensorArg, contiguous
from steptime._models.kernels.sweep import USUAL_ELEMENTS, Draw, Drawn, KernelSweep, Shape

# Tokens and sides that mixers, window attention and images have; odd ones are as usual as even ones.
_TOKENS = (49, 64, 77, 144, 196, 197, 256, 257, 576, 784, 1024, 1500, 3136, 4096)
_SIDES = (7, 8, 14, 16, 28, 32, 56, 64, 112, 128)
_WIDTHS = (16, 32, 64, 80, 96, 192, 320, 384, 512, 768, 1024, 1280, 1536, 3072)


def _fitting(shape: Shape) -> Shape:
    """The shape with fewer samples where it has too many elements."""
    samples = max(1, min(shape[0], USUAL_ELEMENTS // math.prod(shape[1:])))
    return (samples, *shape[1:])


def _shape(draw: Draw) -> Shape:
    if draw.chance(0.55):
        return _fitting((draw.log_int(1, 256), draw.pick(_TOKENS), draw.pick(_WIDTHS)))
    if draw.chance(0.5):
        heads, dim = draw.pick((3, 4, 6, 8, 12, 16, 24, 32)), draw.pick((16, 32, 64, 80, 128))
        return _fitting((draw.log_int(1, 512), draw.pick(_TOKENS), heads, dim))
    side = draw.pick(_SIDES)
    return _fitting((draw.log_int(1, 256), draw.size(8, 1024), side, side))


def _reordered(draw: Draw, x: TensorArg) -> TensorArg:
    """A tensor of the same shape in another order of memory: two axes exchanged, or channels last."""
    rank = len(x.shape)
    if rank == 4 and draw.chance(0.5):
        return x.channels_last()
    first, second = sorted(draw.rng.choice(rank, 2, replace=False).tolist())
    order = list(range(rank))
    order[first], order[second] = second, first
    stored = tuple(x.shape[axis] for axis in order)
    return replace(x, shape=stored, strides=None).permuted(*order)


def _sliced(draw: Draw, x: TensorArg) -> TensorArg:
    """Part of a tensor that is two to four times as wide, as a chunk of a projection is."""
    parts = draw.pick((2, 3, 4))
    wide = TensorArg((*x.shape[:-1], parts * x.shape[-1]))
    steps = [math.prod(wide.shape[axis + 1 :]) for axis in range(len(wide.shape))]
    return replace(x, strides=tuple(steps))


def sliced(part: TensorArg, whole: TensorArg) -> TensorArg:
    """A tensor that is the first part of another along every axis."""
    return replace(part, strides=contiguous(whole.shape))


def _draw_operands(draw: Draw) -> Drawn:
    """Operands of one shape of which one or both lie otherwise; half of the pairs differ in dtype, as autocast makes them."""
    x = TensorArg(_shape(draw), draw.floating())
    other = replace(x, dtype=draw.floating() if draw.chance(0.4) else x.dtype)
    change = _reordered if draw.chance(0.8) else _sliced
    moved = change(draw, other)
    return {"x": x, "other": other, "moved": moved, "moved_x": replace(moved, dtype=x.dtype)}


def _draw_broadcast(draw: Draw) -> Drawn:
    """An activation with one number per channel, per token, or per sample and channel: biases, gates, scales, masks."""
    x = TensorArg(_shape(draw), draw.floating())
    kept = draw.pick([(axis,) for axis in range(len(x.shape))] + [(0, axis) for axis in range(1, len(x.shape))])
    small = tuple(size if axis in kept else 1 for axis, size in enumerate(x.shape))
    gate = TensorArg(small, draw.floating() if draw.chance(0.3) else x.dtype)
    image = x.channels_last() if len(x.shape) == 4 and draw.chance(0.5) else x
    return {"x": image, "gate": gate, "result": image}


def _draw_summed(draw: Draw) -> Drawn:
    """Any axes of an activation in any order of memory: gradients of biases and gates, pooled features."""
    x = TensorArg(_shape(draw), draw.floating())
    x = x if draw.chance(0.4) else _reordered(draw, x)
    rank = len(x.shape)
    axes = draw.pick(
        [(axis,) for axis in range(rank)] + [tuple(each for each in range(rank) if each != axis) for axis in range(rank)]
    )
    return {"x": x, "axes": axes, "keepdim": draw.chance(0.5)}


def _draw_rows(draw: Draw) -> Drawn:
    """Rows to be normalised that are not row-major."""
    x = TensorArg(_shape(draw), draw.floating())
    moved, weight = _reordered(draw, x), TensorArg((x.shape[-1],), x.dtype)
    each = TensorArg((*x.shape[:-1], 1), values="positive")
    return {"x": x, "moved": moved, "weight": weight, "features": x.shape[-1], "each": each, "dtype": None}


def _draw_rolled(draw: Draw) -> Drawn:
    side, width = draw.pick(_SIDES), draw.pick(_WIDTHS)
    x = TensorArg(_fitting((draw.log_int(1, 256), side, side, width)), draw.floating())
    shift = max(1, side // 4)
    return {"x": x, "shifts": (-shift, -shift), "axes": (1, 2), "one": draw.pick((-1, -2))}


def _draw_joined(draw: Draw) -> Drawn:
    x = TensorArg(_shape(draw), draw.floating())
    parts = tuple(x if draw.chance(0.5) else _reordered(draw, x) for _ in range(draw.pick((2, 3, 4))))
    rest = replace(x, shape=_fitting(x.shape))
    return {"parts": (rest, *parts[1:]) if rest.shape == x.shape else parts, "axis": draw.pick((0, 1, -1))}


LAYOUTS = KernelSweep(
    (
        *(3, _draw_operands, "add.Tensor(*x, *moved)", "mul.Tensor(*x, moved)", "add_.Tensor(*x, *moved)"),
        *("add.Tensor(*moved, *other)", "sub.Tensor(*moved, *x)", "div.Tensor(*x, moved)"),
    ),
    (3, _draw_operands, "copy_(x, *moved)", "copy_(moved, *x)", 'clone(*moved, memory_format="contiguous_format")'),
    (
        *(2, _draw_operands, "gelu(*moved)", "silu(*moved)", "sigmoid(*moved)", "relu(*moved)", "mul.Tensor(*moved, 0.125)"),
        *("gelu_backward(*x, moved_x)", "silu_backward(*moved_x, x)", "threshold_backward(*x, moved_x, 0)"),
    ),
    (2, _draw_operands, "_to_copy(*moved, dtype=bfloat16)", "_to_copy(*moved, dtype=float32)"),
    (
        *(3, _draw_broadcast, "add.Tensor(*x, gate)", "mul.Tensor(*x, gate)", "add_.Tensor(*x, gate)", "mul_.Tensor(*x, gate)"),
        "div.Tensor(*x, gate)",
    ),
    (3, _draw_summed, (0.8, "sum.dim_IntList(*x, axes, keepdim)"), (0.2, "mean.dim(*x, axes, keepdim)")),
    (
        *(1.5, _draw_rows, "native_layer_norm(*moved, [features], weight, weight, 1e-5)"),
        *("_softmax(*moved, -1, False)", "_log_softmax(*moved, -1, False)", "_softmax(*x, 1, False)"),
    ),
    (1, _draw_rolled, "roll(*x, shifts, axes)", "flip(*x, [one])"),
    (1, _draw_joined, "cat(parts, axis)"),
)


def _draw_scanned(draw: Draw) -> Drawn:
    x = TensorArg(_shape(draw), draw.pick(("float32", "bfloat16"), (0.7, 0.3)))
    return {"x": x, "axis": draw.pick((0, 1, -1)), "few": draw.pick((1, 2, 8, 64))}


def _draw_ranked(draw: Draw) -> Drawn:
    rows, columns = draw.log_int(1, 8192), draw.log_int(16, 100_000)
    x = TensorArg(
        (max(1, min(rows, USUAL_ELEMENTS // 8 // columns)), columns), draw.pick(("float32", "bfloat16", "int64")), high=1000
    )
    return {"x": x, "few": max(1, min(columns, draw.pick((1, 2, 8, 64)))), "downwards": draw.chance(0.5)}


SCANS = KernelSweep(
    (2, _draw_scanned, "cumsum(*x, axis)", "cumprod(*x, axis)", "logcumsumexp(*x, axis)"),
    (1, _draw_ranked, "sort(*x, -1, downwards)", "topk(*x, few, -1)"),
)


def _draw_messages(draw: Draw) -> Drawn:
    """Features of nodes gathered to edges and summed back: any number of edges for a node."""
    nodes, edges, width = draw.log_int(1000, 1_000_000), draw.log_int(4000, 4_000_000), draw.pick((1, 16, 64, 128, 256))
    nodes, edges = (max(1, min(count, USUAL_ELEMENTS // width)) for count in (nodes, edges))
    dtype = draw.pick(("float32", "bfloat16"), (0.7, 0.3))
    index = TensorArg((edges,), "int64", high=nodes)
    return {
        "x": TensorArg((nodes, width), dtype),
        "messages": TensorArg((edges, width), dtype),
        "index": index,
        "wide": replace(index, shape=(edges, width), strides=(1, 0)),
    }


SCATTERS = KernelSweep(
    (2, _draw_messages, "index_add(*x, 0, index, *messages)", "index_select(*x, 0, index)", "gather(*x, 0, wide)"),
    (
        *(2, _draw_messages, "scatter_add(*x, 0, wide, *messages)", "index.Tensor(*x, [index])"),
        *('scatter_reduce.two(*x, 0, wide, *messages, "amax")', "index_put(*x, [index], *messages, True)"),
    ),
)


def _draw_scaled_image(draw: Draw) -> Drawn:
    side, factor = draw.pick((8, 14, 16, 28, 32, 56, 64, 128)), draw.pick((2, 2, 4))
    shape = _fitting((draw.log_int(1, 64), draw.size(3, 512), side * factor, side * factor))
    y = TensorArg(shape, draw.floating())
    x = replace(y, shape=(*shape[:2], side, side))
    last = draw.chance(0.4)
    return {
        "x": x.channels_last() if last else x,
        "y": y.channels_last() if last else y,
        "small": x.shape,
        "image": (side, side),
        "large": (side * factor, side * factor),
    }


def _draw_signal(draw: Draw) -> Drawn:
    length = draw.pick((128, 256, 400, 512, 1024, 2048, 4096, 16384))
    rows = max(1, min(draw.log_int(1, 65536), USUAL_ELEMENTS // 4 // length))
    half = length // 2 + 1
    return {
        "x": TensorArg((rows, length)),
        "spectrum": TensorArg((rows, length), "complex64"),
        "half": TensorArg((rows, half), "complex64"),
        "length": length,
    }


IMAGES_AND_SIGNALS = KernelSweep(
    (2, _draw_scaled_image, "upsample_nearest2d(*x, large)", "upsample_bilinear2d(*x, large, False)"),
    (
        *(2, _draw_scaled_image, "upsample_nearest2d_backward(*y, large, small)"),
        "upsample_bilinear2d_backward(*y, large, small, False)",
    ),
    (1, _draw_signal, "_fft_r2c(*x, [1], 0, True)", "_fft_c2c(*spectrum, [1], 0, True)", "_fft_c2r(*half, [1], 2, length)"),
)
