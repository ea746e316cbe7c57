"""The embedding tables of one rank of a DLRM, as PyTorch records their lookups and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from steptime._build.dlrm.bags import BagOps, LocalTable, TableOps, sizes_of
from steptime._build.dlrm.model import Dlrm
from steptime._build.emit.ddp import Reducer
from steptime._build.emit.optimizers import ROWWISE_ADAGRAD, divided_rows, mean_squares, sgd, step_of
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import is_contiguous
from steptime._program.program import Tensor

# Of the table-batched kernels (steptime_lab.workloads.table_batched.launch): positions walked in a row, and from how many quads
# of weights on keys are sorted as 64 bits.
_CHUNK = 32
_INT32 = 1 << 31


@dataclass(frozen=True, slots=True)
class TableBatchedSizes:
    """All that a table-batched lookup's ops tell of its tables."""

    tables: int
    columns: int  # summed dims
    widest: int
    indices: int
    key_type: str  # of what is sorted: half the bytes where the quads of all tables can be counted in int32


def table_batched_sizes(tables: Sequence[LocalTable]) -> TableBatchedSizes:
    """Of these tables, one or more."""
    dims = [table.dim for table in tables]
    key_type = "int32" if sum(sizes_of(tables)) // 4 < _INT32 else "int64"
    return TableBatchedSizes(len(dims), sum(dims), max(dims, default=0), sum(table.indices for table in tables), key_type)


class NoTableOps(TableOps):
    """A rank that owns no table: it sends nothing, and still meets the others."""

    def __init__(self, tape: Tape, batch: int) -> None:
        self._tape = tape
        self._nothing = tape.emit.tensor((batch, 0))
        self._before = tape.emit.tensor((batch, 0))  # the gradient of the step before, which nobody clears

    def look_up(self) -> Tensor:
        """No columns; part of the graph all the same, so that the backward exchange happens on every rank."""
        return self._tape.parameter(self._nothing, self._add)

    def _add(self, gradient: Tensor) -> Tensor:
        self._tape.emit.op("add_", (self._before, gradient, 1), (self._before,))
        return self._before


class TableBatchedOps(TableOps):
    """All tables in one launch forward, and a handful backward which update the rows themselves.

    `dense`: they leave a gradient of all rows instead, as an optimiser of dense parameters takes it.
    """

    def __init__(self, tape: Tape, tables: Sequence[LocalTable], batch: int, *, adagrad: bool, dense: bool = False) -> None:
        emit, sizes = tape.emit, table_batched_sizes(tables)
        self._tape, self._batch, self._adagrad, self._sizes = tape, batch, adagrad and not dense, sizes
        self._anchor = tape.parameter(emit.tensor((sum(sizes_of(tables)) if dense else 0,)))
        self._indices = emit.tensor((sizes.indices,), "int64")
        self._offsets = emit.tensor((sizes.tables * batch + 1,), "int64")
        self.parameters = [self._anchor] if dense else []

    def look_up(self) -> Tensor:
        """One launch."""
        emit, taken = self._tape.emit, (self._anchor, self._indices, self._offsets)
        with emit.write("TableBatchedLookupFunction", taken, sequence=emit.sequence):
            pooled = emit.empty_from_python((self._batch, self._sizes.columns), "float32")
        return self._tape.node("TableBatchedLookupFunctionBackward", (self._anchor,), pooled, self._backward)

    def _backward(self, gradient: Tensor) -> Tensor | None:
        """Sorts lookups by row, then sums and updates, level by level while a run of one row is longer than a chunk."""
        emit = self._tape.emit
        if not is_contiguous(gradient):
            emit.contiguous(gradient)
        dense = emit.zeros(emit.tensor(self._anchor.shape), from_python=True) if self.parameters else None
        if self._indices.numel:
            self._sum_rows()
        return dense

    def _sum_rows(self) -> None:
        emit, count, key_type = self._tape.emit, self._indices.numel, self._sizes.key_type
        keys, infos = emit.empty_from_python((count,), key_type), emit.empty_from_python((count,), "int64")
        values, order = emit.tensor(keys.shape, keys.dtype), emit.tensor(keys.shape, "int64")
        with emit.op("sort", (keys, True, -1, False), (values, order)):
            emit.op("copy_", (values, keys, False), (values,))
        emit.index_select(infos, order)
        stride = self._sizes.widest // 4
        if self._adagrad:
            stride = 1 << (stride - 1).bit_length()
        while True:
            chunks = -(-count // _CHUNK)
            emit.empty_from_python((2 * chunks,), key_type)
            emit.empty_from_python((2 * chunks,), "int64")
            emit.empty_from_python((8 * chunks * stride,), "float32")
            if chunks == 1:
                return
            count = 2 * chunks


class CopyOps(TableOps):
    """Data-parallel tables: a copy on every rank, with dense gradients that DistributedDataParallel reduces.

    So does TorchRec (compute kernel `dense`). Lookups are those of the rank's own samples; the optimiser goes over all rows.
    """

    def __init__(self, tape: Tape, model: Dlrm, tables: Sequence[LocalTable], local_batch: int, rate: float) -> None:
        self._tape, self._tables, self._rate = tape, tables, rate
        self._together = model.lookup == "table_batched"
        self._lookups = (
            TableBatchedOps(tape, tables, local_batch, adagrad=False, dense=True)
            if self._together
            else BagOps(tape, tables, local_batch, rate, adagrad=False, dense=True)
        )
        adagrad = model.optimizer == "rowwise_adagrad"
        self._states = [tape.emit.tensor((table.rows,)) for table in tables] if adagrad else []
        self._reducer = Reducer(tape, self._lookups.parameters)

    def look_up(self) -> Tensor:
        """Sums of looked-up rows of the rank's own samples, [local batch, summed dims]."""
        with self._reducer.forward():
            return self._lookups.look_up()

    def update(self) -> None:
        """The optimiser's step over dense gradients."""
        emit, parameters = self._tape.emit, self._lookups.parameters
        gradients = [self._tape.gradients[parameter.id or 0] for parameter in parameters]
        if not self._states:
            with step_of(emit):
                sgd(emit, parameters, gradients, self._rate)
            return
        with step_of(emit, ROWWISE_ADAGRAD):
            if self._together:
                parameters, gradients = self._rows(parameters[0]), self._rows(gradients[0])
            for weight, gradient, state in zip(parameters, gradients, self._states, strict=True):
                emit.op("add_", (state, mean_squares(emit, gradient), 1), (state,))
                divided = divided_rows(emit, gradient, emit.new("sqrt", (state,)))
                emit.op("add_", (weight, divided, -self._rate), (weight,))

    def _rows(self, flat: Tensor) -> list[Tensor]:
        """Every table as rows of its own; those of table-batched lookups lie behind each other."""
        starts = accumulate(sizes_of(self._tables), initial=0)
        pairs = zip(self._tables, starts, strict=False)
        return [self._tape.emit.view(flat, (table.rows, table.dim), offset=start) for table, start in pairs]
