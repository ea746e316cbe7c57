"""Views, casts and copies that autograd records: what lies between the layers that compute."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from steptime._build.emit.emitter import view_strides
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.writer import strides_of
from steptime._program.program import Tensor


def view(tape: Tape, x: Tensor, shape: Sequence[int], call_shape: Sequence[int] | None = None) -> Tensor:
    """`x.view(shape)`; `call_shape` is the shape as the call has it, where it holds a -1."""
    y = tape.emit.viewed(x, shape, call_shape, node=True)
    return tape.node("ViewBackward0", (x,), y, lambda gradient: tape.emit.reshaped(gradient, x.shape))


def reshape(tape: Tape, x: Tensor, shape: Sequence[int], call_shape: Sequence[int] | None = None) -> Tensor:
    """`x.reshape(shape)`; `call_shape` is the shape as the call has it, where it holds a -1."""
    emit, call = tape.emit, tuple(shape if call_shape is None else call_shape)
    laid = view_strides(x.shape, strides_of(x), shape)
    if laid is not None:
        y = emit.view(x, shape, laid)
        with emit.op("reshape", (x, call), (y,), node=True):
            emit.op("view", (x, call), (y,), node=True)
        return tape.node("ViewBackward0", (x,), y, lambda gradient: emit.reshaped(gradient, x.shape))
    copy = emit.tensor(x.shape, x.dtype)
    y = emit.view(copy, shape)
    with emit.op("reshape", (x, call), (y,), node=True):
        tape.node("CloneBackward0", (x,), emit.cloned(x, copy, node=True), lambda gradient: gradient)
        emit.op("_unsafe_view", (copy, tuple(shape)), (y,), node=True)
        return tape.node("UnsafeViewBackward0", (copy,), y, lambda gradient: emit.reshaped(gradient, x.shape))


def transpose(tape: Tape, x: Tensor, first: int, second: int) -> Tensor:
    """`x.transpose(first, second)`."""
    y = tape.emit.transposed(x, first, second, node=True)
    return tape.node("TransposeBackward0", (x,), y, lambda gradient: tape.emit.transposed(gradient, first, second))


def permute(tape: Tape, x: Tensor, order: tuple[int, ...]) -> Tensor:
    """`x.permute(order)`."""
    back = tuple(order.index(index) for index in range(len(order)))
    y = tape.emit.permuted(x, order, node=True)
    return tape.node("PermuteBackward0", (x,), y, lambda gradient: tape.emit.permuted(gradient, back))


def turn(tape: Tape, x: Tensor) -> Tensor:
    """`x.t()` of a matrix."""
    return tape.node("TBackward0", (x,), tape.emit.turned(x, node=True), tape.emit.turned)


def split(tape: Tape, x: Tensor, sizes: int | Sequence[int]) -> tuple[Tensor, ...]:
    """`x.split(sizes)` along the last dimension; the gradients are put together again."""
    emit, last, strides = tape.emit, len(x.shape) - 1, strides_of(x)
    call = sizes if isinstance(sizes, int) else tuple(sizes)
    widths = (call,) * (x.shape[last] // call) if isinstance(call, int) else call
    starts = tuple(accumulate(widths[:-1], initial=0))
    parts = tuple(
        emit.view(x, (*x.shape[:last], size), strides, x.offset + start * strides[last])
        for start, size in zip(starts, widths, strict=True)
    )
    with emit.op("split" if isinstance(call, int) else "split_with_sizes", (x, call, last), (parts,), node=True):
        for start, size, y in zip(starts, widths, parts, strict=True):
            with (
                emit.op("narrow", (x, last, start, size), (y,)),
                emit.op("slice", (x, last, start, start + size, 1), (y,)),
            ):
                emit.op("as_strided", (x, y.shape, y.strides, y.offset), (y,))

    def backward(gradients: Gradients) -> Gradients:
        return (emit.new("cat", (gradients, last), x.shape, x.dtype),)

    tape.record("SplitBackward0" if isinstance(call, int) else "SplitWithSizesBackward0", (x,), parts, backward)
    return parts


def split_last(tape: Tape, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """`x.split(sizes, dim=-1)`; the gradients are put together again."""
    emit, last, strides = tape.emit, len(x.shape) - 1, strides_of(x)
    starts = accumulate(sizes, initial=0)
    parts = tuple(
        emit.view(x, (*x.shape[:last], size), strides, x.offset + start * strides[last])
        for size, start in zip(sizes, starts, strict=False)
    )
    emit.op("split_with_sizes", (x, sizes, -1), (parts,), node=True)

    def backward(gradients: Gradients) -> Gradients:
        return (emit.new("cat", (gradients, last), x.shape, x.dtype),)

    tape.record("SplitWithSizesBackward0", (x,), parts, backward)
    return parts


def cat_last(tape: Tape, tensors: Sequence[Tensor]) -> Tensor:
    """`torch.cat(tensors, dim=-1)` of tensors of one dtype."""
    emit, first = tape.emit, tensors[0]
    *starts, width = accumulate((each.shape[-1] for each in tensors), initial=0)
    last = len(first.shape) - 1
    y = emit.new("cat", (tuple(tensors), -1), (*first.shape[:-1], width), first.dtype, node=True)

    def backward(gradient: Tensor) -> Gradients:
        return tuple(
            emit.sliced(gradient, last, start, start + each.shape[-1], narrow=True)
            for start, each in zip(starts, tensors, strict=True)
        )

    return tape.node("CatBackward0", tensors, y, backward)


def expand(tape: Tape, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`x.expand(shape)` along dimensions of one element; their gradients are summed."""
    strides = tuple(0 if have != want else step for have, want, step in zip(x.shape, shape, strides_of(x), strict=True))
    y = tape.emit.strided(x, shape, strides, ("expand", (shape, False)), node=True)
    spread = tuple(place for place, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want)
    if not spread:
        return tape.node("ExpandBackward0", (x,), y, lambda gradient: gradient)
    return tape.node("ExpandBackward0", (x,), y, lambda gradient: tape.emit.new("sum", (gradient, spread, True, None), x.shape))


