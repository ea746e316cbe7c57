"""Attention as PyTorch records it, forward and backward: its own kernels one after the other, or one of the fused ones behind
`scaled_dot_product_attention`, with what they reserve; and rotary positions.

For the fused ones queries, keys and values come as [batch, heads, sequence, head width], as views of what the projections made;
a mask comes as what is added to the scores. Where keys and values have fewer heads than queries they are repeated first, as in
the published code of Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from steptime._build.emit.emitter import DTYPE_NUMBERS, STRIDED, Emitter, compact_strides
from steptime._build.emit.layers import add, bmm, dropout, mul
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.views import permute, reshape, slice_last, transpose, view
from steptime._build.emit.writer import contiguous_strides, strides_of
from steptime._program.program import Tensor, Value

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values
# What the memory-efficient backward reserves beside gradients: a sum per element in fp32, and counters per block of keys
# (seen in the recorded steps of GPT-2 and BERT: 3,148,800 bytes for 8 x 12 x 128 x 64, 12,595,200 for 512 tokens).
_KEYS_PER_BLOCK, _BYTES_PER_BLOCK = 128, 32
_STATISTICS_ROWS = 32  # the memory-efficient kernel pads what it keeps of each row of scores to a multiple of these
_NO_MASK, _CAUSAL_MASK = 0, 1


def rotated(tape: Tape, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Heads turned by their positions as in Hugging Face's Llama: `x * cos + rotate_half(x) * sin`.

    Cosines and sines are [1, 1, sequence, head width].
    """
    return add(tape, mul(tape, x, cosines), mul(tape, _rotated_half(tape, x), sines))


def _rotated_half(tape: Tape, x: Tensor) -> Tensor:
    """The second half, negated, before the first."""
    emit, last, width = tape.emit, len(x.shape) - 1, x.shape[-1]
    half = width // 2
    first, second = slice_last(tape, x, 0, half), slice_last(tape, x, half, width)
    negated = emit.new("neg", (second,), strides=compact_strides(second), node=True)
    tape.node("NegBackward0", (second,), negated, lambda gradient: emit.new("neg", (gradient,)))
    y = emit.new("cat", ((negated, first), -1), x.shape, x.dtype, node=True)

    def backward(gradient: Tensor) -> Gradients:
        return emit.sliced(gradient, last, 0, width - half), emit.sliced(gradient, last, width - half, width)

    return tape.node("CatBackward0", (negated, first), y, backward)


class Attention(NamedTuple):
    """What is said of a fused attention besides its heads."""

    kernels: str  # cudnn | flash | efficient
    causal: bool
    dropout: float
    mask: Tensor | None  # bool, [batch, 1, sequence, sequence]


def fused(tape: Tape, q: Tensor, k: Tensor, v: Tensor, kind: Attention) -> Tensor:
    """What the heads attend to, as [batch, sequence, heads x head width]."""
    emit, (batch, heads, length, width) = tape.emit, q.shape
    if k.shape[1] != heads:
        k, v = _repeated(tape, k, heads), _repeated(tape, v, heads)
    # cuDNN's output lies as its queries.
    y = emit.tensor(q.shape, q.dtype, strides=compact_strides(q) if kind.kernels == "cudnn" else _by_token(q))
    kind = kind._replace(causal=kind.causal and kind.mask is None)
    call = (q, k, v, kind.mask, kind.dropout, kind.causal, width**-0.5, False)
    with (
        emit.op("scaled_dot_product_attention", call, (y,), node=True),
        tape.casting("scaled_dot_product_attention", call, y, node=True),
    ):
        bias = None if kind.mask is None else _bias(emit, kind.mask, q, spread=kind.kernels == "efficient")
        _KERNELS[kind.kernels](tape, (q, k, v), y, bias, kind)
    return reshape(tape, transpose(tape, y, 1, 2), (batch, length, heads * width), (batch, length, -1))


