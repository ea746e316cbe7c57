"""Attention as PyTorch records it, forward and backward: its own kernels one after the other, or one of the fused ones behind
`scaled_dot_product_attention`, with what they reserve; and rotary positions.

For the fused ones queries, keys and values come as [batch, heads, sequence, head width], as views of what the projections made;
a mask comes as what is added to the scores. Where keys and values have fewer heads than queries they are repeated first, as in
the published code of Llama.
"""

from __future__ import annotations

from steptime._build.emit.emitter import DTYPE_NUMBERS, STRIDED, Emitter, compact_strides
from steptime._build.emit.layers import add, bmm, dropout, mul, scaled
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.views import contiguous_copy, permute, reshape, slice_last, to_dtype, transpose, view
from steptime._build.emit.writer import contiguous_strides, is_contiguous, strides_of
from steptime._build.transformer.attention_kernels import KERNELS, Attention, result_of
from steptime._build.transformer.context import ALL_GATHER, ALL_TO_ALL, RING, by_heads, by_tokens, in_rounds
from steptime._program.program import Tensor


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


def fused(tape: Tape, q: Tensor, k: Tensor, v: Tensor, kind: Attention) -> Tensor:
    """What the heads attend to, as [batch, sequence, heads x head width], or the sequence first as the heads came."""
    if kind.sequence_first:
        q, k, v = (permute(tape, each, (1, 2, 0, 3)) for each in (q, k, v))
    if kind.exchange in (RING, ALL_GATHER):
        y = in_rounds(tape, (q, k, v), kind)
    elif kind.exchange == ALL_TO_ALL:
        q, k, v = (by_heads(tape, each) for each in (q, k, v))
        y = _computed(tape, q, k, v, kind)
        return by_tokens(tape, y, sequence_first=kind.sequence_first)
    else:
        y = _computed(tape, q, k, v, kind)
    batch, heads, length, width = y.shape
    if kind.sequence_first:
        y = permute(tape, y, (2, 0, 1, 3))
        y = y if is_contiguous(y) else contiguous_copy(tape, y)
        return view(tape, y, (length, batch, heads * width), (length, batch, -1))
    return reshape(tape, transpose(tape, y, 1, 2), (batch, length, heads * width), (batch, length, -1))


def _windowed(tape: Tape, heads: tuple[Tensor, ...], kind: Attention) -> Tensor:
    """Flash attention of a sliding window; several heads of queries share those of keys and values as they are."""
    emit, (q, k, v) = tape.emit, (transpose(tape, each, 1, 2) for each in heads)
    (batch, length, count, _), scale = q.shape, q.shape[3] ** -0.5
    y, statistics = emit.tensor(q.shape, q.dtype), emit.tensor((batch, count, length))
    state, unused = emit.tensor((2,), "uint64"), emit.tensor((), "uint64")
    seen = (scale, kind.window - 1, 0)
    call = (q, k, v, None, None, length, length, kind.dropout, kind.causal, False, *seen, None, None)
    emit.op("_flash_attention_forward", call, (y, statistics, state, unused, None), node=True)
    saved = [tape.save(each) for each in (q, k, v, y, statistics)]

    def backward(gradient: Tensor) -> Gradients:
        known = [each() for each in saved]
        results = tuple(emit.tensor(each.shape, each.dtype) for each in known[:3])
        rest = (None, None, length, length, kind.dropout, kind.causal, state, unused, *seen)
        emit.op("_flash_attention_backward", (gradient, *known[:3], emit.view(known[3]), known[4], *rest), results)
        return results

    tape.node("FlashAttentionBackward0", (q, k, v), y, backward)
    return transpose(tape, y, 1, 2)


def _computed(tape: Tape, q: Tensor, k: Tensor, v: Tensor, kind: Attention) -> Tensor:
    """`scaled_dot_product_attention` of [batch, heads, sequence, head width]; values may be narrower than queries and keys."""
    if kind.window:
        return _windowed(tape, (q, k, v), kind)
    emit = tape.emit
    if k.shape[1] != q.shape[1] and not kind.grouped:
        k, v = _repeated(tape, k, q.shape[1]), _repeated(tape, v, q.shape[1])
    y, heads = result_of(emit, q, v, kind), (q, k, v)
    kind = kind._replace(causal=kind.causal and kind.mask is None)
    call = (*heads, kind.mask, kind.dropout, kind.causal, q.shape[-1] ** -0.5, False)
    with (
        emit.op("scaled_dot_product_attention", call, (y,), node=True),
        tape.casting("scaled_dot_product_attention", call, y, node=True),
    ):
        bias = None if kind.mask is None else _bias(emit, kind.mask, q, spread=kind.kernels == "efficient")
        made = KERNELS[kind.kernels](emit, heads, y, bias, kind)
        saved = [tape.save(each) for each in (*heads, y, *made.kept)]
        return tape.node(made.node, heads, y, lambda gradient: made.backward(gradient, [each() for each in saved]))


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


# One kernel after the other

# Megatron-LM's kernel of softmax takes 16 bits and heads of all samples, and tokens, in fours (`FusedScaleMaskSoftmax`).
_IN_FOURS = 4


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
    """Scaled, masked and normalised in one kernel, where there is one; recorded as the softmax that takes as long."""
    if scores.dtype == "float32" or scores.shape[0] % _IN_FOURS or scores.shape[1] % _IN_FOURS:
        return _softmax_in_steps(tape, scores)
    emit = tape.emit
    y = emit.tensor(scores.shape, scores.dtype)
    with emit.write("ScaledUpperTriangMaskedSoftmax", (scores, emit.number()), (y,), sequence=emit.sequence):
        emit.op("_softmax", (scores, -1, False), (y,))
    saved = tape.save(y)

    def backward(gradient: Tensor) -> Tensor:
        return emit.new("_softmax_backward_data", (gradient, saved(), -1, DTYPE_NUMBERS[scores.dtype]))

    return tape.node("ScaledUpperTriangMaskedSoftmaxBackward", (scores,), y, backward)


def _softmax_in_steps(tape: Tape, scores: Tensor) -> Tensor:
    """What Megatron-LM does where its kernel does not go: in fp32, one op after the other."""
    emit, x = tape.emit, scaled(tape, to_dtype(tape, scores, "float32"))
    mask, hidden, y = emit.tensor(scores.shape[1:], "bool"), emit.view(x), emit.tensor(x.shape)
    emit.op("masked_fill_", (x, mask, -10000.0), (hidden,), node=True)
    tape.node("MaskedFillBackward0", (x,), hidden, lambda gradient: emit.new("masked_fill", (gradient, mask, 0)))
    with emit.op("softmax", (hidden, -1, None), (y,), node=True):
        emit.op("_softmax", (hidden, -1, False), (y,), node=True)
    saved = tape.save(y)

    def backward(gradient: Tensor) -> Tensor:
        return emit.new("_softmax_backward_data", (gradient, saved(), -1, DTYPE_NUMBERS["float32"]))

    return to_dtype(tape, tape.node("SoftmaxBackward0", (hidden,), y, backward), scores.dtype)
