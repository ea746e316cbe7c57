"""Scaled dot-product attention: cuDNN, flash, memory-efficient and the plain products, forward and backward.

A backward call is given what its forward returned. Flash and cuDNN take half precision only. The memory-efficient backward
reads the seed of its dropout on the host: such a call cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import (
    FLOATS,
    HALVES,
    SEQUENCES,
    USUAL_BYTES,
    Rng,
    Shape,
    chance,
    floating,
    log_int,
    mixture,
    permuted,
    pick,
    size,
)
from steptime._models.kernels.family import Family

# About 3 ms forward on an H200: half precision at some 400 TFLOP/s, single precision far below.
_MOST_FLOP = {"float32": 60e9, "bfloat16": 6e11, "float16": 6e11}


@dataclass(frozen=True)
class _Heads:
    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    dtype: str
    causal: bool
    dropout: float
    fused: bool  # query, key and value are slices of one linear layer's output

    def projected(self, length: int) -> TensorArg:
        """Batch, heads, length, dim, as a view of the projection's output: batch, length, (3,) heads, dim."""
        tensor = permuted(TensorArg((self.batch, length, self.heads, self.dim), self.dtype), (0, 2, 1, 3))
        if not self.fused:
            return tensor
        row = 3 * self.heads * self.dim
        return TensorArg(tensor.shape, self.dtype, (length * row, self.dim, row, 1))

    @property
    def inputs(self) -> tuple[TensorArg, TensorArg, TensorArg]:
        return self.projected(self.queries), self.projected(self.keys), self.projected(self.keys)

    @property
    def output(self) -> TensorArg:
        return permuted(TensorArg((self.batch, self.queries, self.heads, self.dim), self.dtype), (0, 2, 1, 3))

    def statistics(self, *tail: int) -> TensorArg:
        return TensorArg((self.batch, self.heads, *tail), "float32")

    @property
    def affordable(self) -> bool:
        flop = 4.0 * self.batch * self.heads * self.queries * self.keys * self.dim
        width = 4 * self.batch * max(self.queries, self.keys) * self.heads * self.dim * (3 if self.fused else 1)
        return flop <= _MOST_FLOP[self.dtype] and width <= USUAL_BYTES


def _heads(rng: Rng, dtypes: tuple[str, ...], dims: tuple[int, ...]) -> _Heads | None:
    dtype = pick(rng, dtypes) if dtypes != FLOATS else floating(rng)
    queries = pick(rng, SEQUENCES) if chance(rng, 0.6) else size(rng, 16, 4096)
    crossed = chance(rng, 0.12)  # decoder queries over encoder keys
    keys = size(rng, 16, 2048) if crossed else queries
    heads, dim = pick(rng, (1, 4, 8, 12, 12, 16, 20, 32)), pick(rng, dims)
    causal = not crossed and chance(rng, 0.5)
    dropout = pick(rng, (0.0, 0.1), (0.7, 0.3))
    drawn = _Heads(log_int(rng, 1, 128), heads, queries, keys, dim, dtype, causal, dropout, not crossed and chance(rng, 0.4))
    return drawn if drawn.affordable else None


_DIMS = (32, 64, 64, 64, 80, 96, 128, 128)  # GPT-2 XL and BERT have 64, Llama 128, GPT-J style models 80 to 256


def _flash(rng: Rng) -> Call | None:
    heads = _heads(rng, HALVES, (*_DIMS, 256))
    if heads is None:
        return None
    arguments = (*heads.inputs, heads.dropout, heads.causal, False)
    return Call("aten::_scaled_dot_product_flash_attention.default", arguments, written=(0, 1, 2))


def _flash_backward(rng: Rng) -> Call | None:
    heads = _heads(rng, HALVES, (*_DIMS, 256))
    if heads is None:
        return None
    random_state = TensorArg((2,), "uint64", high=1 << 20), TensorArg((), "uint64", high=1 << 20)
    arguments = (
        *(heads.output, *heads.inputs, heads.output, heads.statistics(heads.queries), None, None),
        *(heads.queries, heads.keys, heads.dropout, heads.causal, *random_state),
    )
    return Call("aten::_scaled_dot_product_flash_attention_backward.default", arguments)


