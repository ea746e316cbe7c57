"""Layers of Transformers as PyTorch records them on a GPU, forward and backward: products, norms, activations, dropout.

Ops and their order inside a layer are those of the execution traces of GPT-2 and BERT that come with the package, in fp32 and
under autocast, which shows an op twice: around the casts of its arguments, and as it runs.
"""

from __future__ import annotations

from typing import NamedTuple

from steptime._build.emit.autograd import Gradients
from steptime._build.emit.layers import DTYPE_NUMBERS, MOST_FOR_EPILOGUE, number
from steptime._build.transformer.tape import Saved, StepTape
from steptime._build.transformer.views import given, lowered, reshape, reshaped, to_dtype, turned, view
from steptime._program.program import Tensor


def linear(tape: StepTape, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`: the weight lies as [out, in]."""
    emit = tape.emit
    dtype = tape.autocast or x.dtype
    flat = emit.tensor((x.numel // x.shape[-1], weight.shape[0]), dtype)
    y = flat if len(x.shape) == 2 else emit.view(flat, (*x.shape[:-1], weight.shape[0]))
    if not tape.autocast:
        _linear(tape, x, weight, bias, flat, y)
        return y
    with emit.around("aten::linear", (x, weight, bias), (y,)):
        # Arguments of a C++ call are cast from the last to the first.
        low_bias = None if bias is None else lowered(tape, bias)
        low_weight, low_x = lowered(tape, weight), lowered(tape, x)
        _linear(tape, low_x, low_weight, low_bias, flat, y)
    return y


def _linear(tape: StepTape, x: Tensor, weight: Tensor, bias: Tensor | None, flat: Tensor, y: Tensor) -> None:
    emit, rows = tape.emit, flat.shape[0]
    saved_x, saved_weight = tape.save(x), tape.save(weight)
    matrices = _Matrices(
        saved_x if len(x.shape) == 2 else lambda: emit.view(saved_x(), (rows, x.shape[-1])),
        lambda: emit.view(saved_weight(), weight.shape[::-1], (1, weight.shape[1])),
    )
    with emit.around("aten::linear", (x, weight, bias), (y,), sequence=emit.sequence):
        if bias is not None:
            matrix = x if len(x.shape) == 2 else view(tape, x, (rows, x.shape[-1]))
            _addmm(tape, bias, matrix, turned(tape, weight), flat, matrices)
            if y is not flat:
                emit.op("aten::view", (flat, y.shape), (y,), sequence=emit.sequence)
                tape.record("ViewBackward0", (flat,), (y,), lambda got: (reshaped(emit, given(got[0]), flat.shape),))
            return
        other = turned(tape, weight)
        with emit.around("aten::matmul", (x, other), (y,), sequence=emit.sequence):
            _mm(tape, reshape(tape, x, (rows, x.shape[-1])) if y is not flat else x, other, flat, matrices)
            if y is not flat:
                emit.op("aten::_unsafe_view", (flat, y.shape), (y,), sequence=emit.sequence)
                tape.record("UnsafeViewBackward0", (flat,), (y,), lambda got: (reshaped(emit, given(got[0]), flat.shape),))


def conv1d(tape: StepTape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Hugging Face's `Conv1D`: a linear layer whose weight lies as [in, out]."""
    emit, rows = tape.emit, x.numel // x.shape[-1]
    matrix = view(tape, x, (rows, x.shape[-1]), (-1, x.shape[-1]))
    flat = emit.tensor((rows, weight.shape[1]), tape.autocast or x.dtype)
    if tape.autocast:
        with emit.around("aten::addmm", (bias, matrix, weight, 1, 1), (flat,)):
            low_weight, low_matrix, low_bias = lowered(tape, weight), lowered(tape, matrix), lowered(tape, bias)
            _addmm(tape, low_bias, low_matrix, low_weight, flat, _saved(tape, low_matrix, low_weight))
    else:
        _addmm(tape, bias, matrix, weight, flat, _saved(tape, matrix, weight))
    return view(tape, flat, (*x.shape[:-1], weight.shape[1]))


class _Matrices(NamedTuple):
    """The two factors of a product, as its backward has them."""

    x: Saved
    weight: Saved


def _saved(tape: StepTape, x: Tensor, weight: Tensor) -> _Matrices:
    return _Matrices(tape.save(x), tape.save(weight))


def _addmm(tape: StepTape, bias: Tensor, x: Tensor, weight: Tensor, y: Tensor, saved: _Matrices) -> None:
    emit = tape.emit
    with emit.around("aten::addmm", (bias, x, weight, 1, 1), (y,), sequence=emit.sequence):
        if 1 in weight.shape or max(*x.shape, *weight.shape) >= MOST_FOR_EPILOGUE:
            spread = emit.view(bias, y.shape, (0, 1))
            with emit.around("aten::expand", (bias, y.shape, False), (spread,)):
                emit.op("aten::as_strided", (bias, y.shape, (0, 1), None), (spread,))

    def backward(gradients: Gradients) -> Gradients:
        gradient = given(gradients[0])
        of_x = _product(tape, gradient, tape.emit.transposed(saved.weight()))
        return gradient, of_x, _of_weight(tape, gradient, saved.x(), weight)

    tape.record("AddmmBackward0", (bias, x, weight), (y,), backward)


def _mm(tape: StepTape, x: Tensor, weight: Tensor, y: Tensor, saved: _Matrices) -> None:
    tape.emit.op("aten::mm", (x, weight), (y,), sequence=tape.emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        gradient = given(gradients[0])
        # Derivatives are computed in the alphabetical order of the arguments' names: mat2, then self.
        of_weight = _of_weight(tape, gradient, saved.x(), weight)
        return _product(tape, gradient, tape.emit.transposed(saved.weight())), of_weight

    tape.record("MmBackward0", (x, weight), (y,), backward)


def _of_weight(tape: StepTape, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the second matrix, laid as that is (torch/csrc/autograd/FunctionsManual.cpp, mm_mat2_backward)."""
    emit = tape.emit
    if weight.strides == (1, weight.shape[0]):
        return emit.transposed(_product(tape, emit.transposed(gradient), x))
    return _product(tape, emit.transposed(x), gradient)


def _product(tape: StepTape, one: Tensor, other: Tensor) -> Tensor:
    result = tape.emit.tensor((one.shape[0], other.shape[1]), one.dtype)
    tape.emit.op("aten::mm", (one, other), (result,))
    return result


def layer_norm(tape: StepTape, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """`functional.layer_norm` over the last dimension; autocast runs it in fp32."""
    emit, width = tape.emit, (x.shape[-1],)
    y = emit.tensor(x.shape, "float32" if tape.autocast else x.dtype)
    if not tape.autocast:
        _layer_norm(tape, x, weight, bias, y, epsilon)
        return y
    with emit.around("aten::layer_norm", (x, width, weight, bias, epsilon, True), (y,)):
        _layer_norm(tape, to_dtype(tape, x, "float32"), weight, bias, y, epsilon)
    return y


def _layer_norm(tape: StepTape, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, epsilon: float) -> None:
    emit, width, rows = tape.emit, (x.shape[-1],), x.numel // x.shape[-1]
    mean, deviation = emit.tensor((rows,)), emit.tensor((rows,))
    means, deviations = (emit.view(each, (*x.shape[:-1], 1)) for each in (mean, deviation))
    saved_x = tape.save(x)
    with (
        emit.around("aten::layer_norm", (x, width, weight, bias, epsilon, True), (y,), sequence=emit.sequence),
        emit.around(
            "aten::native_layer_norm", (x, width, weight, bias, epsilon), (y, means, deviations), sequence=emit.sequence
        ),
    ):
        emit.op("aten::empty", (y.shape, DTYPE_NUMBERS[y.dtype], 0, emit.device, None, 0), (y,))
        for item in (mean, deviation):
            emit.op("aten::empty", (item.shape, 6, 0, emit.device, None, None), (item,))
        for item, shown in ((mean, means), (deviation, deviations)):
            emit.op("aten::view", (item, shown.shape), (shown,))
    saved_means, saved_deviations = tape.save(means), tape.save(deviations)

    def backward(gradients: Gradients) -> Gradients:
        results = emit.tensor(x.shape, x.dtype), emit.tensor(width, weight.dtype), emit.tensor(width, bias.dtype)
        text = (gradients[0], saved_x(), width, saved_means(), saved_deviations(), weight, bias, (True, True, True))
        with emit.around("aten::native_layer_norm_backward", text, results):
            for each in results:
                emit.op("aten::empty", (each.shape, DTYPE_NUMBERS[each.dtype], 0, emit.device, None, 0), (each,))
        return results

    tape.record("NativeLayerNormBackward0", (x, weight, bias), (y,), backward)


def rms_norm(tape: StepTape, x: Tensor, weight: Tensor, epsilon: float = 1e-5) -> Tensor:
    """`functional.rms_norm` over the last dimension, in one kernel as since PyTorch 2.9."""
    emit, width = tape.emit, (x.shape[-1],)
    y, deviations = emit.tensor(x.shape, x.dtype), emit.tensor((*x.shape[:-1], 1))
    saved_x = tape.save(x)
    with emit.around("aten::rms_norm", (x, width, weight, epsilon), (y,), sequence=emit.sequence):
        emit.op("aten::_fused_rms_norm", (x, width, weight, epsilon), (y, deviations), sequence=emit.sequence)
    saved_deviations = tape.save(deviations)

    def backward(gradients: Gradients) -> Gradients:
        results = emit.tensor(x.shape, x.dtype), emit.tensor(width, weight.dtype)
        text = (gradients[0], saved_x(), width, saved_deviations(), weight, (True, True))
        emit.op("aten::_fused_rms_norm_backward", text, results)
        return results

    tape.record("FusedRmsNormBackward0", (x, weight), (y,), backward)
    return y


def dropout(tape: StepTape, x: Tensor, probability: float) -> Tensor:
    """`functional.dropout` in training; nothing where the probability is 0."""
    if not probability:
        return x
    emit = tape.emit
    y, kept = emit.tensor(x.shape, x.dtype), emit.tensor(x.shape, "bool")
    with (
        emit.around("aten::dropout", (x, probability, True), (y,), sequence=emit.sequence),
        emit.around("aten::native_dropout", (x, probability, True), (y, kept), sequence=emit.sequence),
    ):
        for result, item in ((kept, (DTYPE_NUMBERS["bool"], 0, emit.device)), (y, (None, None, None))):
            with emit.around("aten::empty_like", (x, *item, None, None), (result,)):
                laid = (result.shape, result.strides, DTYPE_NUMBERS[result.dtype], 0, emit.device, None)
                emit.op("aten::empty_strided", laid, (result,))
    saved = tape.save(kept)

    def backward(gradients: Gradients) -> Gradients:
        gradient = given(gradients[0])
        result = emit.tensor(x.shape, gradient.dtype)
        with (
            emit.around("aten::native_dropout_backward", (gradient, saved(), round(1.0 / (1.0 - probability), 6)), (result,)),
            emit.around("aten::empty_like", (gradient, None, None, None, None, 0), (result,)),
        ):
            emit.op("aten::empty", (result.shape, DTYPE_NUMBERS[result.dtype], 0, emit.device, None, 0), (result,))
        return (result,)

    tape.record("NativeDropoutBackward0", (x,), (y,), backward)
    return y


def scalar(tape: StepTape) -> Tensor:
    """A number that an op wrapped into a tensor of the host."""
    return number(tape.emit, "float64")
