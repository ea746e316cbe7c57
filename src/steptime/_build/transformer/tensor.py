"""Tensor parallelism as in Megatron-LM: where activations enter and leave layers that are split over ranks.

A layer's first matrix is split by columns and its second by rows, so that a layer's half needs one all_reduce of its output in
forward and one of its input's gradient in backward (Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from steptime._build.emit.autograd import Gradients
from steptime._build.transformer.emit import TENSOR
from steptime._build.transformer.lookup import embedding
from steptime._build.transformer.loss import hidden_labels
from steptime._build.transformer.tape import StepTape
from steptime._build.transformer.views import given, made_contiguous
from steptime._program.program import Tensor


def enter(tape: StepTape, x: Tensor) -> Tensor:
    """What goes into a layer split by columns: itself, and the sum of its gradients in backward."""
    emit = tape.emit
    if emit.group_size(TENSOR) == 1:
        return x
    y = emit.view(x)
    with emit.around("_CopyToModelParallelRegion", (x,), (y,), sequence=emit.sequence):
        emit.op("aten::view_as", (x, x), (y,))

    def backward(gradients: Gradients) -> Gradients:
        gradient = made_contiguous(emit, given(gradients[0]))
        emit.wait(emit.all_reduce((gradient,), TENSOR, asynchronous=False), TENSOR)
        return (gradient,)

    tape.record("_CopyToModelParallelRegionBackward", (x,), (y,), backward)
    return y


def leave(tape: StepTape, x: Tensor) -> Tensor:
    """What comes out of a layer split by rows, summed over the ranks."""
    emit = tape.emit
    if emit.group_size(TENSOR) == 1:
        return x
    y = emit.view(x)
    with emit.around("_ReduceFromModelParallelRegion", (x,), (y,), sequence=emit.sequence):
        emit.wait(emit.all_reduce((x,), TENSOR, asynchronous=False), TENSOR)
    tape.record("_ReduceFromModelParallelRegionBackward", (x,), (y,), lambda gradients: gradients)
    return y


def split_embedding(tape: StepTape, weight: Tensor, ids: Tensor) -> Tensor:
    """Megatron-LM's `VocabParallelEmbedding`: rows that another rank holds come out as zeros, and the ranks sum."""
    emit = tape.emit
    hidden, places = emit.tensor(ids.shape, "bool"), emit.tensor(ids.shape, "int64")
    hidden_labels(tape, ids, places, hidden, weight.shape[0])
    x = embedding(tape, weight, places)
    y = emit.view(x)
    column = emit.view(hidden, (*ids.shape, 1))
    emit.op("aten::masked_fill_", (x, column, 0.0), (y,), sequence=emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(x.shape, x.dtype)
        emit.op("aten::masked_fill", (given(gradients[0]), column, 0), (result,))
        return (result,)

    tape.record("MaskedFillBackward0", (x,), (y,), backward)
    return leave(tape, y)