def _cudnn(rng: Rng) -> Call | None:
    heads = _heads(rng, HALVES, _DIMS)
    if heads is None:
        return None
    arguments = (*heads.inputs, None, True, heads.dropout, heads.causal, False)
    return Call("aten::_scaled_dot_product_cudnn_attention.default", arguments, written=(0, 1, 2))


def _cudnn_backward(rng: Rng) -> Call | None:
    heads = _heads(rng, HALVES, _DIMS)
    if heads is None:
        return None
    seeds = (TensorArg((), "int64", high=1 << 20),) * 2
    arguments = (
        *(heads.output, *heads.inputs, heads.output, heads.statistics(heads.queries, 1), *seeds, None, None, None),
        *(heads.queries, heads.keys, heads.dropout, heads.causal),
    )
    return Call("aten::_scaled_dot_product_cudnn_attention_backward.default", arguments)


def _bias(rng: Rng, heads: _Heads) -> TensorArg | None:
    """A padding mask, one for all heads; the kernel wants rows of 16 bytes and no causal mask beside it."""
    if heads.causal or heads.keys % 16 or not chance(rng, 0.4):
        return None
    shape: Shape = (heads.batch, heads.heads, heads.queries, heads.keys)
    mask = TensorArg(shape, heads.dtype, (heads.queries * heads.keys, 0, heads.keys, 1))
    return mask if mask.nbytes <= USUAL_BYTES else None


def _efficient(rng: Rng) -> Call | None:
    heads = _heads(rng, FLOATS, _DIMS)
    if heads is None:
        return None
    arguments = (*heads.inputs, _bias(rng, heads), True, heads.dropout, heads.causal)
    return Call("aten::_scaled_dot_product_efficient_attention.default", arguments, written=(0, 1, 2))


def _efficient_backward(rng: Rng) -> Call | None:
    heads = _heads(rng, FLOATS, _DIMS)
    if heads is None:
        return None
    statistics = heads.statistics(-(-heads.queries // 32) * 32)  # its forward pads the rows to 32
    seed = TensorArg((), "int64", high=1 << 20, device="pageable" if heads.dropout else "device")
    asked = (True, True, True, False)
    arguments = (
        *(heads.output, *heads.inputs, _bias(rng, heads), heads.output, statistics, seed, seed),
        *(heads.dropout, asked, heads.causal),
    )
    return Call("aten::_scaled_dot_product_efficient_attention_backward.default", arguments)


def _math(rng: Rng) -> Call | None:
    """The products, softmax and scaling one after the other, as one call."""
    heads = _heads(rng, FLOATS, _DIMS)
    if heads is None or 4 * heads.batch * heads.heads * heads.queries * heads.keys > USUAL_BYTES // 2:
        return None
    arguments = (*heads.inputs, None, 0.0, heads.causal)
    return Call("aten::_scaled_dot_product_attention_math.default", arguments, written=(0, 1, 2))


FAMILY = Family(
    name="attention",
    form="attention",
    ops=(
        "aten::_scaled_dot_product_flash_attention.default",
        "aten::_scaled_dot_product_flash_attention_backward.default",
        "aten::_scaled_dot_product_cudnn_attention.default",
        "aten::_scaled_dot_product_cudnn_attention_backward.default",
        "aten::_scaled_dot_product_efficient_attention.default",
        "aten::_scaled_dot_product_efficient_attention_backward.default",
        "aten::_scaled_dot_product_attention_math.default",
    ),
    sweep=mixture(
        *((1, _flash), (1, _flash_backward), (0.8, _cudnn), (0.8, _cudnn_backward)),
        *((1, _efficient), (1, _efficient_backward), (0.5, _math)),
    ),
    weight=8.0,
)
