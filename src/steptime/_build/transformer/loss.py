"""Cross entropy as PyTorch records it, and as Megatron-LM computes it where every rank has a part of the vocabulary."""

from __future__ import annotations

from contextlib import nullcontext

from steptime._build.emit.autograd import Gradients
from steptime._build.emit.layers import DTYPE_NUMBERS, zero
from steptime._build.transformer.emit import TENSOR
from steptime._build.transformer.tape import StepTape
from steptime._build.transformer.views import given, to_dtype
from steptime._program.program import Tensor

_MEAN, _IGNORED = 1, -100  # at::Reduction, and the label that the loss leaves out


def cross_entropy(tape: StepTape, scores: Tensor, labels: Tensor) -> Tensor:
    """`functional.cross_entropy` of [rows, classes], its mean."""
    emit = tape.emit
    loss = emit.tensor((), "float32" if tape.autocast else scores.dtype)
    text = (scores, labels, None, _MEAN, _IGNORED, 0.0)
    with emit.around("aten::cross_entropy_loss", text, (loss,), sequence=emit.sequence):
        logarithms = _log_softmax(tape, scores)
        rest = (labels, None, _MEAN, _IGNORED)
        with (
            emit.around("aten::nll_loss_nd", (logarithms, *rest), (loss,), sequence=emit.sequence),
            emit.around("aten::nll_loss", (logarithms, *rest), (loss,), sequence=emit.sequence),
        ):
            if tape.autocast:
                logarithms = to_dtype(tape, logarithms, "float32")
                with emit.around("aten::nll_loss", (logarithms, *rest), (loss,), sequence=emit.sequence):
                    _nll(tape, logarithms, labels, loss)
            else:
                _nll(tape, logarithms, labels, loss)
    return loss


def _log_softmax(tape: StepTape, scores: Tensor) -> Tensor:
    emit, number = tape.emit, DTYPE_NUMBERS[scores.dtype]
    y = emit.tensor(scores.shape, scores.dtype)
    text = (scores, 1, number)
    # Autocast looks at it and leaves it as it is, for its dtype is said.
    with (
        emit.around("aten::log_softmax", text, (y,)) if tape.autocast else nullcontext(),
        emit.around("aten::log_softmax", text, (y,), sequence=emit.sequence),
    ):
        emit.op("aten::to", (scores, number, 0, emit.device, None, False, False, None), (scores,))
        emit.op("aten::_log_softmax", (scores, 1, False), (y,), sequence=emit.sequence)
    saved = tape.save(y)

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(scores.shape, scores.dtype)
        emit.op("aten::_log_softmax_backward_data", (gradients[0], emit.view(saved()), 1, number), (result,))
        return (result,)

    tape.record("LogSoftmaxBackward0", (scores,), (y,), backward)
    return y


def _nll(tape: StepTape, logarithms: Tensor, labels: Tensor, loss: Tensor) -> None:
    emit, rest = tape.emit, (labels, None, _MEAN, _IGNORED)
    total = emit.tensor((), logarithms.dtype)
    with emit.around("aten::nll_loss_forward", (logarithms, *rest), (loss, total), sequence=emit.sequence):
        emit.op("aten::resize_", (total, (), None), (total,))

    def backward(gradients: Gradients) -> Gradients:
        result = emit.tensor(logarithms.shape, logarithms.dtype)
        with emit.around("aten::nll_loss_backward", (gradients[0], logarithms, *rest, total), (result,)):
            zero(emit, result)
        return (result,)

    tape.record("NllLossBackward0", (logarithms,), (loss,), backward)


