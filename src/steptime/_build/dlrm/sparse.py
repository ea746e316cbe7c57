"""Optimisers over the sparse gradients of `nn.EmbeddingBag`s, as PyTorch records them: SGD, and row-wise Adagrad.

Row-wise Adagrad is that of `steptime_lab.workloads.table_batched.rowwise_adagrad`: rows looked up more than once are summed first (`coalesce`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from steptime._build.emit.autograd import Tape
from steptime._build.dlrm.bags import Bag
from steptime._build.dlrm.tables import LocalTable, index_select, sizes_of
from steptime._build.emit.ops import Emitter
from steptime._build.emit.layers import DTYPE_NUMBERS, cat, copied, empty, number
from steptime._program.program import Tensor

_SINGLE = DTYPE_NUMBERS["float32"]


class BagOps:
    """All tables of a rank, one after the other; their columns side by side."""

    def __init__(self, tape: Tape, tables: Sequence[LocalTable], batch: int, learning_rate: float, *, adagrad: bool) -> None:
        self._bags = bags_of(tape, tables, batch)
        self._states = [tape.emit.tensor((table.rows,)) for table in tables] if adagrad else []
        self._tape, self._learning_rate = tape, learning_rate
        self._name = "RowwiseAdagrad" if adagrad else "SGD"

    def clear(self) -> None:
        """The optimiser drops the gradients of the step before."""
        self._tape.emit.op(f"Optimizer.zero_grad#{self._name}.zero_grad")

    def look_up(self) -> Tensor:
        """Sums of looked-up rows, [global batch, summed dims]."""
        return cat(self._tape, [bag.look_up() for bag in self._bags])

    def update(self) -> None:
        """The optimiser's step over the sparse gradients."""
        with self._tape.emit.around(f"Optimizer.step#{self._name}.step"):
            if not self._states:
                for bag in self._bags:
                    _add(bag, -self._learning_rate)
            for bag, state in zip(self._bags, self._states, strict=False):
                _adagrad(bag, state, -self._learning_rate)


def bags_of(tape: Tape, tables: Sequence[LocalTable], batch: int, *, dense: bool = False) -> list[Bag]:
    """The tables in one buffer."""
    sizes = sizes_of(tables)
    buffer = tape.emit.tensor((sum(sizes),))
    starts = accumulate(sizes, initial=0)
    return [Bag(tape, buffer, start, table, batch, dense=dense) for table, start in zip(tables, starts, strict=False)]


def _add(bag: Bag, alpha: float) -> None:
    """`weight.add_(gradient, alpha=alpha)` of a sparse gradient."""
    emit, weight, gradient = bag.tape.emit, bag.weight, bag.gradient
    with (
        emit.around("aten::add_", (weight, gradient, alpha), (weight,)),
        emit.around("aten::add", (weight, gradient, alpha, weight), (weight,)),
    ):
        emit.op("aten::_nnz", (gradient,), (bag.table.indices,))
        emit.op("aten::result_type", (weight, gradient), (_SINGLE,))
        _to_single(emit, weight)
        values = bag.values_of(gradient)
        _to_single(emit, values)
        numbers = bag.indices_of(gradient)
        emit.op("aten::sparse_dim", (gradient,), (1,))
        emit.op("aten::is_coalesced", (gradient,), (False,))
        rows = _squeezed(emit, numbers)
        whole = emit.reshaped(weight, weight.shape)
        flat = emit.view(values)
        with emit.around("aten::reshape", (values, values.shape), (flat,)):
            emit.op("aten::view", (values, values.shape), (flat,))
        emit.op("aten::index_add_", (whole, 0, rows, flat, alpha), (whole,))
        emit.op("aten::copy_", (weight, weight, False), (weight,))