def slice_last(tape: Tape, x: Tensor, start: int, end: int) -> Tensor:
    """`x[..., start:end]`."""
    emit, last = tape.emit, len(x.shape) - 1
    y = emit.sliced(x, last, start, end, node=True)
    call = (x.shape, last, start, end, 1)
    return tape.node("SliceBackward0", (x,), y, lambda gradient: emit.new("slice_backward", (gradient, *call), x.shape))


def first_token(tape: Tape, x: Tensor) -> Tensor:
    """`x[:, 0]`."""
    emit, (samples, tokens, width), strides = tape.emit, x.shape, strides_of(x)
    select = ("select", (1, 0))
    y = emit.strided(x, (samples, width), (strides[0], strides[2]), select, offset=0, node=True)

    def backward(gradient: Tensor) -> Tensor:
        result = emit.tensor(x.shape, x.dtype)
        with emit.op("select_backward", (gradient, x.shape, 1, 0), (result,)):
            emit.zeros(result)
            row = emit.strided(result, y.shape, (tokens * width, 1), select, offset=0)
            emit.op("copy_", (row, gradient, False), (row,))
        return result

    return tape.node("SelectBackward0", (x,), y, backward)


def to_dtype(tape: Tape, x: Tensor, dtype: str) -> Tensor:
    """`x.to(dtype)`; itself where it has that dtype."""
    if x.dtype == dtype:
        return x
    y = tape.emit.cast(x, dtype)
    return tape.node("ToCopyBackward0", (x,), y, lambda gradient: tape.emit.cast(gradient, x.dtype, placed=True))


def lowered(tape: Tape, x: Tensor) -> Tensor:
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


def contiguous_copy(tape: Tape, x: Tensor) -> Tensor:
    """`x.contiguous()` of a tensor that is not."""
    return tape.node("CloneBackward0", (x,), tape.emit.contiguous(x, node=True), lambda gradient: gradient)
