"""Views, casts and copies as PyTorch records them, forward and backward: what lies between the layers that compute."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.emit.autograd import Gradients
from steptime._build.emit.ops import Emitter
from steptime._build.emit.layers import contiguous, empty_like, transposed_pair
from steptime._build.transformer.tape import StepTape, cast
from steptime._program.program import Tensor


def given(gradient: Tensor | None) -> Tensor:
    """A gradient that has to be there."""
    assert gradient is not None
    return gradient


def view_strides(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of the same memory in another shape, or None where that takes a copy (ATen/TensorUtils.cpp, computeStride)."""
    result = [1] * len(wanted)
    at = len(wanted) - 1
    if not shape:
        return tuple(result)
    base, of_tensor, of_view = strides[-1], 1, 1
    for index in range(len(shape) - 1, -1, -1):
        of_tensor *= shape[index]
        if index and (shape[index - 1] == 1 or strides[index - 1] == of_tensor * base):
            continue
        while at >= 0 and (of_view < of_tensor or wanted[at] == 1):
            result[at] = of_view * base
            of_view *= wanted[at]
            at -= 1
        if of_view != of_tensor:
            return None
        if index:
            base, of_tensor, of_view = strides[index - 1], 1, 1
    return tuple(result) if at == -1 else None


def _strides(tensor: Tensor) -> tuple[int, ...]:
    assert tensor.strides is not None
    return tensor.strides


def reshaped(emit: Emitter, x: Tensor, shape: Sequence[int], said: Sequence[int] | None = None) -> Tensor:
    """`x.reshape(shape)` without a node: a view where the memory allows one, else a copy."""
    asked, laid = tuple(shape if said is None else said), view_strides(x.shape, _strides(x), shape)
    if laid is not None:
        y = emit.view(x, shape, laid)
        with emit.around("aten::reshape", (x, asked), (y,)):
            emit.op("aten::view", (x, asked), (y,))
        return y
    copy = emit.tensor(x.shape, x.dtype)
    y = emit.view(copy, shape)
    with emit.around("aten::reshape", (x, asked), (y,)):
        _cloned(emit, x, copy)
        emit.op("aten::_unsafe_view", (copy, tuple(shape)), (y,))
    return y


def _cloned(emit: Emitter, x: Tensor, copy: Tensor, *, sequence: int = -1) -> None:
    with emit.around("aten::clone", (x, 0), (copy,), sequence=sequence):
        empty_like(emit, x, copy)
        emit.op("aten::copy_", (copy, x, False), (copy,))


def view(tape: StepTape, x: Tensor, shape: Sequence[int], said: Sequence[int] | None = None) -> Tensor:
    """`x.view(shape)`; `said` is the shape as asked for, where it holds a -1."""
    emit = tape.emit
    laid = view_strides(x.shape, _strides(x), shape)
    assert laid is not None
    y = emit.view(x, shape, laid)
    emit.op("aten::view", (x, tuple(shape if said is None else said)), (y,), sequence=emit.sequence)
    tape.record("ViewBackward0", (x,), (y,), lambda gradients: (reshaped(emit, given(gradients[0]), x.shape),))
    return y


def reshape(tape: StepTape, x: Tensor, shape: Sequence[int], said: Sequence[int] | None = None) -> Tensor:
    """`x.reshape(shape)`; `said` is the shape as asked for, where it holds a -1."""
    emit, asked = tape.emit, tuple(shape if said is None else said)
    laid = view_strides(x.shape, _strides(x), shape)
    if laid is not None:
        y = emit.view(x, shape, laid)
        with emit.around("aten::reshape", (x, asked), (y,), sequence=emit.sequence):
            emit.op("aten::view", (x, asked), (y,), sequence=emit.sequence)
        tape.record("ViewBackward0", (x,), (y,), lambda gradients: (reshaped(emit, given(gradients[0]), x.shape),))
        return y
    copy = emit.tensor(x.shape, x.dtype)
    y = emit.view(copy, shape)
    with emit.around("aten::reshape", (x, asked), (y,), sequence=emit.sequence):
        _cloned(emit, x, copy, sequence=emit.sequence)
        tape.record("CloneBackward0", (x,), (copy,), lambda gradients: gradients)
        emit.op("aten::_unsafe_view", (copy, tuple(shape)), (y,), sequence=emit.sequence)
        tape.record("UnsafeViewBackward0", (copy,), (y,), lambda gradients: (reshaped(emit, given(gradients[0]), x.shape),))
    return y


def transpose(tape: StepTape, x: Tensor, first: int, second: int) -> Tensor:
    """`x.transpose(first, second)`."""
    emit = tape.emit
    y = transposed_pair(emit, x, first, second, sequence=emit.sequence)
    tape.record(
        "TransposeBackward0", (x,), (y,), lambda gradients: (transposed_pair(emit, given(gradients[0]), first, second),)
    )
    return y