def _adagrad(bag: Bag, state: Tensor, alpha: float) -> None:
    """Adds the mean square of each row's gradient to the row's state, and divides the gradient by its root."""
    emit, distinct, dim = bag.tape.emit, bag.table.distinct, bag.table.dim
    summed, numbers, rows = _coalesced(bag)
    numbers = _part(emit, "aten::indices", summed, numbers)
    index = emit.view(numbers, (distinct,))
    with emit.around("aten::select", (numbers, 0, 0), (index,)):
        emit.op("aten::as_strided", (numbers, index.shape, index.strides, index.offset), (index,))
    rows = _part(emit, "aten::values", summed, rows)
    squares = emit.tensor((distinct, dim))
    with emit.around("aten::square", (rows,), (squares,)), emit.around("aten::pow", (rows, 2), (squares,)):
        emit.op("aten::result_type", (rows, 2), (_SINGLE,))
        _to_single(emit, rows)
    means = emit.tensor((distinct,))
    with emit.around("aten::mean", (squares, (1,), False, None), (means,)):
        emit.as_strided(means, (distinct, 1), (1, 0))
    emit.op("aten::index_add_", (state, 0, index, means, 1), (state,))
    roots = index_select(bag.tape, state, index)
    emit.op("aten::sqrt_", (roots,), (roots,))
    emit.op("aten::add_", (roots, number(emit, "float64"), 1), (roots,))
    column = emit.view(roots, (distinct, 1))
    with emit.around("aten::unsqueeze", (roots, 1), (column,)):
        emit.op("aten::as_strided", (roots, column.shape, column.strides, None), (column,))
    divided = emit.tensor((distinct, dim))
    emit.op("aten::div", (rows, column), (divided,))
    emit.op("aten::index_add_", (bag.weight, 0, index, divided, alpha), (bag.weight,))


def _coalesced(bag: Bag) -> tuple[Tensor, Tensor, Tensor]:
    """`gradient.coalesce()`, its row numbers and its rows."""
    emit, gradient, table = bag.tape.emit, bag.gradient, bag.table
    summed = emit.sparse(gradient.shape)
    rows = emit.tensor((table.distinct, table.dim))
    with emit.around("aten::coalesce", (gradient,), (summed,)):
        emit.op("aten::is_coalesced", (gradient,), (False,))
        with emit.around("aten::_coalesce", (gradient,), (summed,)):
            emit.op("aten::_nnz", (gradient,), (table.indices,))
            emit.op("aten::is_coalesced", (gradient,), (False,))
            bag.values_of(gradient)
            emit.op("aten::sparse_dim", (gradient,), (1,))
            sorted_numbers = copied(emit, _squeezed(emit, bag.indices_of(gradient)))
            for _ in ("positions", "first of each row"):
                bag.indices_of(gradient)
                empty(emit, (table.indices,), "int64")
            numbers = emit.view(sorted_numbers, (1, table.distinct))
            emit.op("aten::resize_", (sorted_numbers, numbers.shape, None), (numbers,))
            empty(emit, rows.shape, "float32", made=rows)
            bag.put_together(summed, numbers, rows)
            emit.op("aten::_coalesced_", (summed, True), (summed,))
    return summed, numbers, rows


def _part(emit: Emitter, name: str, sparse: Tensor, part: Tensor) -> Tensor:
    """`sparse.indices()` or `sparse.values()` of a coalesced tensor."""
    result = emit.view(part)
    with emit.around(name, (sparse,), (result,)):
        emit.op("aten::is_coalesced", (sparse,), (True,))
        emit.op("aten::alias", (emit.view(part),), (result,))
    return result


def _squeezed(emit: Emitter, numbers: Tensor) -> Tensor:
    rows = emit.view(numbers, numbers.shape[1:])
    with emit.around("aten::squeeze", (numbers, 0), (rows,)):
        emit.op("aten::as_strided", (numbers, rows.shape, rows.strides, None), (rows,))
    return rows


def _to_single(emit: Emitter, x: Tensor) -> None:
    emit.op("aten::to", (x, _SINGLE, False, False, None), (x,))
