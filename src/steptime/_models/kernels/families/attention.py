"""Scaled dot-product attention: cuDNN, flash, memory-efficient and the plain products, forward and backward.

A backward call is given what its forward returned. Flash and cuDNN take half precision only. The memory-efficient backward
reads the seed of its dropout on the host: such a call cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.family import Family
from steptime._models.kernels.sweep import FLOATS, HALVES, SEQUENCES, USUAL_BYTES, Draw, Drawn, KernelSweep

# About 3 ms forward on an H200: half precision at some 400 TFLOP/s, single precision far below.
_MOST_FLOP = {"float32": 60e9, "bfloat16": 6e11, "float16": 6e11}
_DIMS = (32, 64, 64, 64, 80, 96, 128, 128)  # GPT-2 XL and BERT have 64, Llama 128, GPT-J style models 80 to 256
_SEED_BELOW = 1 << 20


def _draw_heads(draw: Draw, dtypes: tuple[str, ...], dims: tuple[int, ...] = _DIMS) -> Drawn | None:
    dtype = draw.pick(dtypes) if dtypes != FLOATS else draw.floating()
    queries = draw.pick(SEQUENCES) if draw.chance(0.6) else draw.size(16, 4096)
    crossed = draw.chance(0.12)  # decoder queries over encoder keys
    keys = draw.size(16, 2048) if crossed else queries
    heads, dim = draw.pick((1, 4, 8, 12, 12, 16, 20, 32)), draw.pick(dims)
    causal = not crossed and draw.chance(0.5)
    dropout, batch = draw.pick((0.0, 0.1), (0.7, 0.3)), draw.log_int(1, 128)
    # Query, key and value may be slices of one linear layer's output.
    fused = 3 if not crossed and draw.chance(0.4) else 1
    scores = batch * heads * queries * keys
    if 4.0 * scores * dim > _MOST_FLOP[dtype] or 4 * batch * max(queries, keys) * heads * dim * fused > USUAL_BYTES:
        return None

    def projected(length: int, layers: int) -> TensorArg:
        """Batch, heads, length, dim, as a view of a projection's output: batch, length, layers, heads, dim."""
        row = layers * heads * dim
        return TensorArg((batch, heads, length, dim), dtype, (length * row, dim, row, 1))

    drawn: dict[str, TensorArg | bool | float | None] = {
        "q": projected(queries, fused),
        "k": projected(keys, fused),
        "v": projected(keys, fused),
        "out": projected(queries, 1),
        "queries": queries,
        "keys": keys,
        "dropout": dropout,
        "causal": causal,
        "lse": TensorArg((batch, heads, queries)),
        "cudnn_lse": TensorArg((batch, heads, queries, 1)),
        "padded_lse": TensorArg((batch, heads, -(-queries // 32) * 32)),  # the forward pads the rows to 32
        "seed": TensorArg((), "int64", high=_SEED_BELOW),
        "host_seed": TensorArg((), "int64", high=_SEED_BELOW, device="pageable" if dropout else "device"),
        "state": TensorArg((2,), "uint64", high=_SEED_BELOW),
        "offset": TensorArg((), "uint64", high=_SEED_BELOW),
    }
    if "math" in draw.form() and 4 * scores > USUAL_BYTES // 2:
        return None
    if "efficient" in draw.form():
        # A padding mask, one for all heads; the kernel wants rows of 16 bytes and no causal mask beside it.
        masked = not causal and keys % 16 == 0 and draw.chance(0.4)
        mask = TensorArg((batch, heads, queries, keys), dtype, (queries * keys, 0, keys, 1))
        drawn["bias"] = mask if masked and mask.nbytes <= USUAL_BYTES else None
    return drawn


def _dense(call: Call) -> tuple[Call, tuple[int, ...]]:
    """Gradients of tokens of all samples side by side (`nn.MultiheadAttention`) are copied first: kernels take samples."""
    gradient = call.args[0]
    if (
        "_backward" not in call.op
        or not isinstance(gradient, TensorArg)
        or len(gradient.shape) != 4
        or gradient.strides is None
    ):
        return call, ()
    _, heads, tokens, dim = gradient.shape
    if gradient.strides[0] >= gradient.strides[2]:
        return call, ()
    by_sample = replace(gradient, strides=(tokens * heads * dim, dim, heads * dim, 1))
    return replace(call, args=(by_sample, *call.args[1:])), (0,)


_FLASH = partial(_draw_heads, dtypes=HALVES, dims=(*_DIMS, 256))
_HALVES, _FLOATS = partial(_draw_heads, dtypes=HALVES), partial(_draw_heads, dtypes=FLOATS)

FAMILY = Family(
    name="attention",
    form="attention",
    dense=_dense,
    sweep=KernelSweep(
        (1, _FLASH, "_scaled_dot_product_flash_attention(*q, *k, *v, dropout, causal, False)"),
        (
            *(1, _FLASH),
            "_scaled_dot_product_flash_attention_backward"
            "(*out, q, k, v, out, lse, None, None, queries, keys, dropout, causal, state, offset)",
        ),
        (0.8, _HALVES, "_scaled_dot_product_cudnn_attention(*q, *k, *v, None, True, dropout, causal, False)"),
        (
            *(0.8, _HALVES),
            "_scaled_dot_product_cudnn_attention_backward"
            "(*out, q, k, v, out, cudnn_lse, seed, seed, None, None, None, queries, keys, dropout, causal)",
        ),
        (1, _FLOATS, "_scaled_dot_product_efficient_attention(*q, *k, *v, bias, True, dropout, causal)"),
        (
            *(1, _FLOATS),
            "_scaled_dot_product_efficient_attention_backward"
            "(*out, q, k, v, bias, out, padded_lse, host_seed, host_seed, dropout, [True, True, True, False], causal)",
        ),
        # The products, softmax and scaling one after the other, as one call.
        (0.5, _FLOATS, "_scaled_dot_product_attention_math(*q, *k, *v, None, 0.0, causal)"),
    ),
    weight=8.0,
    kin="""
        _efficient_attention_backward _efficient_attention_forward _flash_attention_backward.default
        _flash_attention_forward.default
    """,
)
