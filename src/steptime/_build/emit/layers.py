"""Layers as PyTorch records them on a GPU, forward and backward: each writes its ops and records its nodes on a `Tape`.

Ops and their order inside a layer are those of the execution traces of PyTorch 2.11 that come with the package.
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.emit.autograd import Gradients, Tape
from steptime._build.emit.ops import Emitter
from steptime._program.program import Tensor

# c10::ScalarType by name, as execution traces write it.
DTYPE_NUMBERS = {"uint8": 0, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7, "bool": 11, "bfloat16": 15}
STRIDED, SPARSE = 0, 1  # c10::Layout
_CONTIGUOUS = 0  # c10::MemoryFormat
_MEAN = 1  # at::Reduction
# From here on cuBLASLt does not add the bias itself (aten/src/ATen/native/cuda/Blas.cpp, addmm_out_cuda_impl).
MOST_FOR_EPILOGUE = 65535 * 32


def linear(tape: Tape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`functional.linear` of a matrix: the transposed weight and one product with the bias added."""
    emit = tape.emit
    y = emit.tensor((x.shape[0], weight.shape[0]), x.dtype)
    with emit.around("aten::linear", (x, weight, bias), (y,), sequence=emit.sequence):
        turned = emit.transposed(weight, sequence=emit.sequence)
        tape.record("TBackward0", (weight,), (turned,), lambda gradients: (emit.transposed(given(gradients)),))
        addmm(tape, bias, x, turned, y)
    return y


def addmm(tape: Tape, bias: Tensor, x: Tensor, turned: Tensor, y: Tensor) -> None:
    """`bias + x @ turned`, where `turned` is the view of a row-major matrix."""
    emit = tape.emit
    with emit.around("aten::addmm", (bias, x, turned, 1, 1), (y,), sequence=emit.sequence):
        sizes = (*x.shape, *turned.shape)
        if 1 in turned.shape or max(sizes) >= MOST_FOR_EPILOGUE:
            spread = emit.view(bias, y.shape, (0, 1))
            with emit.around("aten::expand", (bias, y.shape, False), (spread,)):
                emit.op("aten::as_strided", (bias, y.shape, (0, 1), None), (spread,))

    def backward(gradients: Gradients) -> Gradients:
        gradient = given(gradients)
        of_x = _product(emit, gradient, emit.transposed(turned)) if tape.needs(x) else None
        of_turned = None
        if tape.needs(turned):
            of_turned = emit.transposed(_product(emit, emit.transposed(gradient), x))
        return (gradient if tape.needs(bias) else None), of_x, of_turned

    tape.record("AddmmBackward0", (bias, x, turned), (y,), backward)


def relu(tape: Tape, x: Tensor) -> Tensor:
    """`functional.relu`."""
    emit = tape.emit
    y = emit.tensor(x.shape, x.dtype)
    with emit.around("aten::relu", (x,), (y,), sequence=emit.sequence):
        emit.op("aten::clamp_min", (x, 0), (y,))

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(y.shape, y.dtype)
        emit.op("aten::threshold_backward", (gradients[0], emit.view(y), 0), (result,))
        return (result,)

    tape.record("ReluBackward0", (x,), (y,), backward)
    return y


