"""Ops that choose and move rows by index, and products of groups of rows, as PyTorch records them forward and backward."""

from __future__ import annotations

from steptime._build.emit.emitter import DTYPE_NUMBERS, Emitter
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.writer import strides_of
from steptime._program.program import Tensor

_GROUPED_DTYPE = "bfloat16"  # the one that `_grouped_mm` multiplies in one kernel


def softmax(tape: Tape, x: Tensor) -> Tensor:
    """`torch.softmax` over the columns of a matrix of fp32."""
    emit, y = tape.emit, tape.emit.tensor(x.shape, x.dtype)
    with emit.op("softmax", (x, 1, None), (y,), node=True):
        emit.op("_softmax", (x, 1, False), (y,), node=True)
    saved = tape.save(y)

    def backward(gradient: Tensor) -> Tensor:
        return emit.new("_softmax_backward_data", (gradient, emit.view(saved()), 1, DTYPE_NUMBERS[x.dtype]))

    return tape.node("SoftmaxBackward0", (x,), y, backward)


def topk(tape: Tape, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` of every row: the values and their columns."""
    emit, shape = tape.emit, (x.shape[0], count)
    values, columns = emit.tensor(shape, x.dtype), emit.tensor(shape, "int64")
    emit.op("topk", (x, count, 1, True, True), (values, columns), node=True)
    saved = tape.save(columns)

    def backward(gradient: Tensor) -> Tensor:
        result, known = emit.tensor(x.shape, x.dtype), emit.view(saved())
        with emit.op("value_selecting_reduction_backward", (gradient, 1, known, x.shape, True), (result,)):
            emit.zeros(result)
            emit.op("scatter_", (result, 1, known, gradient), (result,))
        return result

    return tape.node("TopkBackward0", (x,), values, backward), columns


def shares_of_rows(tape: Tape, x: Tensor) -> Tensor:
    """`x / x.sum(-1, keepdim=True)`."""
    emit = tape.emit
    column = emit.new("sum", (x, (-1,), True, None), (x.shape[0], 1), node=True)

    def spread(gradient: Tensor) -> Tensor:
        return emit.expanded(gradient, x.shape, (1, 0))

    total = tape.node("SumBackward1", (x,), column, spread)
    saved_x, saved_total = tape.save(x), tape.save(total)
    y = emit.new("div", (x, total), node=True)

    def backward(gradient: Tensor) -> Gradients:
        known, by = saved_x(), saved_total()
        twice = emit.new("div", (emit.new("div", (known, by)), by))
        of_total = emit.new("mul", (emit.new("neg", (gradient,)), twice))
        return emit.new("div", (gradient, by)), of_total

    return tape.node("DivBackward0", (x, total), y, backward)


def sorted_places(emit: Emitter, keys: Tensor) -> Tensor:
    """`torch.argsort(keys, stable=True)` of one row."""
    values, places = emit.tensor(keys.shape, keys.dtype), emit.tensor(keys.shape, "int64")
    with emit.op("argsort", (keys, True, -1, False), (places,)):
        emit.op("sort", (keys, True, -1, False), (values, places))
    return places


def counted(emit: Emitter, classes: Tensor, count: int) -> Tensor:
    """`torch.histc` of classes from 0 to `count`."""
    return emit.new("histc", (classes, count, 0, count), (count,))


def group_ends(emit: Emitter, counts: Tensor) -> Tensor:
    """Where each group of rows ends, as `_grouped_mm` wants it."""
    y = emit.tensor(counts.shape, "int32")
    with emit.op("cumsum", (counts, 0, DTYPE_NUMBERS["int32"]), (y,)):
        emit.cast(counts, "int32")
    return y


def select_rows(tape: Tape, x: Tensor, index: Tensor) -> Tensor:
    """`x.index_select(0, index)`."""
    emit = tape.emit
    y = emit.tensor((index.shape[0], *x.shape[1:]), x.dtype)
    emit.op("index_select", (x, 0, index), (y,), node=True)
    saved = tape.save(index)

    def backward(gradient: Tensor) -> Tensor:
        result = emit.tensor(x.shape, gradient.dtype)
        with emit.op("index_select_backward", (gradient, x.shape, 0, saved()), (result,)):
            zeros = emit.new_zeros(gradient, x.shape)
            emit.op("index_add_", (zeros, 0, index, gradient, 1), (result,))
        return result

    return tape.node("IndexSelectBackward0", (x,), y, backward)


def add_rows(tape: Tape, x: Tensor, index: Tensor, rows: int) -> Tensor:
    """`x.new_zeros(rows, width).index_add_(0, index, x)`."""
    emit = tape.emit
    y = emit.new_zeros(x, (rows, *x.shape[1:]))
    emit.op("index_add_", (y, 0, index, x, 1), (y,), node=True)
    saved = tape.save(index)

    def backward(gradient: Tensor) -> Tensor:
        picked = emit.new("index_select", (gradient, 0, saved()), x.shape)
        return emit.strided(picked, x.shape, strides_of(picked), ("expand_as", (x,)), ("expand", (x.shape, False)))

    return tape.node("IndexAddBackward0", (x,), y, backward)


def grouped_product(tape: Tape, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`torch._grouped_mm` of rows sorted by group with the matrix of each group; both are bfloat16."""
    assert x.dtype == weight.dtype == _GROUPED_DTYPE
    emit, saved_x, saved_weight = tape.emit, tape.save(x), tape.save(weight)
    y = emit.new("_grouped_mm", (x, weight, ends, None, None), (x.shape[0], weight.shape[2]), node=True)

    def backward(gradient: Tensor) -> Gradients:
        of_weight = None
        if tape.needs(weight):  # laid out as the matrices are (torch/csrc/autograd/FunctionsManual.cpp, mat2 by columns)
            call = (emit.transposed(gradient, 0, 1), saved_x(), ends, None, None)
            turned = emit.new("_grouped_mm", call, (weight.shape[0], weight.shape[2], weight.shape[1]))
            of_weight = emit.transposed(turned, 1, 2)
        call = (gradient, emit.transposed(saved_weight(), 1, 2), ends, None, None)
        return emit.new("_grouped_mm", call, x.shape) if tape.needs(x) else None, of_weight

    return tape.node("GroupedMmBackward0", (x, weight), y, backward)
