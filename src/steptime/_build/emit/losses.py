"""Losses as PyTorch records them, forward and backward, and as Megatron-LM computes cross entropy over a split vocabulary."""

from __future__ import annotations

from steptime._build.emit.emitter import CONTIGUOUS, DTYPE_NUMBERS, Emitter
from steptime._build.emit.tape import Tape
from steptime._build.emit.views import to_dtype
from steptime._build.emit.writer import TENSOR, strides_of
from steptime._program.program import Tensor

_MEAN, _IGNORED = 1, -100  # at::Reduction, and the label that cross entropy leaves out


def binary_cross_entropy(tape: Tape, x: Tensor, target: Tensor) -> Tensor:
    """`functional.binary_cross_entropy` of one column, its mean."""
    emit, still = tape.emit, (0,) * len(x.shape)
    each = emit.tensor(x.shape, x.dtype)
    loss = emit.view(each, (), ())
    with emit.op("binary_cross_entropy", (x, target, None, _MEAN), (loss,), node=True):
        emit.empty_like(x, each)
        for column in (each, x, target):
            emit.strided(column, column.shape[:1], (1,), ("squeeze", ()))
        mean = emit.tensor((), x.dtype)
        with emit.op("mean", (each, None), (mean,)), emit.op("mean", (each, (), False, None), (mean,)):
            emit.strided(mean, (1,) * len(x.shape), still)
        with emit.op("resize_as_", (each, mean, None), (loss,)):
            emit.op("resize_", (each, (), None), (loss,))
        emit.op("copy_", (loss, mean, False), (loss,))

    def backward(gradient: Tensor) -> Tensor:
        result = emit.tensor(x.shape, x.dtype)
        with emit.op("binary_cross_entropy_backward", (gradient, x, target, None, _MEAN), (result,)):
            emit.empty_like(x, result)
            emit.strided(gradient, x.shape, still, ("expand_as", (x,)), ("expand", (x.shape, False)))
            with emit.op("div_", (result, result.numel), (result,)):
                emit.op("div_", (result, emit.number("int64")), (result,))
        return result

    return tape.node("BinaryCrossEntropyBackward0", (x,), loss, backward)


def mse_loss(tape: Tape, x: Tensor, target: Tensor) -> Tensor:
    """`functional.mse_loss`, its mean."""
    emit = tape.emit
    each = emit.tensor(x.shape, x.dtype)
    loss = emit.view(each, (), ())
    emit.op("broadcast_tensors", ((x, target),), ((x, target),), node=True)
    with emit.op("mse_loss", (x, target, _MEAN), (loss,), node=True):
        emit.op("resize_", (each, (), None), (loss,))
        squares = emit.empty(emit.tensor(x.shape, x.dtype), layout=None, memory_format=CONTIGUOUS)
        with emit.op("mean", (squares, (), False, None, loss), (loss,)):
            emit.strided(loss, (1,) * len(x.shape), (0,) * len(x.shape))

    def backward(gradient: Tensor) -> Tensor:
        result = emit.tensor(x.shape, x.dtype)
        call = (gradient, x, target, _MEAN)
        with emit.op("mse_loss_backward", call, (result,)):
            with emit.op("zeros_like", (x, None, None, None, None, CONTIGUOUS), (result,)):
                emit.empty_like(x, result, emit.options(x), CONTIGUOUS)
                emit.zero(result)
            emit.op("mse_loss_backward", (*call, result), (result,))
        return result

    return tape.node("MseLossBackward0", (x,), loss, backward)


def cross_entropy(tape: Tape, scores: Tensor, labels: Tensor) -> Tensor:
    """`functional.cross_entropy` of [rows, classes], its mean."""
    emit = tape.emit
    loss = emit.tensor((), "float32" if tape.autocast else scores.dtype)
    rest = (labels, None, _MEAN, _IGNORED)
    with emit.op("cross_entropy_loss", (scores, *rest, 0.0), (loss,), node=True):
        logarithms = _log_softmax(tape, scores)
        with (
            emit.op("nll_loss_nd", (logarithms, *rest), (loss,), node=True),
            tape.casting("nll_loss", (logarithms, *rest), loss, node=True),
        ):
            logarithms = to_dtype(tape, logarithms, loss.dtype)
            with emit.op("nll_loss", (logarithms, *rest), (loss,), node=True):
                return _nll(tape, logarithms, labels, loss)