def sigmoid(tape: Tape, x: Tensor) -> Tensor:
    """`torch.sigmoid`."""
    emit = tape.emit
    y = emit.tensor(x.shape, x.dtype)
    emit.op("aten::sigmoid", (x,), (y,), sequence=emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(y.shape, y.dtype)
        emit.op("aten::sigmoid_backward", (gradients[0], emit.view(y)), (result,))
        return (result,)

    tape.record("SigmoidBackward0", (x,), (y,), backward)
    return y


def cat(tape: Tape, tensors: Sequence[Tensor]) -> Tensor:
    """`torch.cat` of matrices side by side."""
    emit, rows = tape.emit, tensors[0].shape[0]
    widths = [tensor.shape[1] for tensor in tensors]
    y = emit.tensor((rows, sum(widths)), tensors[0].dtype)
    with emit.around("aten::cat", (tuple(tensors), 1), (y,), sequence=emit.sequence):
        if len(tensors) == 1:
            _narrow(emit, y, 0, widths[0])

    def backward(gradients: Gradients) -> Gradients:
        gradient = given(gradients)
        parts: list[Tensor | None] = []
        start = 0
        for tensor, width in zip(tensors, widths, strict=True):
            parts.append(_narrow(emit, gradient, start, width) if tape.needs(tensor) else None)
            start += width
        return tuple(parts)

    tape.record("CatBackward0", tensors, (y,), backward)
    return y


def binary_cross_entropy(tape: Tape, x: Tensor, target: Tensor) -> Tensor:
    """`functional.binary_cross_entropy` of one column, its mean."""
    emit = tape.emit
    each = emit.tensor(x.shape, x.dtype)
    loss = emit.view(each, (), ())
    with emit.around("aten::binary_cross_entropy", (x, target, None, _MEAN), (loss,), sequence=emit.sequence):
        _empty_like(emit, each, x)
        for column in (each, x, target):
            flat = emit.view(column, column.shape[:1])
            with emit.around("aten::squeeze", (column,), (flat,)):
                emit.op("aten::as_strided", (column, flat.shape, flat.strides, None), (flat,))
        mean = emit.tensor((), x.dtype)
        with emit.around("aten::mean", (each, None), (mean,)), emit.around("aten::mean", (each, (), False, None), (mean,)):
            emit.as_strided(mean, (1,) * len(x.shape), (0,) * len(x.shape))
        with emit.around("aten::resize_as_", (each, mean, None), (loss,)):
            emit.op("aten::resize_", (each, (), None), (loss,))
        emit.op("aten::copy_", (loss, mean, False), (loss,))

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(x.shape, x.dtype)
        first = given(gradients)
        with emit.around("aten::binary_cross_entropy_backward", (first, x, target, None, _MEAN), (result,)):
            _empty_like(emit, result, x)
            zeros = (0,) * len(x.shape)
            spread = emit.view(first, x.shape, zeros)
            with (
                emit.around("aten::expand_as", (first, x), (spread,)),
                emit.around("aten::expand", (first, x.shape, False), (spread,)),
            ):
                emit.op("aten::as_strided", (first, x.shape, zeros, None), (spread,))
            with emit.around("aten::div_", (result, result.numel), (result,)):
                emit.op("aten::div_", (result, number(emit, "int64")), (result,))
        return (result,)

    tape.record("BinaryCrossEntropyBackward0", (x,), (loss,), backward)
    return loss


def mse_loss(tape: Tape, x: Tensor, target: Tensor) -> Tensor:
    """`functional.mse_loss`, its mean."""
    emit = tape.emit
    each = emit.tensor(x.shape, x.dtype)
    loss = emit.view(each, (), ())
    emit.op("aten::broadcast_tensors", ((x, target),), ((x, target),), sequence=emit.sequence)
    with emit.around("aten::mse_loss", (x, target, _MEAN), (loss,), sequence=emit.sequence):
        emit.op("aten::resize_", (each, (), None), (loss,))
        squares = empty(emit, x.shape, x.dtype, layout=None, memory_format=_CONTIGUOUS)
        with emit.around("aten::mean", (squares, (), False, None, loss), (loss,)):
            emit.as_strided(loss, (1,) * len(x.shape), (0,) * len(x.shape))

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(x.shape, x.dtype)
        text = (gradients[0], x, target, _MEAN)
        with emit.around("aten::mse_loss_backward", text, (result,)):
            with emit.around("aten::zeros_like", (x, None, None, None, None, _CONTIGUOUS), (result,)):
                empty_like(emit, x, result)
                zero(emit, result)
            emit.op("aten::mse_loss_backward", (*text, result), (result,))
        return (result,)

    tape.record("MseLossBackward0", (x,), (loss,), backward)
    return loss


def number(emit: Emitter, dtype: str) -> Tensor:
    """A number that an op wrapped into a tensor of the host."""
    return emit.tensor((), dtype, device="cpu")


def empty(
    emit: Emitter,
    shape: Sequence[int],
    dtype: str,
    *,
    layout: int | None = STRIDED,
    pinned: bool | None = None,
    memory_format: int | None = None,
    made: Tensor | None = None,
) -> Tensor:
    """`torch.empty`."""
    y = emit.tensor(shape, dtype) if made is None else made
    emit.op("aten::empty", (y.shape, DTYPE_NUMBERS[dtype], layout, emit.device, pinned, memory_format), (y,))
    return y


def empty_like(emit: Emitter, x: Tensor, made: Tensor) -> None:
    """`torch.empty_like`, row-major and with all options said, as other ops call it."""
    text = (x, DTYPE_NUMBERS[x.dtype], STRIDED, emit.device, None, _CONTIGUOUS)
    with emit.around("aten::empty_like", text, (made,)):
        empty(emit, made.shape, made.dtype, memory_format=_CONTIGUOUS, made=made)


def contiguous(emit: Emitter, x: Tensor) -> Tensor:
    """`x.contiguous()` of a tensor that is not: a copy."""
    y = emit.tensor(x.shape, x.dtype)
    with emit.around("aten::contiguous", (x, _CONTIGUOUS), (y,)):
        return copied(emit, x, y)


def copied(emit: Emitter, x: Tensor, made: Tensor | None = None) -> Tensor:
    """`x.clone()`, row-major."""
    y = emit.tensor(x.shape, x.dtype) if made is None else made
    with emit.around("aten::clone", (x, _CONTIGUOUS), (y,)):
        empty_like(emit, x, y)
        emit.op("aten::copy_", (y, x, False), (y,))
    return y


def zero(emit: Emitter, x: Tensor) -> None:
    """`x.zero_()`."""
    with emit.around("aten::zero_", (x,), (x,)):
        emit.op("aten::fill_", (x, 0), (x,))


def zeros(emit: Emitter, shape: Sequence[int], dtype: str = "float32") -> Tensor:
    """`torch.zeros`."""
    y = emit.tensor(shape, dtype)
    with emit.around("aten::zeros", (y.shape, DTYPE_NUMBERS[dtype], None, emit.device, False), (y,)):
        empty(emit, y.shape, dtype, layout=None, pinned=False, made=y)
        zero(emit, y)
    return y


def transposed_pair(emit: Emitter, x: Tensor, first: int, second: int, *, sequence: int = -1) -> Tensor:
    """`x.transpose(first, second)`."""
    assert x.strides is not None
    shape, strides = list(x.shape), list(x.strides)
    for sizes in (shape, strides):
        sizes[first], sizes[second] = sizes[second], sizes[first]
    y = emit.view(x, shape, strides)
    with emit.around("aten::transpose", (x, first, second), (y,), sequence=sequence):
        emit.op("aten::as_strided", (x, y.shape, y.strides, None), (y,))
    return y


def _product(emit: Emitter, one: Tensor, other: Tensor) -> Tensor:
    result = emit.tensor((one.shape[0], other.shape[1]), one.dtype)
    emit.op("aten::mm", (one, other), (result,))
    return result


def _narrow(emit: Emitter, x: Tensor, start: int, length: int) -> Tensor:
    """`x.narrow(1, start, length)` of a matrix."""
    y = emit.view(x, (x.shape[0], length), x.strides, x.offset + start)
    with (
        emit.around("aten::narrow", (x, 1, start, length), (y,)),
        emit.around("aten::slice", (x, 1, start, start + length, 1), (y,)),
    ):
        emit.op("aten::as_strided", (x, y.shape, y.strides, y.offset), (y,))
    return y


def _empty_like(emit: Emitter, made: Tensor, x: Tensor) -> None:
    with emit.around("aten::empty_like", (x, None, None, None, None, None), (made,)):
        text = (made.shape, made.strides, DTYPE_NUMBERS[made.dtype], STRIDED, emit.device, None)
        emit.op("aten::empty_strided", text, (made,))


def given(gradients: Gradients) -> Tensor:
    """The gradient of a node's first output, which it always gets."""
    gradient = gradients[0]
    assert gradient is not None
    return gradient
