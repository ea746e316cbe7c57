"""Data-parallel tables of a DLRM: a copy on every rank, with dense gradients that DistributedDataParallel reduces.

So does TorchRec (compute kernel `dense`). Lookups are those of the rank's own samples; the optimiser goes over all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.sparse import bags_of
from steptime._build.dlrm.tables import LocalTable, TableBatchedOps, sizes_of
from steptime._build.emit.autograd import Tape
from steptime._build.emit.ddp import Reducer
from steptime._build.emit.layers import DTYPE_NUMBERS, cat, number
from steptime._program.program import Tensor

_SINGLE = DTYPE_NUMBERS["float32"]


class CopyOps:
    """The copies of one rank: lookups, gradients, and the update of all their rows."""

    def __init__(
        self, tape: Tape, model: Dlrm, tables: Sequence[LocalTable], local_batch: int, learning_rate: float
    ) -> None:
        self._tape, self._tables, self._learning_rate = tape, tables, learning_rate
        self._batched, self._bags, parameters = None, [], []
        if model.lookup == "table_batched":
            self._batched = TableBatchedOps(tape, tables, local_batch, adagrad=False, dense=True)
            parameters = self._batched.parameters
        else:
            self._bags = bags_of(tape, tables, local_batch, dense=True)
            parameters = [bag.weight for bag in self._bags]
        self._parameters = parameters
        adagrad = model.optimizer == "rowwise_adagrad"
        self._states = [tape.emit.tensor((table.rows,)) for table in tables] if adagrad else []
        self._reducer = Reducer(tape, parameters)

    def look_up(self) -> Tensor:
        """Sums of looked-up rows of the rank's own samples, [local batch, summed dims]."""
        with self._reducer.forward():
            if self._batched is not None:
                return self._batched.look_up()
            return cat(self._tape, [bag.look_up() for bag in self._bags])

    def update(self) -> None:
        """The optimiser's step over dense gradients."""
        gradients = tuple(self._tape.gradients[parameter.id or 0] for parameter in self._parameters)
        emit = self._tape.emit
        if not self._states:
            with emit.around("Optimizer.step#SGD.step"):
                emit.op("aten::_foreach_add_", (tuple(self._parameters), gradients, -self._learning_rate))
            return
        with emit.around("Optimizer.step#RowwiseAdagrad.step"):
            for (weight, gradient), state in zip(self._rows(gradients), self._states, strict=True):
                self._adagrad(weight, gradient, state)

    def _rows(self, gradients: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Weights and gradients of every table as rows; those of table-batched lookups lie behind each other."""
        if self._batched is None:
            return list(zip(self._parameters, gradients, strict=True))
        emit, start, pairs = self._tape.emit, 0, []
        for table, size in zip(self._tables, sizes_of(self._tables), strict=True):
            shape = (table.rows, table.dim)
            of = (self._parameters[0], gradients[0])
            pairs.append((emit.view(of[0], shape, offset=start), emit.view(of[1], shape, offset=start)))
            start += size
        return pairs

    def _adagrad(self, weight: Tensor, gradient: Tensor, state: Tensor) -> None:
        """Adds the mean square of each row's gradient to the row's state, and divides the gradient by its root."""
        emit, (rows, dim) = self._tape.emit, weight.shape
        squares = emit.tensor((rows, dim))
        with emit.around("aten::square", (gradient,), (squares,)), emit.around("aten::pow", (gradient, 2), (squares,)):
            emit.op("aten::result_type", (gradient, 2), (_SINGLE,))
            emit.op("aten::to", (gradient, _SINGLE, False, False, None), (gradient,))
        means = emit.tensor((rows,))
        with emit.around("aten::mean", (squares, (1,), False, None), (means,)):
            emit.as_strided(means, (rows, 1), (1, 0))
        emit.op("aten::add_", (state, means, 1), (state,))
        roots = emit.tensor((rows,))
        emit.op("aten::sqrt", (state,), (roots,))
        emit.op("aten::add_", (roots, number(emit, "float64"), 1), (roots,))
        column = emit.view(roots, (rows, 1))
        with emit.around("aten::unsqueeze", (roots, 1), (column,)):
            emit.op("aten::as_strided", (roots, column.shape, column.strides, None), (column,))
        divided = emit.tensor((rows, dim))
        emit.op("aten::div", (gradient, column), (divided,))
        emit.op("aten::add_", (weight, divided, -self._learning_rate), (weight,))
