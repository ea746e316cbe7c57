"""Attention over many short samples, losses over whole vocabularies, products that are narrow on one side."""

from __future__ import annotations

from functools import partial

from steptime._models.kernels.call import DtypeArg, TensorArg
from steptime._models.kernels.sweep import FLOATS, HALVES, USUAL_BYTES, USUAL_ELEMENTS, Draw, Drawn, KernelSweep

_CUDNN = "_scaled_dot_product_cudnn_attention(*q, *q, *q, None, True, 0.0, False, False)"
_CUDNN_BACKWARD = (
    "_scaled_dot_product_cudnn_attention_backward"
    "(*q, q, q, q, q, lse, seed, seed, None, None, None, length, length, 0.0, False)"
)
_EFFICIENT = "_scaled_dot_product_efficient_attention(*q, *q, *q, None, True, 0.0, False)"
_EFFICIENT_BACKWARD = (
    "_scaled_dot_product_efficient_attention_backward"
    "(*q, q, q, q, None, q, padded_lse, seed, seed, 0.0, [True, True, True, False], False)"
)


def _draw_heads(draw: Draw, dtypes: tuple[str, ...] = HALVES) -> Drawn | None:
    """Columns of tables, windows of images, patches: lengths of any kind, up to thousands of samples."""
    dtype, dim = draw.pick(dtypes), draw.pick((8, 16, 24, 32, 48, 64))
    length, heads = draw.log_int(4, 320), draw.pick((1, 2, 3, 4, 6, 8, 12))
    each = length * heads * dim
    if each * 64 > USUAL_ELEMENTS // 2:
        return None
    batch = draw.log_int(64, min(16_384, USUAL_ELEMENTS // 2 // each))
    row = heads * dim
    return {
        "q": TensorArg((batch, heads, length, dim), dtype, (length * row, dim, row, 1)),
        "length": length,
        "lse": TensorArg((batch, heads, length, 1)),
        "padded_lse": TensorArg((batch, heads, -(-length // 32) * 32)),
        "seed": TensorArg((), "int64", high=1 << 20),
    }


SHORT_HEADS = KernelSweep(
    (2, _draw_heads, _CUDNN),
    (3, _draw_heads, _CUDNN_BACKWARD),
    (1, partial(_draw_heads, dtypes=("float32",)), _EFFICIENT),
    (1, partial(_draw_heads, dtypes=("float32",)), _EFFICIENT_BACKWARD),
)


def _draw_vocabulary(draw: Draw) -> Drawn:
    """What a language model's loss normalises: thousands of rows, widths that vectors divide and others."""
    dtype, width = draw.pick(FLOATS, (0.35, 0.5, 0.15)), draw.log_int(1024, 70_000)
    width = width // 8 * 8 if draw.chance(0.8) else width
    x = TensorArg((draw.log_int(512, min(32_768, 2 * USUAL_ELEMENTS // width)), width), dtype)
    return {"x": x, "dtype": DtypeArg(dtype)}


VOCABULARIES = KernelSweep(
    (2, _draw_vocabulary, "_log_softmax(*x, -1, False)"),
    (1, _draw_vocabulary, "_log_softmax_backward_data(*x, x, -1, dtype)"),
    most_bytes=3 * USUAL_BYTES,
)


def _draw_narrow(draw: Draw) -> Drawn | None:
    """Coordinates, scores and heads of one: a product of a few columns or rows, and its gradients over all samples."""
    few, width, many = draw.log_int(1, 16), draw.width(16), draw.log_int(4096, 500_000)
    dtype = draw.floating()
    if many * width > USUAL_ELEMENTS:
        return None
    return {
        "samples": TensorArg((many, width), dtype),
        "turned": TensorArg((many, width), dtype).transposed(),
        "of_layer": TensorArg((few, width), dtype).transposed(),
        "gradient": TensorArg((many, few), dtype),
        "turned_gradient": TensorArg((many, few), dtype).transposed(),
        "weight": TensorArg((few, width), dtype),
        "bias": TensorArg((few,), dtype),
    }


NARROW = KernelSweep(
    (1, _draw_narrow, (0.5, "mm(*samples, of_layer)"), (0.5, "addmm(bias, *samples, of_layer)")),
    (1, _draw_narrow, "mm(*gradient, weight)"),
    (1, _draw_narrow, (0.5, "mm(*turned_gradient, samples)"), (0.5, "mm(*turned, gradient)")),
)
