"""The embedding tables of one rank of a DLRM, as PyTorch records their lookups and updates: one `nn.EmbeddingBag` each.

Their gradients are sparse. Row-wise Adagrad sums rows that are looked up more than once first (`coalesce`). Tables that one
kernel looks up together are in `batched_tables`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from steptime._build.emit.emitter import DTYPE_NUMBERS, SPARSE, STRIDED, Emitter
from steptime._build.emit.gradients import ROWWISE_ADAGRAD, divided_rows, mean_squares, step_of, zero_grad
from steptime._build.emit.layers import cat
from steptime._build.emit.tape import Tape
from steptime._program.program import Tensor

ALIGNMENT = 64
"""Elements between which tables start in their buffer (steptime_lab.workloads.table_batched.layout)."""

_SUM_MODE = 0  # EmbeddingBagMode
_NO_PADDING = -1
_SINGLE = DTYPE_NUMBERS["float32"]


@dataclass(frozen=True, slots=True)
class LocalTable:
    """A table of this rank, how many lookups a step makes in it, and how many distinct rows those find."""

    rows: int
    dim: int
    indices: int
    distinct: int
    dtype: str = "float32"  # of its rows
    weighted: bool = False  # a weight for every lookup
    sequence: int = 0  # rows that go on for every sample; 0: their sum

    @property
    def columns(self) -> int:
        """Elements that go on for every sample."""
        return self.dim * (self.sequence or 1)


class TableOps(ABC):
    """One rank's tables."""

    @abstractmethod
    def look_up(self) -> Tensor:
        """Sums of looked-up rows, [global batch, summed dims]."""

    def sort_ahead(self) -> None:  # noqa: B027
        """What the backward pass needs of indices alone, beside other work: nothing where it is not apart."""

    def clear(self) -> None:  # noqa: B027
        """What is written before the lookups: nothing where weights are no parameters, and there is no gradient to clear."""

    def update(self) -> None:  # noqa: B027
        """Applies what the backward pass left: nothing where it has been applied already."""