def permute(tape: StepTape, x: Tensor, order: tuple[int, ...]) -> Tensor:
    """`x.permute(order)`."""
    back = tuple(order.index(place) for place in range(len(order)))
    y = _permuted(tape.emit, x, order, sequence=tape.emit.sequence)
    tape.record("PermuteBackward0", (x,), (y,), lambda gradients: (_permuted(tape.emit, given(gradients[0]), back),))
    return y


def _permuted(emit: Emitter, x: Tensor, order: tuple[int, ...], *, sequence: int = -1) -> Tensor:
    y = emit.view(x, [x.shape[index] for index in order], [_strides(x)[index] for index in order])
    with emit.around("aten::permute", (x, order), (y,), sequence=sequence):
        emit.op("aten::as_strided", (x, y.shape, y.strides, None), (y,))
    return y


def turned(tape: StepTape, x: Tensor) -> Tensor:
    """`x.t()` of a matrix."""
    emit = tape.emit
    y = emit.transposed(x, sequence=emit.sequence)
    tape.record("TBackward0", (x,), (y,), lambda gradients: (emit.transposed(given(gradients[0])),))
    return y


def sliced(emit: Emitter, x: Tensor, dimension: int, start: int, end: int, *, sequence: int = -1) -> Tensor:
    """`x[..., start:end]` along one dimension, without a node."""
    shape = (*x.shape[:dimension], end - start, *x.shape[dimension + 1 :])
    y = emit.view(x, shape, x.strides, x.offset + start * _strides(x)[dimension])
    with emit.around("aten::slice", (x, dimension, start, end, 1), (y,), sequence=sequence):
        emit.op("aten::as_strided", (x, y.shape, y.strides, y.offset), (y,))
    return y


def split(tape: StepTape, x: Tensor, size: int) -> tuple[Tensor, ...]:
    """`x.split(size)` along the last dimension; the gradients are put together again."""
    emit, last = tape.emit, len(x.shape) - 1
    count = x.shape[last] // size
    places = [
        emit.view(x, (*x.shape[:last], size), x.strides, x.offset + part * size * _strides(x)[last]) for part in range(count)
    ]
    with emit.around("aten::split", (x, size, last), (tuple(places),), sequence=emit.sequence):
        for part, y in enumerate(places):
            text = (x, last, part * size, size)
            with (
                emit.around("aten::narrow", text, (y,)),
                emit.around("aten::slice", (x, last, part * size, (part + 1) * size, 1), (y,)),
            ):
                emit.op("aten::as_strided", (x, y.shape, y.strides, y.offset), (y,))

    def backward(gradients: Gradients) -> Gradients:
        whole = emit.tensor(x.shape, x.dtype)
        emit.op("aten::cat", (tuple(given(each) for each in gradients), last), (whole,))
        return (whole,)

    tape.record("SplitBackward0", (x,), places, backward)
    return tuple(places)


def to_dtype(tape: StepTape, x: Tensor, dtype: str) -> Tensor:
    """`x.to(dtype)`; itself where it has that dtype."""
    if x.dtype == dtype:
        return x
    emit = tape.emit
    y = cast(emit, x, dtype)
    tape.record("ToCopyBackward0", (x,), (y,), lambda gradients: (cast(emit, given(gradients[0]), x.dtype, placed=True),))
    return y


def lowered(tape: StepTape, x: Tensor) -> Tensor:
    """What autocast makes of an argument of a product; weights are cast once in a forward pass."""
    if not tape.autocast or x.dtype == tape.autocast:
        return x
    known = tape.casts.get(x.id or 0)
    if known is not None:
        return known
    y = to_dtype(tape, x, tape.autocast)
    if tape.is_parameter(x):
        tape.casts[x.id or 0] = y
    return y


def contiguous_copy(tape: StepTape, x: Tensor) -> Tensor:
    """`x.contiguous()` of a tensor that is not."""
    emit = tape.emit
    y = emit.tensor(x.shape, x.dtype)
    with emit.around("aten::contiguous", (x, 0), (y,), sequence=emit.sequence):
        _cloned(emit, x, y, sequence=emit.sequence)
    tape.record("CloneBackward0", (x,), (y,), lambda gradients: gradients)
    return y


def made_contiguous(emit: Emitter, x: Tensor) -> Tensor:
    """`x.contiguous()` without a node: itself where it is."""
    if view_strides(x.shape, _strides(x), (x.numel,)) is None:
        return contiguous(emit, x)
    emit.op("aten::contiguous", (x, 0), (x,))
    return x
