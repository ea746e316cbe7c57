"""The embedding tables of one rank of a DLRM, as PyTorch records their lookups and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from steptime._build.emit.autograd import Gradients, Tape
from steptime._build.emit.ops import is_contiguous
from steptime._build.emit.layers import contiguous, empty, given, zeros
from steptime._program.program import Tensor

ALIGNMENT = 64
"""Elements between which tables start in their buffer (steptime_lab.workloads.table_batched.layout)."""

# Of the table-batched kernels (steptime_lab.workloads.table_batched.launch): positions walked in a row, and from how many quads
# of weights on keys are sorted as 64 bits.
_CHUNK = 32
_INT32 = 1 << 31


@dataclass(frozen=True, slots=True)
class LocalTable:
    """A table of this rank, how many lookups a step makes in it, and how many distinct rows those find."""

    rows: int
    dim: int
    indices: int
    distinct: int


class TableOps(Protocol):
    """One rank's tables."""

    def clear(self) -> None:
        """What is written before the lookups."""

    def look_up(self) -> Tensor:
        """Sums of looked-up rows, [global batch, summed dims]."""

    def update(self) -> None:
        """Applies what the backward pass left, where that has not been applied already."""


def sizes_of(tables: Sequence[LocalTable]) -> list[int]:
    """Elements from each table's start to the next one's."""
    return [-(table.rows * table.dim // -ALIGNMENT) * ALIGNMENT for table in tables]


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


class NoTableOps:
    """A rank that owns no table: it sends nothing, and still meets the others."""

    def __init__(self, tape: Tape, batch: int) -> None:
        self._tape = tape
        self._nothing = tape.emit.tensor((batch, 0))
        self._before = tape.emit.tensor((batch, 0))  # the gradient of the step before, which nobody clears

    def clear(self) -> None:
        """Nothing is cleared."""

    def look_up(self) -> Tensor:
        """No columns; part of the graph all the same, so that the backward exchange happens on every rank."""
        return self._tape.parameter(self._nothing, self._add)

    def update(self) -> None:
        """Nothing to update."""

    def _add(self, gradient: Tensor) -> Tensor:
        self._tape.emit.op("aten::add_", (self._before, gradient, 1), (self._before,))
        return self._before


class TableBatchedOps:
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

    def clear(self) -> None:
        """Weights are no parameters: there is no gradient to clear."""

    def look_up(self) -> Tensor:
        """One launch."""
        emit, taken = self._tape.emit, (self._anchor, self._indices, self._offsets)
        with emit.around("TableBatchedLookupFunction", taken, sequence=emit.sequence):
            pooled = self._empty((self._batch, self._sizes.columns), "float32")
        self._tape.record("TableBatchedLookupFunctionBackward", (self._anchor,), (pooled,), self._backward)
        return pooled

    def update(self) -> None:
        """The backward pass has done it."""

    def _backward(self, gradients: Gradients) -> Gradients:
        """Sorts lookups by row, then sums and updates, level by level while a run of one row is longer than a chunk."""
        emit, gradient = self._tape.emit, given(gradients)
        if not is_contiguous(gradient):
            contiguous(emit, gradient)
        dense = zeros(emit, self._anchor.shape) if self.parameters else None
        if self._indices.numel:
            self._sum_rows()
        return (dense,)

    def _sum_rows(self) -> None:
        count = self._indices.numel
        key_type = self._sizes.key_type
        keys, infos = self._empty((count,), key_type), self._empty((count,), "int64")
        index_select(self._tape, infos, self._sorted(keys))
        stride = self._sizes.widest // 4
        if self._adagrad:
            stride = 1 << (stride - 1).bit_length()
        while True:
            chunks = -(-count // _CHUNK)
            self._empty((2 * chunks,), key_type)
            self._empty((2 * chunks,), "int64")
            self._empty((8 * chunks * stride,), "float32")
            if chunks == 1:
                return
            count = 2 * chunks

    def _sorted(self, keys: Tensor) -> Tensor:
        emit = self._tape.emit
        values, order = emit.tensor(keys.shape, keys.dtype), emit.tensor(keys.shape, "int64")
        with emit.around("aten::sort", (keys, True, -1, False), (values, order)):
            emit.op("aten::copy_", (values, keys, False), (values,))
        return order

    def _empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return empty(self._tape.emit, shape, dtype, layout=None, pinned=False)


def index_select(tape: Tape, x: Tensor, index: Tensor) -> Tensor:
    """`x.index_select(0, index)`: on a GPU a gather along an index that is spread over the columns."""
    emit, (count,) = tape.emit, index.shape
    assert x.strides is not None
    rest = x.shape[1:]
    result, nothing = emit.tensor((count, *rest), x.dtype), emit.tensor((0,), x.dtype)
    with emit.around("aten::index_select", (x, 0, index), (result,)):
        empty(emit, (0,), x.dtype, made=nothing)
        emit.op("aten::resize_", (nothing, result.shape, None), (result,))
        column = emit.reshaped(index, (count, *(1 for _ in rest)))
        wide = emit.view(column, result.shape, (1, *(0 for _ in rest)))
        with emit.around("aten::expand", (column, result.shape, False), (wide,)):
            emit.op("aten::as_strided", (column, wide.shape, wide.strides, None), (wide,))
        with emit.around("aten::gather", (x, 0, wide, False, result), (result,)):
            emit.as_strided(result, result.shape, result.strides or ())
            emit.as_strided(x, result.shape, (0, *x.strides[1:]))
    return result
