"""Rotary positions as Hugging Face's Llama applies them: `x * cos + rotate_half(x) * sin`, forward and backward."""

from __future__ import annotations

from steptime._build.emit.autograd import Gradients
from steptime._build.transformer.activations import add, mul
from steptime._build.transformer.emit import compact_strides
from steptime._build.transformer.tape import StepTape
from steptime._build.transformer.views import given, sliced
from steptime._program.program import Tensor


def rotated(tape: StepTape, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Heads turned by their positions; cosines and sines are [1, 1, sequence, head width]."""
    return add(tape, mul(tape, x, cosines), mul(tape, _half(tape, x), sines))


def _half(tape: StepTape, x: Tensor) -> Tensor:
    """The second half, negated, before the first."""
    width = x.shape[-1]
    first, second = _slice(tape, x, 0, width // 2), _slice(tape, x, width // 2, width)
    return _joined(tape, _negated(tape, second), first)


def _slice(tape: StepTape, x: Tensor, start: int, end: int) -> Tensor:
    emit, last = tape.emit, len(x.shape) - 1
    y = sliced(emit, x, last, start, end, sequence=emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(x.shape, x.dtype)
        emit.op("aten::slice_backward", (gradients[0], x.shape, last, start, end, 1), (result,))
        return (result,)

    tape.record("SliceBackward0", (x,), (y,), backward)
    return y


def _negated(tape: StepTape, x: Tensor) -> Tensor:
    emit = tape.emit
    y = emit.tensor(x.shape, x.dtype, strides=compact_strides(x))
    emit.op("aten::neg", (x,), (y,), sequence=emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(x.shape, x.dtype)
        emit.op("aten::neg", (gradients[0],), (result,))
        return (result,)

    tape.record("NegBackward0", (x,), (y,), backward)
    return y


def _joined(tape: StepTape, one: Tensor, other: Tensor) -> Tensor:
    emit, last, width = tape.emit, len(one.shape) - 1, one.shape[-1]
    y = emit.tensor((*one.shape[:-1], width + other.shape[-1]), one.dtype)
    emit.op("aten::cat", ((one, other), -1), (y,), sequence=emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        gradient = given(gradients[0])
        return sliced(emit, gradient, last, 0, width), sliced(emit, gradient, last, width, y.shape[-1])

    tape.record("CatBackward0", (one, other), (y,), backward)
    return y