def _by_token(x: Tensor) -> tuple[int, ...]:
    """Strides of [batch, heads, sequence, head width] with the heads of a token beside each other, as they are read next."""
    _, heads, length, width = x.shape
    return length * heads * width, width, heads * width, 1


def _bias(emit: Emitter, mask: Tensor, q: Tensor, *, spread: bool) -> Tensor:
    """What is added to the scores: 0 where a token is seen, as little as can be where not."""
    least, nothing = emit.tensor((), q.dtype), emit.tensor((), q.dtype)
    result = emit.tensor(mask.shape, q.dtype)
    emit.scalar_tensor(least, "-inf" if spread else -65504.0, None)
    with emit.op("where", (mask, 0.0, least), (result,)):
        emit.scalar_tensor(nothing, 0.0, STRIDED)
        emit.same_dtype(least)
        with emit.op("where", (mask, nothing, least), (result,)):
            emit.resized(result)
    if not spread:
        return result
    strides = contiguous_strides(mask.shape)
    return emit.expanded(result, (mask.shape[0], q.shape[1], *mask.shape[2:]), (strides[0], 0, *strides[2:]))


def _repeated(tape: Tape, x: Tensor, heads: int) -> Tensor:
    """Heads of keys or values repeated for their group of queries: a copy."""
    emit, (batch, few, length, width), strides = tape.emit, x.shape, strides_of(x)
    item, wide = (batch, few, 1, length, width), (batch, few, heads // few, length, width)
    raised = emit.view(x, item, (*strides[:2], 0, *strides[2:]))
    emit.op("unsqueeze", (x, 2), (raised,), node=True)
    tape.node("UnsqueezeBackward0", (x,), raised, lambda gradient: _squeezed(emit, gradient, x.shape))
    spread = emit.view(raised, wide, raised.strides)
    emit.op("expand", (raised, wide, False), (spread,), node=True)
    tape.node("ExpandBackward0", (raised,), spread, lambda gradient: emit.new("sum", (gradient, (2,), True, None), item))
    return reshape(tape, spread, (batch, heads, length, width))


def _squeezed(emit: Emitter, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    y = emit.view(gradient, shape)
    emit.op("squeeze", (gradient, 2), (y,))
    return y


# Fused kernels


def _cudnn(tape: Tape, heads: Heads, y: Tensor, bias: Tensor | None, kind: Attention) -> None:
    """cuDNN's attention, which PyTorch prefers on Hopper in 16 bits."""
    emit, scale, lengths = tape.emit, y.shape[-1] ** -0.5, (y.shape[2], heads[1].shape[2])
    statistics = emit.tensor((*y.shape[:3], 1))
    seed, offset = emit.tensor((), "int64"), emit.tensor((), "int64")
    result = (y, statistics, None, None, *lengths, seed, offset, None)
    call = (*heads, bias, True, kind.dropout, kind.causal, False, scale)
    with (
        emit.op("_scaled_dot_product_cudnn_attention", call, result, node=True),
        emit.op("_cudnn_attention_forward", (*call[:4], None, None, *lengths, *call[4:]), result),
    ):
        _expanded_to_itself(emit, bias)
        for each in (seed, offset):
            emit.op("empty", ((), DTYPE_NUMBERS["int64"], None, "cuda", None, None), (each,))
        emit.empty_like(heads[0], y)
        emit.empty(statistics)
    saved = [tape.save(each) for each in (*heads, y, statistics, seed, offset)]

    def backward(gradient: Tensor) -> Gradients:
        q, k, v, output, *known = (each() for each in saved)
        results = tuple(emit.tensor(each.shape, each.dtype, strides=compact_strides(each)) for each in (q, k, v))
        rest = (bias, None, None, *lengths, kind.dropout, kind.causal, scale)
        call = (gradient, q, k, v, emit.view(output), *known, *rest)
        with (
            emit.op("_scaled_dot_product_cudnn_attention_backward", call, results),
            emit.op("_cudnn_attention_backward", call, results),
        ):
            _expanded_to_itself(emit, bias)
            for like, result in zip((q, k, v), results, strict=True):
                emit.empty_like(like, result)
        return results

    tape.node("ScaledDotProductCudnnAttentionBackward0", heads, y, backward)


def _expanded_to_itself(emit: Emitter, bias: Tensor | None) -> None:
    if bias is not None:
        emit.expanded(bias, bias.shape, strides_of(bias))


def _flash(tape: Tape, heads: Heads, y: Tensor, bias: Tensor | None, kind: Attention) -> None:
    """Flash attention, PyTorch's choice on Ampere in 16 bits; it takes no mask but the causal one."""
    assert bias is None
    emit, scale, lengths = tape.emit, y.shape[-1] ** -0.5, (y.shape[2], heads[1].shape[2])
    statistics = emit.tensor(y.shape[:3])
    state, unused = emit.tensor((2,), "uint64"), emit.tensor((), "uint64")
    result = (y, statistics, None, None, *lengths, state, unused, None)
    emit.op("_scaled_dot_product_flash_attention", (*heads, kind.dropout, kind.causal, False, scale), result, node=True)
    saved = [tape.save(each) for each in (*heads, y, statistics)]

    def backward(gradient: Tensor) -> Gradients:
        q, k, v, output, known = (each() for each in saved)
        results = tuple(emit.tensor(each.shape, each.dtype, strides=_by_token(each)) for each in (q, k, v))
        rest = (None, None, *lengths, kind.dropout, kind.causal, state, unused, scale)
        emit.op("_scaled_dot_product_flash_attention_backward", (gradient, q, k, v, emit.view(output), known, *rest), results)
        return results

    tape.node("ScaledDotProductFlashAttentionBackward0", heads, y, backward)


def _efficient(tape: Tape, heads: Heads, y: Tensor, bias: Tensor | None, kind: Attention) -> None:
    """The memory-efficient kernels, the only fused ones in fp32."""
    emit, scale, mask = tape.emit, y.shape[-1] ** -0.5, _CAUSAL_MASK if kind.causal else _NO_MASK
    rows = -(-y.shape[2] // _STATISTICS_ROWS) * _STATISTICS_ROWS
    statistics = emit.tensor((*y.shape[:2], rows))
    where = "cpu" if kind.dropout else None
    seed, offset = emit.tensor((), "int64", device=where), emit.tensor((), "int64", device=where)
    call = (*heads, bias, True, kind.dropout, kind.causal, scale)
    with emit.op("_scaled_dot_product_efficient_attention", call, (y, statistics, seed, offset), node=True):
        by_token = tuple(emit.transposed(each, 1, 2) for each in heads)
        flat = _flat(emit, y)
        inner = (*by_token, bias, None, None, None, None, kind.dropout, mask, True, scale, None, None)
        result = (flat, statistics, seed, offset, y.shape[2], heads[1].shape[2])
        with emit.op("_efficient_attention_forward", inner, result):
            for each in (seed, offset) if kind.dropout else ():
                emit.op("scalar_tensor", (0, DTYPE_NUMBERS["int64"], None, None, None), (each,))
            emit.empty(flat)
            emit.empty(statistics)
        _transposed_into(emit, flat, y)
    saved = [tape.save(each) for each in (*heads, y, statistics, seed, offset)]

    def backward(gradient: Tensor) -> Gradients:
        q, k, v, output, *known = (each() for each in saved)
        arguments, output = (gradient, q, k, v), emit.view(output)
        results = tuple(emit.tensor(each.shape, each.dtype, strides=_by_token(each)) for each in (q, k, v))
        call = (*arguments, bias, output, *known, kind.dropout, (True, True, True, False), kind.causal, scale)
        with emit.op("_scaled_dot_product_efficient_attention_backward", call, (*results, None)):
            by_token = [emit.transposed(each, 1, 2) for each in (*arguments, output)]
            flat = tuple(_flat(emit, each) for each in results)
            rest = (known[0], kind.dropout, *known[1:], mask, False, scale, None, None, False)
            _efficient_backward(emit, by_token, bias, rest, flat)
            for each, result in reversed(list(zip(flat, results, strict=True))):
                _transposed_into(emit, each, result)
        return results

    tape.node("ScaledDotProductEfficientAttentionBackward0", heads, y, backward)


def _efficient_backward(
    emit: Emitter, by_token: Sequence[Tensor], bias: Tensor | None, rest: tuple[Value, ...], results: tuple[Tensor, ...]
) -> None:
    gradient, q, k, v, output = by_token
    call = (gradient, q, k, v, bias, output, None, None, q.shape[2], k.shape[2], *rest)
    with emit.op("_efficient_attention_backward", call, (*results, None)):
        for each in results:
            emit.empty(each)
        _row_sums(emit, gradient, output)
        batch, length, heads, width = k.shape
        blocks = -(-length // _KEYS_PER_BLOCK)
        size = batch * heads * (4 * length * width + _BYTES_PER_BLOCK * blocks)
        emit.zero(emit.empty(emit.tensor((size,), "uint8")))


def _row_sums(emit: Emitter, gradient: Tensor, output: Tensor) -> None:
    """The sum over each head's elements of gradient x output, which backward needs for every row of scores."""
    for each in (output, gradient):
        emit.op("to", (each, DTYPE_NUMBERS["float32"], False, False, None), (each,))
    product = emit.new("mul", (gradient, output))
    total = emit.tensor(gradient.shape[:3], gradient.dtype)
    with emit.op("sum", (product, (-1,), False, None), (total,)):
        emit.strided(total, (*total.shape, 1), (*strides_of(total), 0))
    emit.contiguous(emit.transposed(total, -2, -1))


def _flat(emit: Emitter, x: Tensor) -> Tensor:
    """The memory of [batch, heads, sequence, head width] as [batch, sequence, heads, head width]."""
    batch, heads, length, width = x.shape
    return emit.view(x, (batch, length, heads, width))


def _transposed_into(emit: Emitter, x: Tensor, y: Tensor) -> None:
    with emit.op("transpose", (x, 1, 2), (y,)):
        emit.op("as_strided", (x, y.shape, y.strides, None), (y,))


_KERNELS: Mapping[str, Callable[[Tape, Heads, Tensor, Tensor | None, Attention], None]] = {
    "cudnn": _cudnn,
    "flash": _flash,
    "efficient": _efficient,
}


# One kernel after the other


def unfused(tape: Tape, q: Tensor, k: Tensor, v: Tensor, probability: float) -> Tensor:
    """Scores, their softmax and what they weigh, one product after the other, as in Megatron-LM without flash attention.

    What comes is [sequence, batch, heads, head width], and what goes [sequence, batch, heads x head width].
    """
    length, batch, heads, width = q.shape
    rows = [transpose(tape, view(tape, each, (length, batch * heads, width)), 0, 1) for each in (q, k, v)]
    scores = bmm(tape, rows[0], transpose(tape, rows[1], 1, 2))
    weights = dropout(tape, _scaled_softmax(tape, scores), probability)
    result = view(tape, bmm(tape, weights, rows[2]), (batch, heads, length, width))
    return reshape(tape, permute(tape, result, (2, 0, 1, 3)), (length, batch, heads * width))


def _scaled_softmax(tape: Tape, scores: Tensor) -> Tensor:
    """Scaled, masked and normalised in one kernel; recorded as the softmax that takes as long."""
    emit = tape.emit
    y = emit.tensor(scores.shape, scores.dtype)
    with emit.write("ScaledUpperTriangMaskedSoftmax", (scores, emit.number()), (y,), sequence=emit.sequence):
        emit.op("_softmax", (scores, -1, False), (y,))
    saved = tape.save(y)

    def backward(gradient: Tensor) -> Tensor:
        return emit.new("_softmax_backward_data", (gradient, saved(), -1, DTYPE_NUMBERS[scores.dtype]))

    return tape.node("ScaledUpperTriangMaskedSoftmaxBackward", (scores,), y, backward)