def sizes_of(tables: Sequence[LocalTable]) -> list[int]:
    """Elements from each table's start to the next one's."""
    return [-(table.rows * table.dim // -ALIGNMENT) * ALIGNMENT for table in tables]


class Bag:
    """One table: its rows, this step's lookups, and the gradient that the backward pass leaves, sparse unless it is `dense`."""

    def __init__(self, tape: Tape, buffer: Tensor, start: int, table: LocalTable, batch: int, *, dense: bool = False) -> None:
        emit = tape.emit
        self.tape, self.table, self._batch, self._dense = tape, table, batch, dense
        self.weight = emit.view(buffer, (table.rows, table.dim), offset=start)
        tape.parameter(self.weight, None if dense else self._kept)
        self._indices = emit.tensor((table.indices,), "int64")
        self._offsets = emit.view(emit.tensor((batch + 1,), "int64"), (batch,))
        self.row_numbers, self.values = self._indices, self._indices  # of the gradient, once it is there

    @property
    def gradient(self) -> Tensor:
        """The sparse gradient, once the backward pass is written."""
        return self.tape.gradients[self.weight.id or 0]

    def look_up(self) -> Tensor:
        """Sums of looked-up rows, [global batch, dim]."""
        emit, table = self.tape.emit, self.table
        sizes, bag_of = emit.tensor((self._batch,), "int64"), emit.tensor((table.indices,), "int64")
        pooled, nothing = emit.tensor((self._batch, table.dim)), emit.tensor((0,), "int64")
        call = (self.weight, self._indices, self._offsets, False, _SUM_MODE, not self._dense, None, False)
        result = (pooled, bag_of, sizes, nothing)
        with (
            emit.op("embedding_bag", (*call, None), result, node=True),
            emit.op("_embedding_bag", (*call, _NO_PADDING), result, node=True),
        ):
            for each in (sizes, bag_of, pooled, nothing):
                emit.empty(each)
        backward = self._dense_backward if self._dense else self._sparse_backward
        return self.tape.node(
            "EmbeddingBagBackward0", (self.weight,), pooled, lambda gradient: backward(gradient, bag_of, sizes, nothing)
        )

    def _sparse_backward(self, gradient: Tensor, bag_of: Tensor, sizes: Tensor, nothing: Tensor) -> Tensor:
        emit, table = self.tape.emit, self.table
        sparse = emit.sparse((table.rows, table.dim))
        call = (gradient, self._indices, self._offsets, bag_of, sizes)
        rest = (table.rows, False, _SUM_MODE)
        with (
            emit.op("_embedding_bag_backward", (*call, nothing, *rest, True, None, _NO_PADDING), (sparse,)),
            emit.op("_embedding_bag_sparse_backward", (*call, *rest, None, _NO_PADDING), (sparse,)),
        ):
            rows = emit.index_select(gradient, bag_of)
            with emit.op("embedding_sparse_backward", (rows, self._indices, table.rows, _NO_PADDING, False), (sparse,)):
                self._of_rows(rows, sparse)
        return sparse

    def _dense_backward(self, gradient: Tensor, bag_of: Tensor, sizes: Tensor, largest: Tensor) -> Tensor:
        emit, table = self.tape.emit, self.table
        dense = emit.tensor((table.rows, table.dim))
        rest = (bag_of, sizes, largest, table.rows, False, _SUM_MODE)
        call = (gradient, self._indices, self._offsets, *rest, False, None, _NO_PADDING)
        with emit.op("_embedding_bag_backward", call, (dense,)):
            inner = (gradient, self._indices, *rest, None, _NO_PADDING)
            emit.op("_embedding_bag_dense_backward", inner, (dense,))
        return dense

    def _of_rows(self, rows: Tensor, sparse: Tensor) -> None:
        """Puts row numbers and their gradients together; what lies in a sparse tensor is looked at through views."""
        emit, table = self.tape.emit, self.table
        self.row_numbers = emit.reshaped(self._indices, (1, table.indices), (1, -1))
        self.values = emit.reshaped(rows, (table.indices, table.dim), (-1, table.dim))
        emit.same_dtype(self.row_numbers)
        self._put_together(sparse, self.row_numbers, self.values, (None, None, None, None, None))

    def _kept(self, gradient: Tensor) -> Tensor:
        """How a parameter keeps a sparse gradient: another sparse tensor over the same rows."""
        emit = self.tape.emit
        for _ in range(2):
            self.indices_of(gradient)
            self.values_of(gradient)
        values = self.values_of(gradient)
        numbers = self.indices_of(gradient)
        result = emit.sparse(gradient.shape)
        self._put_together(result, numbers, values, (_SINGLE, SPARSE, emit.device, None, None))
        return result

    def indices_of(self, sparse: Tensor) -> Tensor:
        """`sparse._indices()`, [1, lookups]."""
        result = self.tape.emit.view(self.row_numbers)
        self.tape.emit.op("_indices", (sparse,), (result,))
        return result

    def values_of(self, sparse: Tensor) -> Tensor:
        """`sparse._values()`, [lookups, dim]."""
        result = self.tape.emit.view(self.values)
        self.tape.emit.op("_values", (sparse,), (result,))
        return result

    def _put_together(self, sparse: Tensor, numbers: Tensor, values: Tensor, options: tuple[int | str | None, ...]) -> None:
        call = (numbers, values, sparse.shape, *options)
        with self.tape.emit.op("_sparse_coo_tensor_unsafe", call, (sparse,)):
            self.put_together(sparse, numbers, values)

    def put_together(self, sparse: Tensor, numbers: Tensor, values: Tensor) -> None:
        """Makes a sparse tensor of row numbers and rows: an empty one, whose parts are then put in."""
        emit, dim = self.tape.emit, self.table.dim
        call = (1, 1, sparse.shape, numbers, values, _SINGLE, SPARSE, emit.device, None, None)
        with emit.op("_sparse_coo_tensor_with_dims_and_tensors", call, (sparse,)):
            no_values, no_numbers = emit.tensor((0,)), emit.tensor((1, 0), "int64")
            for each in (no_values, no_numbers):
                emit.op("empty", (each.shape, DTYPE_NUMBERS[each.dtype], STRIDED, "cuda", None, None), (each,))
            emit.op("resize_", (no_values, (0, dim), None), (emit.view(no_values, (0, dim)),))
            emit.op("resize_", (no_numbers, (1, 0), None), (no_numbers,))


class BagOps(TableOps):
    """All tables of a rank, one after the other; their columns side by side."""

    def __init__(
        self, tape: Tape, tables: Sequence[LocalTable], batch: int, learning_rate: float, *, adagrad: bool, dense: bool = False
    ) -> None:
        sizes = sizes_of(tables)
        buffer, starts = tape.emit.tensor((sum(sizes),)), accumulate(sizes, initial=0)
        pairs = zip(tables, starts, strict=False)
        self._bags = [Bag(tape, buffer, start, table, batch, dense=dense) for table, start in pairs]
        self.parameters = [bag.weight for bag in self._bags]
        self._states = [tape.emit.tensor((table.rows,)) for table in tables] if adagrad else []
        self._tape, self._learning_rate = tape, learning_rate
        self._label = ROWWISE_ADAGRAD if adagrad else "SGD"

    def clear(self) -> None:
        """The optimiser drops the gradients of the step before."""
        zero_grad(self._tape.emit, self._label)

    def look_up(self) -> Tensor:
        """Sums of looked-up rows, [global batch, summed dims]."""
        return cat(self._tape, [bag.look_up() for bag in self._bags])

    def update(self) -> None:
        """The optimiser's step over the sparse gradients."""
        with step_of(self._tape.emit, self._label):
            if not self._states:
                for bag in self._bags:
                    _add(bag, -self._learning_rate)
            for bag, state in zip(self._bags, self._states, strict=False):
                _adagrad(bag, state, -self._learning_rate)


def _add(bag: Bag, alpha: float) -> None:
    """`weight.add_(gradient, alpha=alpha)` of a sparse gradient."""
    emit, weight, gradient = bag.tape.emit, bag.weight, bag.gradient
    with (
        emit.op("add_", (weight, gradient, alpha), (weight,)),
        emit.op("add", (weight, gradient, alpha, weight), (weight,)),
    ):
        emit.op("_nnz", (gradient,), (bag.table.indices,))
        emit.op("result_type", (weight, gradient), (_SINGLE,))
        emit.same_dtype(weight)
        values = bag.values_of(gradient)
        emit.same_dtype(values)
        numbers = bag.indices_of(gradient)
        emit.op("sparse_dim", (gradient,), (1,))
        emit.op("is_coalesced", (gradient,), (False,))
        rows = _squeezed(emit, numbers)
        whole = emit.viewed(weight, weight.shape)
        flat = emit.reshaped(values, values.shape)
        emit.op("index_add_", (whole, 0, rows, flat, alpha), (whole,))
        emit.op("copy_", (weight, weight, False), (weight,))


def _adagrad(bag: Bag, state: Tensor, alpha: float) -> None:
    """Adds the mean square of each row's gradient to the row's state, and divides the gradient by its root."""
    emit, distinct = bag.tape.emit, bag.table.distinct
    summed, numbers, rows = _coalesced(bag)
    numbers = _part(emit, "indices", summed, numbers)
    index = emit.strided(numbers, (distinct,), (1,), ("select", (0, 0)), offset=numbers.offset)
    rows = _part(emit, "values", summed, rows)
    emit.op("index_add_", (state, 0, index, mean_squares(emit, rows), 1), (state,))
    roots = emit.index_select(state, index)
    emit.op("sqrt_", (roots,), (roots,))
    emit.op("index_add_", (bag.weight, 0, index, divided_rows(emit, rows, roots), alpha), (bag.weight,))


def _coalesced(bag: Bag) -> tuple[Tensor, Tensor, Tensor]:
    """`gradient.coalesce()`, its row numbers and its rows."""
    emit, gradient, table = bag.tape.emit, bag.gradient, bag.table
    summed = emit.sparse(gradient.shape)
    rows = emit.tensor((table.distinct, table.dim))
    with emit.op("coalesce", (gradient,), (summed,)):
        emit.op("is_coalesced", (gradient,), (False,))
        with emit.op("_coalesce", (gradient,), (summed,)):
            emit.op("_nnz", (gradient,), (table.indices,))
            emit.op("is_coalesced", (gradient,), (False,))
            bag.values_of(gradient)
            emit.op("sparse_dim", (gradient,), (1,))
            sorted_numbers = emit.cloned(_squeezed(emit, bag.indices_of(gradient)))
            for _ in ("positions", "first of each row"):
                bag.indices_of(gradient)
                emit.empty(emit.tensor((table.indices,), "int64"))
            numbers = emit.view(sorted_numbers, (1, table.distinct))
            emit.op("resize_", (sorted_numbers, numbers.shape, None), (numbers,))
            emit.empty(rows)
            bag.put_together(summed, numbers, rows)
            emit.op("_coalesced_", (summed, True), (summed,))
    return summed, numbers, rows


def _part(emit: Emitter, name: str, sparse: Tensor, part: Tensor) -> Tensor:
    """`sparse.indices()` or `sparse.values()` of a coalesced tensor."""
    result = emit.view(part)
    with emit.op(name, (sparse,), (result,)):
        emit.op("is_coalesced", (sparse,), (True,))
        emit.op("alias", (emit.view(part),), (result,))
    return result


def _squeezed(emit: Emitter, numbers: Tensor) -> Tensor:
    return emit.strided(numbers, numbers.shape[1:], (1,), ("squeeze", (0,)))


class NoTableOps(TableOps):
    """A rank that owns no table: it sends nothing, and still meets the others."""

    def __init__(self, tape: Tape, batch: int, dtype: str = "float32") -> None:
        self._tape = tape
        self._nothing = tape.emit.tensor((batch, 0), dtype)
        self._before = tape.emit.tensor((batch, 0), dtype)  # the gradient of the step before, which nobody clears

    def look_up(self) -> Tensor:
        """No columns; part of the graph all the same, so that the backward exchange happens on every rank."""
        return self._tape.parameter(self._nothing, self._add)

    def _add(self, gradient: Tensor) -> Tensor:
        self._tape.emit.op("add_", (self._before, gradient, 1), (self._before,))
        return self._before
