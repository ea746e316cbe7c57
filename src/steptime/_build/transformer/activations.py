"""Elementwise ops of Transformers as PyTorch records them, forward and backward: sums, products, activations."""

from __future__ import annotations

from steptime._build.emit.autograd import Gradients
from steptime._build.transformer.emit import compact_strides
from steptime._build.transformer.layers import scalar
from steptime._build.transformer.tape import StepTape
from steptime._build.transformer.views import given, to_dtype
from steptime._program.program import Tensor


def promoted(one: Tensor, other: Tensor) -> str:
    """The dtype of an elementwise result; one of two floating dtypes is fp32 where they differ here."""
    return one.dtype if one.dtype == other.dtype else "float32"


def add(tape: StepTape, one: Tensor, other: Tensor) -> Tensor:
    """`one + other`; a gradient of what was broadcast is summed by the engine."""
    emit = tape.emit
    laid = compact_strides(one) if len(one.shape) >= len(other.shape) else None
    y = emit.tensor(max(one.shape, other.shape, key=len), promoted(one, other), strides=laid)
    emit.op("aten::add", (one, other, 1), (y,), sequence=emit.sequence)
    tape.record("AddBackward0", (one, other), (y,), lambda gradients: (gradients[0], gradients[0]))
    return y


def mul(tape: StepTape, one: Tensor, other: Tensor) -> Tensor:
    """`one * other`, neither of them broadcast in backward."""
    emit = tape.emit
    saved_one, saved_other = tape.save(one), tape.save(other)
    y = emit.tensor(one.shape, promoted(one, other), strides=compact_strides(one))
    emit.op("aten::mul", (one, other), (y,), sequence=emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        gradient = given(gradients[0])
        # Derivatives are computed in the alphabetical order of the arguments' names: other, then self.
        of_other = _times(tape, gradient, saved_one()) if tape.needs(other) else None
        return _times(tape, gradient, saved_other()), of_other

    tape.record("MulBackward0", (one, other), (y,), backward)
    return y


def _times(tape: StepTape, gradient: Tensor, other: Tensor) -> Tensor:
    dtype = promoted(gradient, other) if other.shape else gradient.dtype
    result = tape.emit.tensor(gradient.shape, dtype, strides=compact_strides(gradient))
    tape.emit.op("aten::mul", (gradient, other), (result,))
    return result


def _scaled(tape: StepTape, x: Tensor) -> Tensor:
    """`x * 0.5` and the like."""
    emit, factor = tape.emit, scalar(tape)
    y = emit.tensor(x.shape, x.dtype)
    emit.op("aten::mul", (x, factor), (y,), sequence=emit.sequence)
    tape.record("MulBackward0", (x,), (y,), lambda gradients: (_times(tape, given(gradients[0]), factor),))
    return y


def _shifted(tape: StepTape, x: Tensor) -> Tensor:
    """`x + 1.0`."""
    emit = tape.emit
    y = emit.tensor(x.shape, x.dtype)
    emit.op("aten::add", (x, scalar(tape), 1), (y,), sequence=emit.sequence)
    tape.record("AddBackward0", (x,), (y,), lambda gradients: gradients)
    return y


def _powered(tape: StepTape, x: Tensor, y: Tensor, exponent: float) -> None:
    with tape.emit.around("aten::pow", (x, exponent), (y,), sequence=tape.emit.sequence):
        tape.emit.op("aten::result_type", (x, exponent), (6,))
        tape.emit.op("aten::to", (x, 6, False, False, None), (x,))


def _cubed(tape: StepTape, x: Tensor) -> Tensor:
    """`torch.pow(x, 3.0)`, which autocast runs in fp32."""
    emit = tape.emit
    y = emit.tensor(x.shape, "float32" if tape.autocast else x.dtype)
    if tape.autocast:
        with emit.around("aten::pow", (x, 3.0), (y,)):
            base = to_dtype(tape, x, "float32")
            _powered(tape, base, y, 3.0)
    else:
        base = x
        _powered(tape, base, y, 3.0)
    saved = tape.save(base)

    def backward(gradients: Gradients) -> Gradients:
        squared, tripled = emit.tensor(base.shape, base.dtype), emit.tensor(base.shape, base.dtype)
        _powered(tape, saved(), squared, 2.0)
        with emit.around("aten::mul", (squared, 3.0), (tripled,)):
            emit.op("aten::mul", (squared, scalar(tape)), (tripled,))
        return (_times(tape, given(gradients[0]), tripled),)

    tape.record("PowBackward0", (base,), (y,), backward)
    return y


def tanh(tape: StepTape, x: Tensor) -> Tensor:
    """`torch.tanh`."""
    emit = tape.emit
    y = emit.tensor(x.shape, x.dtype)
    emit.op("aten::tanh", (x,), (y,), sequence=emit.sequence)
    saved = tape.save(y)

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(y.shape, y.dtype)
        emit.op("aten::tanh_backward", (gradients[0], emit.view(saved())), (result,))
        return (result,)

    tape.record("TanhBackward0", (x,), (y,), backward)
    return y


def gelu_new(tape: StepTape, x: Tensor) -> Tensor:
    """Hugging Face's `NewGELUActivation`: the approximation by tanh, op by op."""
    half = _scaled(tape, x)
    inner = add(tape, x, _scaled(tape, _cubed(tape, x)))
    return mul(tape, half, _shifted(tape, tanh(tape, _scaled(tape, inner))))


def gelu(tape: StepTape, x: Tensor) -> Tensor:
    """`functional.gelu`."""
    emit = tape.emit
    saved = tape.save(x)
    y = emit.tensor(x.shape, x.dtype)
    emit.op("aten::gelu", (x, "none"), (y,), sequence=emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(x.shape, x.dtype)
        emit.op("aten::gelu_backward", (gradients[0], saved(), "none"), (result,))
        return (result,)

    tape.record("GeluBackward0", (x,), (y,), backward)
    return y


def silu(tape: StepTape, x: Tensor) -> Tensor:
    """`functional.silu`."""
    emit = tape.emit
    saved = tape.save(x)
    y = emit.tensor(x.shape, x.dtype)
    emit.op("aten::silu", (x,), (y,), sequence=emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(x.shape, x.dtype)
        emit.op("aten::silu_backward", (gradients[0], saved()), (result,))
        return (result,)

    tape.record("SiluBackward0", (x,), (y,), backward)
    return y
