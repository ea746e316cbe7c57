"""Embeddings as PyTorch records them, forward and backward, with the memory that their sort takes."""

from __future__ import annotations

from steptime._build.emit.autograd import Gradients
from steptime._build.emit.ops import Emitter
from steptime._build.emit.layers import contiguous, empty, zero
from steptime._build.transformer.tape import StepTape
from steptime._build.transformer.views import given, reshaped
from steptime._program.program import Tensor

# Up to here gradients are added without sorting (aten/src/ATen/native/cuda/Embedding.cu).
_MOST_UNSORTED = 3072
# A thread adds so many rows: there is a part for every row found, and one for so many lookups (EmbeddingBackwardKernel.cu).
_ROWS_PER_THREAD = 10


def embedding(tape: StepTape, weight: Tensor, indices: Tensor) -> Tensor:
    """`functional.embedding`."""
    emit, (rows, width), count = tape.emit, weight.shape, indices.numel
    flat = emit.tensor((count, width), weight.dtype)
    y = flat if len(indices.shape) == 1 else emit.view(flat, (*indices.shape, width))
    with emit.around("aten::embedding", (weight, indices, -1, False, False), (y,), sequence=emit.sequence):
        looked_up = indices if len(indices.shape) == 1 else reshaped(emit, indices, (count,), (-1,))
        _selected(emit, weight, looked_up, flat)
        if y is not flat:
            emit.op("aten::view", (flat, y.shape), (y,))

    def backward(gradients: Gradients) -> Gradients:
        gradient, result = given(gradients[0]), emit.tensor(weight.shape, weight.dtype)
        text = (gradient, indices, rows, -1, False)
        with (
            emit.around("aten::embedding_backward", (*text, False), (result,)),
            emit.around("aten::embedding_dense_backward", text, (result,)),
        ):
            _added(emit, gradient, indices, result)
        return (result,)

    tape.record("EmbeddingBackward0", (weight,), (y,), backward)
    return y


def _selected(emit: Emitter, weight: Tensor, indices: Tensor, y: Tensor) -> None:
    count, width = y.shape
    with emit.around("aten::index_select", (weight, 0, indices), (y,)):
        resized(emit, y, layout=0)
        column = emit.view(indices, (count, 1))
        emit.op("aten::view", (indices, (count, 1)), (column,))
        wide = emit.view(indices, (count, width), (1, 0))
        with emit.around("aten::expand", (column, (count, width), False), (wide,)):
            emit.op("aten::as_strided", (column, (count, width), (1, 0), None), (wide,))
        with emit.around("aten::gather", (weight, 0, wide, False, y), (y,)):
            emit.as_strided(y, y.shape, (width, 1))
            emit.as_strided(weight, y.shape, (0, 1))


def _added(emit: Emitter, gradient: Tensor, indices: Tensor, made: Tensor) -> None:
    """What the backward does before its kernels: it sorts the indices unless they are few."""
    (rows, width), count = made.shape, indices.numel
    sorts = count > _MOST_UNSORTED
    if sorts and 0 in (indices.strides or ()):
        indices = contiguous(emit, indices)
    emit.op("aten::view", (gradient, (count, width)), (emit.view(gradient, (count, width)),))
    if sorts:
        for _ in range(2):
            like = emit.tensor(indices.shape, "int64")
            with emit.around("aten::empty_like", (indices, None, None, None, None, 0), (like,)):
                empty(emit, like.shape, "int64", memory_format=0, made=like)
        counted(emit, count, (count, 4, 0, emit.device, None))
    with emit.around("aten::zeros", (made.shape, *_said(emit, made)), (made,)):
        empty(emit, made.shape, made.dtype, made=made)
        zero(emit, made)
    if sorts:
        _segments(emit, min(rows, count), count, width)


def _segments(emit: Emitter, found: int, count: int, width: int) -> None:
    parts = found + count // _ROWS_PER_THREAD
    for shape in ((count,), (), (found,), (found,), (), (parts,)):
        empty(emit, shape, "int64")
    empty(emit, (parts, width), "float32")


def _said(emit: Emitter, made: Tensor) -> tuple[int | str | None, ...]:
    return {"float32": 6, "bfloat16": 15, "float16": 5}[made.dtype], 0, emit.device, None


def counted(emit: Emitter, count: int, said: tuple[int | str | bool | None, ...]) -> Tensor:
    """`torch.arange`, asked for as `said`."""
    y, nothing = emit.tensor((count,), "int64"), emit.tensor((0,), "int64")
    with emit.around("aten::arange", said, (y,)):
        emit.op("aten::empty", ((0,), 4, said[2], emit.device, said[-1], None), (nothing,))
        with emit.around("aten::arange", (0, count, 1, nothing), (y,)):
            emit.op("aten::resize_", (nothing, (count,), None), (y,))
    return y


def resized(emit: Emitter, y: Tensor, *, layout: int | None = 0) -> None:
    """An output that begins as nothing and takes the size of its result."""
    nothing = emit.tensor((0,), y.dtype)
    empty(emit, (0,), y.dtype, layout=layout, made=nothing)
    emit.op("aten::resize_", (nothing, y.shape, None), (y,))
