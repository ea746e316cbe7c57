"""Calls of layers as models outside the usual sweeps have them: convolutions of every kind, odd products, norms, attention,
large tables and what optimisers do to them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.sweep import (
    FLOATS,
    HALVES,
    MOST_BYTES,
    USUAL_BYTES,
    USUAL_ELEMENTS,
    Draw,
    Drawn,
    KernelSweep,
    Shape,
)
from steptime._units import dtype_bytes

# Operations of the largest convolution of a call, by dtype: a large layer of a large batch.
_MOST_FLOP = {"float32": 1e11, "bfloat16": 8e11, "float16": 8e11}


# Image, taps, stride, dilation, groups, inputs and outputs of a layer.
Geometry = tuple[Shape, Shape, int, int, int, int, int]


def _geometry(draw: Draw, kind: str) -> Geometry:
    """A layer of a kind."""
    side, channels = draw.pick((7, 8, 14, 16, 28, 32, 56, 64, 112, 128)), draw.size(16, 1024)
    if kind == "large":
        tap = draw.pick((1, 1, 3))
        return (side,) * 2, (tap,) * 2, draw.pick((1, 2), (0.8, 0.2)), 1, 1, draw.size(64, 3072), draw.size(64, 3072)
    if kind == "depthwise":
        tap = draw.pick((3, 3, 5, 7, 9))
        return (
            (side,) * 2,
            (tap,) * 2,
            draw.pick((1, 2), (0.75, 0.25)),
            draw.pick((1, 2), (0.9, 0.1)),
            channels,
            channels,
            channels,
        )
    if kind == "grouped":
        # Mostly as many outputs as inputs, of a few channels each: cuDNN has kernels of its own for these.
        groups, each = draw.pick((2, 4, 8, 16, 32, 64)), draw.pick((4, 8, 16, 24, 32, 40, 48, 64, 112))
        inputs = groups * (each if draw.chance(0.7) else max(1, draw.size(32, 2048) // groups))
        outputs = inputs if draw.chance(0.8) else groups * max(1, draw.size(32, 2048) // groups)
        tap = draw.pick((1, 3, 3, 5))
        return (side,) * 2, (tap,) * 2, draw.pick((1, 2), (0.75, 0.25)), 1, groups, inputs, outputs
    if kind == "line":
        groups, length = draw.pick((1, 1, 1, 16, channels)), draw.log_int(64, 16384)
        channels = channels // groups * groups or groups
        return (
            (length,),
            (draw.pick((1, 3, 7, 15, 31)),),
            draw.pick((1, 2)),
            draw.pick((1, 2, 8), (0.7, 0.2, 0.1)),
            groups,
            channels,
            channels,
        )
    if kind == "solid":
        volume = (draw.pick((4, 8, 16, 32)), side, side)
        return volume, (draw.pick((1, 3, 3)),) * 3, draw.pick((1, 2)), 1, 1, draw.size(3, 256), draw.size(16, 256)
    tap = draw.pick((3, 3, 5))
    return (side,) * 2, (tap,) * 2, 1, draw.pick((2, 4, 6)), 1, draw.size(32, 512), draw.size(32, 512)


_KINDS = {"large": 0.25, "depthwise": 0.22, "grouped": 0.2, "line": 0.12, "solid": 0.11, "dilated": 0.1}


def _draw_convolution(draw: Draw) -> Drawn | None:
    return layer_of(draw, _geometry(draw, draw.pick(tuple(_KINDS), tuple(_KINDS.values()))))


def layer_of(draw: Draw, geometry: Geometry, *, padded: bool = True, **limits: float) -> Drawn | None:
    """The arguments of a layer; `padded`, so that its image stays as large as its stride leaves it."""
    image, taps, stride, dilation, groups, inputs, outputs = geometry
    padding = tuple(dilation * (tap // 2) * padded for tap in taps)
    sides = zip(image, taps, padding, strict=True)
    result = tuple((side + 2 * pad - dilation * (tap - 1) - 1) // stride + 1 for side, tap, pad in sides)
    weights = (outputs, inputs // groups, *taps)
    return _layer(draw, (inputs, *image), (outputs, *result), weights, (stride, padding, dilation, groups), **limits)


def _draw_transposed(draw: Draw) -> Drawn | None:
    """As decoders of images and of sound widen: the taps twice the stride, or as many."""
    rank, stride = draw.pick((1, 2, 2, 3)), draw.pick((2, 2, 4))
    taps = stride * draw.pick((1, 2))
    padding, image = (taps - stride) // 2, (draw.pick((8, 14, 16, 28, 32, 64)),) * rank
    result = tuple((side - 1) * stride - 2 * padding + taps for side in image)
    inputs, outputs = draw.size(32, 1024), draw.size(16, 512)
    return _layer(
        draw, (inputs, *image), (outputs, *result), (inputs, outputs, *(taps,) * rank), (stride, (padding,) * rank, 1, 1)
    )


def _layer(
    draw: Draw,
    image: Shape,
    result: Shape,
    weights: Shape,
    geometry: tuple[int, Shape, int, int],
    *,
    work: float = 1.0,
    last: float = 0.5,
    most_bytes: float = 0.0,
) -> Drawn | None:
    """A layer of as many samples as its operations and bytes allow.

    `work` is the share of the most operations that it may take, `last` of layers with channels last, `most_bytes` of its larger
    image, where it is not the usual.
    """
    stride, padding, dilation, groups = geometry
    rank, dtype = len(padding), draw.floating()
    positions = min(math.prod(image[1:]), math.prod(result[1:]))
    flop, most = 2.0 * positions * math.prod(weights), max(math.prod(image), math.prod(result))
    elements = most_bytes // dtype_bytes(dtype) if most_bytes else USUAL_ELEMENTS
    samples = min(draw.log_int(1, 256), int(work * _MOST_FLOP[dtype] / max(flop, 1.0)), int(elements) // max(most, 1))
    if samples < 1 or min((*image, *result)) < 1:
        return None
    tensors = {
        "x": TensorArg((samples, *image), dtype),
        "y": TensorArg((samples, *result), dtype),
        "weight": TensorArg(weights, dtype),
    }
    if rank > 1 and draw.chance(last):
        tensors = {name: tensor.channels_last() for name, tensor in tensors.items()}
    biased = draw.chance(0.3)
    return tensors | {
        "bias": TensorArg((result[0],), dtype) if biased else None,
        "bias_shape": (result[0],) if biased else None,
        "stride": (stride,) * rank,
        "padding": padding,
        "dilation": (dilation,) * rank,
        "none": (0,) * rank,
        "groups": groups,
        "mask": (True, True, biased),
    }


BACKWARD = "convolution_backward(*y, x, weight, bias_shape, stride, padding, dilation, {}, none, groups, mask)"
FORWARD = "convolution(*x, weight, bias, stride, padding, dilation, False, none, groups)"
CONVOLUTIONS = KernelSweep(
    (3, _draw_convolution, FORWARD),
    (3, _draw_convolution, BACKWARD.format(False)),
    (0.7, _draw_transposed, "convolution(*x, weight, bias, stride, padding, dilation, True, none, groups)"),
    (0.7, _draw_transposed, BACKWARD.format(True)),
)

# Widths that no power of two divides well: patches, class tokens, vocabularies, classes, features of tables.
_ODD = (13, 27, 49, 77, 100, 147, 196, 197, 257, 300, 367, 479, 577, 999, 1000, 1001, 1500, 3136, 10007, 30522, 50257)


def _draw_odd(draw: Draw) -> Drawn | None:
    """A product of which at least one size is odd, with an operand either way round, of many rows."""
    sizes = [draw.pick(_ODD), draw.width(16) if draw.chance(0.6) else draw.pick(_ODD), draw.tokens(300_000)]
    draw.rng.shuffle(sizes)
    dtype = draw.floating()
    rows, inner, columns = sizes
    most = 1.2e11 if dtype == "float32" else 1.5e12
    if 2.0 * rows * inner * columns > most or 4 * max(rows * inner, inner * columns, rows * columns) > USUAL_BYTES * 2:
        return None
    left = TensorArg((rows, inner), dtype) if draw.chance(0.6) else TensorArg((inner, rows), dtype).transposed()
    right = TensorArg((inner, columns), dtype) if draw.chance(0.5) else TensorArg((columns, inner), dtype).transposed()
    return {"left": left, "right": right, "bias": TensorArg((columns,), dtype)}


def _draw_many(draw: Draw) -> Drawn | None:
    batch = draw.log_int(4, 4096)
    rows, inner, columns = (draw.pick((*_ODD[:18], 32, 64, 80, 128)) for _ in range(3))
    dtype = draw.floating()
    most = 5e10 if dtype == "float32" else 5e11
    if (
        2.0 * batch * rows * inner * columns > most
        or 4 * batch * max(rows * inner, inner * columns, rows * columns) > USUAL_BYTES
    ):
        return None
    right = (
        TensorArg((batch, columns, inner), dtype).transposed()
        if draw.chance(0.5)
        else TensorArg((batch, inner, columns), dtype)
    )
    return {"left": TensorArg((batch, rows, inner), dtype), "right": right}


PRODUCTS = KernelSweep(
    (3, _draw_odd, (0.6, "mm(*left, right)"), (0.4, "addmm(bias, *left, right)")),
    (1, _draw_many, "bmm(*left, right)"),
    most_bytes=2 * MOST_BYTES,
)


def _draw_norm(draw: Draw) -> Drawn:
    """Images, volumes and lines of any number of channels; groups of them; features of several axes."""
    axes = draw.pick((1, 2, 2, 2, 3))
    side = draw.pick(((64, 512, 2048), (7, 14, 28, 56, 64, 112), (8, 16, 32))[axes - 1])
    channels = draw.pick((32, 64, 96, 128, 256, 320, 512, 640, 1024, 1280, 2048))
    plane = side**axes
    samples = max(1, min(draw.log_int(1, 256), USUAL_ELEMENTS // (channels * plane)))
    dtype = draw.floating()
    x = TensorArg((samples, channels, *(side,) * axes), dtype)
    moved = x.channels_last() if axes > 1 and draw.chance(0.5) else x
    groups = draw.pick((1, 8, 16, 32))
    each = TensorArg((channels,), "float32")
    return {
        "x": x,
        "moved": moved,
        "weight": each,
        "own": TensorArg((channels,), dtype),
        "running": each,
        "positive": replace(each, values="positive"),
        "group_mean": TensorArg((samples, groups), dtype),
        "group_rstd": TensorArg((samples, groups), dtype, values="positive"),
        "samples": samples,
        "channels": channels,
        "plane": plane,
        "groups": groups,
        "reserved": TensorArg((0,), "uint8", high=2),
    }


NORMS = KernelSweep(
    (1, _draw_norm, "native_group_norm(*x, own, own, samples, channels, plane, groups, 1e-5)"),
    (
        *(1, _draw_norm),
        "native_group_norm_backward(*x, x, group_mean, group_rstd, own, samples, channels, plane, groups, [True, True, True])",
    ),
    (1, _draw_norm, "native_batch_norm(*moved, weight, weight, running, positive, True, 0.1, 1e-5)"),
    (
        *(1, _draw_norm),
        "native_batch_norm_backward"
        "(*moved, moved, weight, running, positive, running, positive, True, 1e-5, [True, True, True])",
    ),
    (1, _draw_norm, "cudnn_batch_norm(*moved, weight, weight, running, positive, True, 0.1, 1e-5)"),
)


def _draw_batch_norm(draw: Draw) -> Drawn:
    """Images and volumes, mostly with channels last, of as many channels as networks have; ranks that share it."""
    axes = draw.pick((1, 2, 3), (0.1, 0.65, 0.25))
    side = draw.pick(((64, 512, 2048), (4, 7, 8, 14, 16, 28, 32, 56, 64, 112), (4, 7, 8, 16, 28, 32))[axes - 1])
    channels = draw.pick((16, 32, 64, 96, 128, 160, 256, 320, 512, 640, 1024, 2048))
    samples = max(1, min(draw.log_int(2, 512), USUAL_ELEMENTS // (channels * side**axes)))
    shares = (0.5, 0.0, 0.5) if "cudnn" in draw.form() else (0.4, 0.2, 0.4)  # cuDNN takes no bfloat16 beside single weights
    x = TensorArg((samples, channels, *(side,) * axes), draw.pick(FLOATS, shares))
    each, ranks = TensorArg((channels,)), draw.pick((2, 4, 8))
    return {
        "moved": x.channels_last() if axes > 1 and draw.chance(0.8) else x,
        "weight": each,
        "running": each,
        "positive": replace(each, values="positive"),
        "reserved": TensorArg((0,), "uint8", high=2),
        "means": TensorArg((ranks, channels)),
        "deviations": TensorArg((ranks, channels), values="positive"),
        "counts": TensorArg((ranks,), values="positive"),
        "whole_counts": TensorArg((ranks,), "int32", high=1000),
    }


BATCH_NORMS = KernelSweep(
    (2, _draw_batch_norm, "cudnn_batch_norm(*moved, weight, weight, running, positive, True, 0.1, 1e-5)"),
    (
        *(3, _draw_batch_norm),
        "cudnn_batch_norm_backward(*moved, moved, weight, running, positive, running, positive, 1e-5, reserved)",
    ),
    (1, _draw_batch_norm, "native_batch_norm(*moved, weight, weight, running, positive, True, 0.1, 1e-5)"),
    (
        *(1, _draw_batch_norm),
        "native_batch_norm_backward"
        "(*moved, moved, weight, running, positive, running, positive, True, 1e-5, [True, True, True])",
    ),
    (
        *(2, _draw_batch_norm, "batch_norm_stats(*moved, 1e-5)"),
        "batch_norm_gather_stats_with_counts(*moved, means, deviations, running, positive, 0.1, 1e-5, counts)",
        "batch_norm_elemt(*moved, weight, weight, running, positive, 1e-5)",
        "batch_norm_backward_reduce(*moved, moved, running, positive, weight, True, True, True)",
        "batch_norm_backward_elemt(*moved, moved, running, positive, weight, running, running, whole_counts)",
    ),
)


def _draw_attention(draw: Draw, dtypes: tuple[str, ...] = HALVES) -> Drawn | None:
    """Head sizes and lengths that are no powers of two; fewer heads of keys than of queries; heads one behind the other."""
    dtype, dim = draw.pick(dtypes), draw.pick((16, 24, 32, 40, 48, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256))
    length = draw.pick((16, 37, 49, 64, 77, 100, 144, 196, 197, 256, 577, 1024, 1500, 2048, 4096))
    heads = draw.pick((1, 3, 6, 8, 12, 16, 24, 32))
    batch = max(1, min(draw.log_int(1, 2048), USUAL_ELEMENTS // 2 // (length * heads * dim)))
    shared = draw.pick((1, 2, 4, 8)) if "flash" in draw.form() else 1
    if heads % shared or 4.0 * batch * heads * length * length * dim > 4 * _MOST_FLOP[dtype] / 4:
        return None

    behind, returned = draw.chance(0.3), draw.chance(0.5)  # as after rotary embeddings; gradients mostly are not
    wide = dim if "cudnn" not in draw.form() or draw.chance(0.8) else max(8, dim // 16 * 8)  # of the values

    def laid(count: int, width: int, *, behind: bool = behind) -> TensorArg:
        row = count * width
        strides = None if behind else (length * row, width, row, 1)
        return TensorArg((batch, count, length, width), dtype, strides)

    masked = TensorArg((batch, heads, length, length), dtype, (length * length, 0, length, 1))
    fits = length % 16 == 0 and masked.nbytes <= USUAL_BYTES and draw.chance(0.6)
    return {
        "q": laid(heads, dim),
        "k": laid(heads // shared, dim),
        "v": laid(heads // shared, wide),
        "out": laid(heads, wide),
        "gradient": laid(heads, wide, behind=behind and returned),
        "mask": masked if fits else None,
        "square": TensorArg((length, length), dtype) if fits else None,
        "causal": draw.chance(0.4) and not fits,
        "length": length,
        "lse": TensorArg((batch, heads, length, 1)),
        "padded_lse": TensorArg((batch, heads, -(-length // 32) * 32)),
        "seed": TensorArg((), "int64", high=1 << 20),
    }


_CUDNN = "_scaled_dot_product_cudnn_attention(*q, *k, *v, square, True, 0.0, causal, False)"
_CUDNN_BACKWARD = (
    "_scaled_dot_product_cudnn_attention_backward"
    "(*gradient, q, k, v, out, lse, seed, seed, square, None, None, length, length, 0.0, causal)"
)


def _draw_masked(draw: Draw) -> Drawn | None:
    """Windows and other masks over long texts, for which cuDNN plans long: few, and all with one."""
    drawn = _draw_attention(draw)
    return drawn if drawn is not None and drawn["square"] is not None and int(str(drawn["length"])) >= 256 else None


MASKED = KernelSweep((1, _draw_masked, _CUDNN), (1.3, _draw_masked, _CUDNN_BACKWARD))
ATTENTION = KernelSweep(
    (1, _draw_attention, "_scaled_dot_product_flash_attention(*q, *k, *k, 0.0, causal, False)"),
    (1, _draw_attention, _CUDNN),
    (1, _draw_attention, _CUDNN_BACKWARD),
    (
        *(1, partial(_draw_attention, dtypes=FLOATS)),
        "_scaled_dot_product_efficient_attention(*q, *k, *k, mask, True, 0.0, causal)",
    ),
    (
        *(1, partial(_draw_attention, dtypes=FLOATS)),
        "_scaled_dot_product_efficient_attention_backward"
        "(*gradient, q, k, k, mask, out, padded_lse, seed, seed, 0.0, [True, True, True, False], causal)",
    ),
)


def _draw_table(draw: Draw) -> Drawn:
    """A table of gigabytes, or many small tensors: what optimisers do to them one by one and in lists."""
    dim = draw.pick((16, 32, 64, 128))
    table = TensorArg((draw.log_int(100_000, USUAL_ELEMENTS // dim), dim))
    small = tuple(TensorArg((draw.log_int(16, 4096), draw.pick((1, 64, 256)))) for _ in range(draw.log_int(1, 400)))
    many = (table,) if draw.chance(0.4) else small
    return {
        "table": table,
        "positive": replace(table, values="positive"),
        "many": many,
        "positives": tuple(replace(each, values="positive") for each in many),
        "index": TensorArg((draw.log_int(1000, 4_000_000 // dim * 16),), "int64", high=table.shape[0]),
    }


OPTIMIZERS = KernelSweep(
    (
        *(1, _draw_table, "addcmul_(*positive, table, table, value=1.0)", "sqrt(*positive)", "add_.Tensor(*positive, 1e-10)"),
        *("addcdiv_(table, *table, *positive, value=-0.01)", "mul_.Tensor(*table, 0.9)", "lerp_.Scalar(table, *table, 0.1)"),
    ),
    (
        *(1, _draw_table, "_foreach_addcmul_.Scalar(positives, *many, *many, 1.0)", "_foreach_sqrt(*positives)"),
        *("_foreach_addcdiv_.Scalar(many, *many, *positives, -0.01)", "_foreach_mul_.Scalar(many, 0.9)"),
        "_foreach_lerp_.Scalar(many, *many, 0.1)",
    ),
    (1, _draw_table, "embedding(table, index)"),
)


# Casts to eight bits


def _draw_cast(draw: Draw) -> Drawn:
    """What products of eight bits are fed: activations, gradients and weights of 16 bits, as they lie or the other way."""
    rows, width = max(16, draw.tokens() // 16 * 16), draw.pick((1024, 2048, 4096, 5120, 8192, 14336, 16384))
    rows = min(rows, USUAL_BYTES // (2 * width))
    x = TensorArg((rows, width), draw.pick(HALVES, (0.9, 0.1)))
    return {"x": x, "y": TensorArg(x.shape, "float8"), "turned": TensorArg((width, rows), "float8").transposed()}


CASTS = KernelSweep((1, _draw_cast, (0.6, "copy_(y, *x)"), (0.4, "copy_(turned, *x)")), most_bytes=MOST_BYTES)