def split_cross_entropy(tape: StepTape, scores: Tensor, labels: Tensor) -> Tensor:
    """Megatron-LM's `_VocabParallelCrossEntropy`: the largest score, the label's score and the sum go over the ranks."""
    emit, (rows, part) = tape.emit, scores.shape
    losses = emit.tensor((rows,))
    weights = emit.tensor(scores.shape)
    known, places = emit.tensor((rows,), "bool"), emit.tensor((rows,), "int64")
    with emit.around("_VocabParallelCrossEntropy", (scores, labels), (losses,), sequence=emit.sequence):
        _largest(tape, scores)
        hidden_labels(tape, labels, places, known, part)
        chosen = emit.tensor((rows,))
        emit.op("aten::index", (scores, (emit.tensor((rows,), "int64"), places)), (chosen,))
        emit.op("aten::masked_fill_", (chosen, known, 0.0), (chosen,))
        emit.wait(emit.all_reduce((chosen,), TENSOR, asynchronous=False), TENSOR)
        emit.op("aten::exp", (scores,), (weights,))
        total = emit.tensor((rows,))
        emit.op("aten::sum", (weights, (-1,), False, None), (total,))
        emit.wait(emit.all_reduce((total,), TENSOR, asynchronous=False), TENSOR)
        logarithm = emit.tensor((rows,))
        emit.op("aten::log", (total,), (logarithm,))
        emit.op("aten::sub", (logarithm, chosen, 1), (losses,))
        column = emit.view(total, (rows, 1))
        emit.op("aten::unsqueeze", (total, -1), (column,))
        emit.op("aten::div_", (weights, column), (weights,))

    def backward(gradients: Gradients) -> Gradients:
        update = emit.tensor((rows,))
        emit.op("aten::index_put_", (weights, (emit.tensor((rows,), "int64"), places), update, False), (weights,))
        gradient = given(gradients[0])
        emit.op("aten::mul_", (weights, emit.view(gradient, (rows, 1), (*(gradient.strides or (0,)), 0))), (weights,))
        return (weights,)

    tape.record("_VocabParallelCrossEntropyBackward", (scores,), (losses,), backward)
    return _mean(tape, losses)


def _largest(tape: StepTape, scores: Tensor) -> None:
    emit, rows = tape.emit, scores.shape[0]
    largest, places = emit.tensor((rows,)), emit.tensor((rows,), "int64")
    emit.op("aten::max", (scores, -1, False), (largest, places))
    emit.wait(emit.all_reduce((largest,), TENSOR, asynchronous=False), TENSOR)
    column = emit.view(largest, (rows, 1))
    emit.op("aten::unsqueeze", (largest, -1), (column,))
    emit.op("aten::sub_", (scores, column, 1), (scores,))


def hidden_labels(tape: StepTape, ids: Tensor, places: Tensor, hidden: Tensor, part: int) -> None:
    """Which ids another rank's part of the vocabulary holds, and where the others lie in this one's."""
    emit = tape.emit
    below, above = emit.tensor(ids.shape, "bool"), emit.tensor(ids.shape, "bool")
    emit.op("aten::lt", (ids, 0), (below,))
    emit.op("aten::ge", (ids, part), (above,))
    emit.op("aten::bitwise_or", (below, above), (hidden,))
    emit.op("aten::sub", (ids, 0, 1), (places,))
    emit.op("aten::masked_fill_", (places, hidden, 0), (places,))


def _mean(tape: StepTape, losses: Tensor) -> Tensor:
    """`losses.mean()`."""
    emit = tape.emit
    loss = emit.tensor((), losses.dtype)
    emit.op("aten::mean", (losses, None), (loss,), sequence=emit.sequence)

    def backward(gradients: Gradients) -> Gradients:
        gradient = given(gradients[0])
        spread = emit.view(gradient, losses.shape, (0,))
        with emit.around("aten::expand", (gradient, losses.shape, False), (spread,)):
            emit.op("aten::as_strided", (gradient, losses.shape, (0,), None), (spread,))
        result = emit.tensor(losses.shape, losses.dtype)
        with emit.around("aten::div", (spread, losses.numel), (result,)):
            emit.op("aten::div", (spread, emit.tensor((), "int64", device="cpu")), (result,))
        return (result,)

    tape.record("MeanBackward0", (losses,), (loss,), backward)
    return loss