def _log_softmax(tape: Tape, scores: Tensor) -> Tensor:
    emit, call = tape.emit, (scores, 1, DTYPE_NUMBERS[scores.dtype])
    y = emit.tensor(scores.shape, scores.dtype)
    # Autocast looks at it and leaves it as it is, for its dtype is said.
    with (
        tape.casting("log_softmax", call, y),
        emit.op("log_softmax", call, (y,), node=True),
    ):
        emit.op("to", (scores, *emit.options(scores), None, False, False, None), (scores,))
        emit.op("_log_softmax", (scores, 1, False), (y,), node=True)
    saved = tape.save(y)

    def backward(gradient: Tensor) -> Tensor:
        return emit.new("_log_softmax_backward_data", (gradient, emit.view(saved()), *call[1:]))

    return tape.node("LogSoftmaxBackward0", (scores,), y, backward)


def _nll(tape: Tape, logarithms: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
    emit, rest = tape.emit, (labels, None, _MEAN, _IGNORED)
    total = emit.tensor((), logarithms.dtype)
    with emit.op("nll_loss_forward", (logarithms, *rest), (loss, total), node=True):
        emit.op("resize_", (total, (), None), (total,))

    def backward(gradient: Tensor) -> Tensor:
        result = emit.tensor(logarithms.shape, logarithms.dtype)
        with emit.op("nll_loss_backward", (gradient, logarithms, *rest, total), (result,)):
            emit.zero(result)
        return result

    return tape.node("NllLossBackward0", (logarithms,), loss, backward)


def split_cross_entropy(tape: Tape, scores: Tensor, labels: Tensor) -> Tensor:
    """Megatron-LM's `_VocabParallelCrossEntropy`: the largest score, the label's score and the sum go over the ranks."""
    emit, (rows, part) = tape.emit, scores.shape
    losses, weights = emit.tensor((rows,)), emit.tensor(scores.shape)
    with emit.write("_VocabParallelCrossEntropy", (scores, labels), (losses,), sequence=emit.sequence):
        largest = emit.tensor((rows,))
        emit.op("max", (scores, -1, False), (largest, emit.tensor((rows,), "int64")))
        _summed_over_ranks(emit, largest)
        emit.op("sub_", (scores, _column(emit, largest), 1), (scores,))
        places, hidden = places_in_part(emit, labels, part)
        chosen = emit.new("index", (scores, (emit.tensor((rows,), "int64"), places)), (rows,), "float32")
        emit.op("masked_fill_", (chosen, hidden, 0.0), (chosen,))
        _summed_over_ranks(emit, chosen)
        emit.op("exp", (scores,), (weights,))
        total = emit.new("sum", (weights, (-1,), False, None), (rows,))
        _summed_over_ranks(emit, total)
        emit.op("sub", (emit.new("log", (total,)), chosen, 1), (losses,))
        emit.op("div_", (weights, _column(emit, total)), (weights,))

    def backward(gradient: Tensor) -> Tensor:
        update = emit.tensor((rows,))
        emit.op("index_put_", (weights, (emit.tensor((rows,), "int64"), places), update, False), (weights,))
        emit.op("mul_", (weights, emit.view(gradient, (rows, 1), (*(strides_of(gradient) or (0,)), 0))), (weights,))
        return weights

    tape.node("_VocabParallelCrossEntropyBackward", (scores,), losses, backward)
    return _mean(tape, losses)


def _summed_over_ranks(emit: Emitter, x: Tensor) -> None:
    emit.wait(emit.all_reduce((x,), TENSOR, asynchronous=False), TENSOR)


def _column(emit: Emitter, x: Tensor) -> Tensor:
    y = emit.view(x, (x.numel, 1))
    emit.op("unsqueeze", (x, -1), (y,))
    return y


def places_in_part(emit: Emitter, ids: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """Where ids lie in this rank's part of the vocabulary, and which of them another rank's holds."""
    below = emit.new("lt", (ids, 0), dtype="bool")
    above = emit.new("ge", (ids, part), dtype="bool")
    hidden = emit.new("bitwise_or", (below, above))
    places = emit.new("sub", (ids, 0, 1))
    emit.op("masked_fill_", (places, hidden, 0), (places,))
    return places, hidden


def _mean(tape: Tape, losses: Tensor) -> Tensor:
    """`losses.mean()`."""
    emit = tape.emit
    loss = emit.new("mean", (losses, None), (), node=True)

    def backward(gradient: Tensor) -> Tensor:
        spread = emit.expanded(gradient, losses.shape, (0,))
        result = emit.tensor(losses.shape, losses.dtype)
        with emit.op("div", (spread, losses.numel), (result,)):
            emit.op("div", (spread, emit.number("int64")), (result,))
        return result

    return tape.node("MeanBackward0", (losses,), loss, backward)
