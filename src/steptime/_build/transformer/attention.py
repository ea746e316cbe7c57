"""Attention as PyTorch records it: its own kernels one after the other, or one of the fused ones behind
`scaled_dot_product_attention`, forward and backward.

For the fused ones queries, keys and values come as [batch, heads, sequence, head width], as views of what the projections made.
Where keys and values have fewer heads than queries they are repeated first, as in the published code of Llama.
"""

from __future__ import annotations

from dataclasses import dataclass

from steptime._build.emit.autograd import Gradients
from steptime._build.emit.ops import contiguous_strides
from steptime._build.emit.layers import DTYPE_NUMBERS, transposed_pair
from steptime._build.transformer.emit import compact_strides
from steptime._build.transformer.fused import FUSED, scalar_tensor
from steptime._build.transformer.layers import dropout, scalar
from steptime._build.transformer.lookup import resized
from steptime._build.transformer.tape import StepTape
from steptime._build.transformer.views import given, permute, reshape, transpose, view
from steptime._program.program import Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    """A fused attention."""

    kernels: str  # cudnn | flash | efficient
    causal: bool = True
    dropout: float = 0.0
    mask: Tensor | None = None  # bool, [batch, 1, sequence, sequence]

    def __call__(self, tape: StepTape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What the heads attend to, as [batch, sequence, heads x head width]."""
        if k.shape[1] != q.shape[1]:
            k, v = (_repeated(tape, each, q.shape[1]) for each in (k, v))
        back = transpose(tape, self._fused(tape, q, k, v), 1, 2)
        text = (q.shape[0], q.shape[2], -1)
        return reshape(tape, back, (q.shape[0], q.shape[2], q.shape[1] * q.shape[3]), text)

    def _fused(self, tape: StepTape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        emit = tape.emit
        _, heads, length, width = q.shape
        # The heads of a token beside each other, which is what is read next; cuDNN's output lies as its queries.
        by_token = (length * heads * width, width, heads * width, 1)
        laid = compact_strides(q) if self.kernels == "cudnn" else by_token
        y = emit.tensor(q.shape, q.dtype, strides=laid)
        causal = self.causal and self.mask is None
        text = (q, k, v, self.mask, self.dropout, causal, width**-0.5, False)
        with emit.around("aten::scaled_dot_product_attention", text, (y,), sequence=emit.sequence):
            if tape.autocast:
                with emit.around("aten::scaled_dot_product_attention", text, (y,), sequence=emit.sequence):
                    self._kernels(tape, q, k, v, y)
            else:
                self._kernels(tape, q, k, v, y)
        return y

    def _kernels(self, tape: StepTape, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> None:
        bias = None if self.mask is None else _bias(tape, self.mask, q, spread=self.kernels == "efficient")
        causal = self.causal and self.mask is None
        FUSED[self.kernels](tape, (q, k, v), y, bias, self.dropout, causal=causal)


def _bias(tape: StepTape, mask: Tensor, q: Tensor, *, spread: bool) -> Tensor:
    """What is added to the scores: 0 where a token is seen, as little as can be where not."""
    emit = tape.emit
    least, nothing = emit.tensor((), q.dtype), emit.tensor((), q.dtype)
    result = emit.tensor(mask.shape, q.dtype)
    number = DTYPE_NUMBERS[q.dtype]
    scalar_tensor(emit, least, "-inf" if spread else -65504.0, None)
    with emit.around("aten::where", (mask, 0.0, least), (result,)):
        scalar_tensor(emit, nothing, 0.0, 0)
        emit.op("aten::to", (least, number, False, False, None), (least,))
        with emit.around("aten::where", (mask, nothing, least), (result,)):
            resized(emit, result)
    if not spread:
        return result
    shape = (mask.shape[0], q.shape[1], *mask.shape[2:])
    wide = emit.view(result, shape, (*contiguous_strides(mask.shape)[:1], 0, *contiguous_strides(mask.shape)[2:]))
    with emit.around("aten::expand", (result, shape, False), (wide,)):
        emit.op("aten::as_strided", (result, shape, wide.strides, None), (wide,))
    return wide


def _repeated(tape: StepTape, x: Tensor, heads: int) -> Tensor:
    """Heads of keys or values repeated for their group of queries: a copy."""
    emit = tape.emit
    batch, few, length, width = x.shape
    times = heads // few
    assert x.strides is not None
    item, wide = (batch, few, 1, length, width), (batch, few, times, length, width)
    raised = emit.view(x, item, (*x.strides[:2], 0, *x.strides[2:]))
    emit.op("aten::unsqueeze", (x, 2), (raised,), sequence=emit.sequence)
    tape.record("UnsqueezeBackward0", (x,), (raised,), lambda got: (_squeezed(tape, given(got[0]), x.shape),))
    spread = emit.view(raised, wide, (*x.strides[:2], 0, *x.strides[2:]))
    emit.op("aten::expand", (raised, wide, False), (spread,), sequence=emit.sequence)
    tape.record("ExpandBackward0", (raised,), (spread,), lambda got: (_summed(tape, given(got[0]), item),))
    return reshape(tape, spread, (batch, heads, length, width))


def _summed(tape: StepTape, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    result = tape.emit.tensor(shape, gradient.dtype)
    tape.emit.op("aten::sum", (gradient, (2,), True, None), (result,))
    return result


def _squeezed(tape: StepTape, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    result = tape.emit.view(gradient, shape)
    tape.emit.op("aten::squeeze", (gradient, 2), (result,))
    return result


def unfused(tape: StepTape, q: Tensor, k: Tensor, v: Tensor, probability: float) -> Tensor:
    """Scores, their softmax and what they weigh, one product after the other, as in Megatron-LM without flash attention.

    What comes is [sequence, batch, heads, head width], and what goes [sequence, batch, heads x head width].
    """
    length, batch, heads, width = q.shape
    rows = [transpose(tape, view(tape, each, (length, batch * heads, width)), 0, 1) for each in (q, k, v)]
    scores = _bmm(tape, rows[0], transpose(tape, rows[1], 1, 2))
    weights = dropout(tape, _scaled_softmax(tape, scores), probability)
    result = view(tape, _bmm(tape, weights, rows[2]), (batch, heads, length, width))
    return reshape(tape, permute(tape, result, (2, 0, 1, 3)), (length, batch, heads * width))


def _bmm(tape: StepTape, one: Tensor, other: Tensor) -> Tensor:
    emit = tape.emit
    saved_one, saved_other = tape.save(one), tape.save(other)
    y = emit.tensor((one.shape[0], one.shape[1], other.shape[2]), one.dtype)
    emit.op("aten::bmm", (one, other), (y,), sequence=emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        gradient = given(gradients[0])
        of_other = _batched(tape, transposed_pair(tape.emit, saved_one(), 1, 2), gradient)
        return _batched(tape, gradient, transposed_pair(tape.emit, saved_other(), 1, 2)), of_other

    tape.record("BmmBackward0", (one, other), (y,), backward)
    return y


def _batched(tape: StepTape, one: Tensor, other: Tensor) -> Tensor:
    result = tape.emit.tensor((one.shape[0], one.shape[1], other.shape[2]), one.dtype)
    tape.emit.op("aten::bmm", (one, other), (result,))
    return result


def _scaled_softmax(tape: StepTape, scores: Tensor) -> Tensor:
    """Scaled, masked and normalised in one kernel; recorded as the softmax that takes as long."""
    emit = tape.emit
    y = emit.tensor(scores.shape, scores.dtype)
    with emit.around("ScaledUpperTriangMaskedSoftmax", (scores, scalar(tape)), (y,), sequence=emit.sequence):
        emit.op("aten::_softmax", (scores, -1, False), (y,))
    saved = tape.save(y)

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(scores.shape, scores.dtype)
        emit.op("aten::_softmax_backward_data", (gradients[0], saved(), -1, DTYPE_NUMBERS[scores.dtype]), (result,))
        return (result,)

    tape.record("ScaledUpperTriangMaskedSoftmaxBackward", (scores,), (y,), backward)
    return y
