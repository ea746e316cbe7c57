"""A DLRM's tables as one `nn.EmbeddingBag` each, as PyTorch records them: lookups, and gradients that are sparse."""

from __future__ import annotations

from functools import partial

from steptime._build.emit.autograd import Gradients, Tape
from steptime._build.dlrm.tables import LocalTable, index_select
from steptime._build.emit.layers import DTYPE_NUMBERS, SPARSE, STRIDED, empty, given
from steptime._program.program import Tensor

_SUM_MODE = 0  # EmbeddingBagMode
_NO_PADDING = -1


class Bag:
    """One table: its rows, this step's lookups, and the gradient that the backward pass leaves, sparse unless it is `dense`."""

    def __init__(
        self, tape: Tape, buffer: Tensor, start: int, table: LocalTable, batch: int, *, dense: bool = False
    ) -> None:
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
        taken = (self.weight, self._indices, self._offsets, False, _SUM_MODE, not self._dense, None, False)
        result = (pooled, bag_of, sizes, nothing)
        with (
            emit.around("aten::embedding_bag", (*taken, None), result, sequence=emit.sequence),
            emit.around("aten::_embedding_bag", (*taken, _NO_PADDING), result, sequence=emit.sequence),
        ):
            for each in (sizes, bag_of, pooled, nothing):
                empty(emit, each.shape, each.dtype, made=each)
        backward = self._dense_backward if self._dense else self._backward
        self.tape.record("EmbeddingBagBackward0", (self.weight,), (pooled,), partial(backward, result))
        return pooled

    def _backward(self, made: tuple[Tensor, ...], gradients: Gradients) -> Gradients:
        emit, table, gradient = self.tape.emit, self.table, given(gradients)
        _, bag_of, sizes, nothing = made
        sparse = emit.sparse((table.rows, table.dim))
        taken = (gradient, self._indices, self._offsets, bag_of, sizes)
        with (
            emit.around(
                "aten::_embedding_bag_backward",
                (*taken, nothing, table.rows, False, _SUM_MODE, True, None, _NO_PADDING),
                (sparse,),
            ),
            emit.around(
                "aten::_embedding_bag_sparse_backward",
                (*taken, table.rows, False, _SUM_MODE, None, _NO_PADDING),
                (sparse,),
            ),
        ):
            rows = index_select(self.tape, gradient, bag_of)
            text = (rows, self._indices, table.rows, _NO_PADDING, False)
            with emit.around("aten::embedding_sparse_backward", text, (sparse,)):
                self._of_rows(rows, sparse)
        return (sparse,)

    def _dense_backward(self, made: tuple[Tensor, ...], gradients: Gradients) -> Gradients:
        emit, table, gradient = self.tape.emit, self.table, given(gradients)
        _, bag_of, sizes, largest = made
        dense = emit.tensor((table.rows, table.dim))
        taken = (gradient, self._indices, self._offsets, bag_of, sizes, largest, table.rows, False, _SUM_MODE)
        with emit.around("aten::_embedding_bag_backward", (*taken, False, None, _NO_PADDING), (dense,)):
            without = (gradient, self._indices, bag_of, sizes, largest, table.rows, False, _SUM_MODE, None, _NO_PADDING)
            emit.op("aten::_embedding_bag_dense_backward", without, (dense,))
        return (dense,)

    def _of_rows(self, rows: Tensor, sparse: Tensor) -> None:
        """Puts row numbers and their gradients together; what lies in a sparse tensor is looked at through views."""
        emit, table = self.tape.emit, self.table
        flat = []
        for tensor, shape, item in (
            (self._indices, (1, table.indices), (1, -1)),
            (rows, (table.indices, table.dim), (-1, table.dim)),
        ):
            result = emit.view(tensor, shape)
            with emit.around("aten::reshape", (tensor, item), (result,)):
                emit.op("aten::view", (tensor, item), (result,))
            flat.append(result)
        self.row_numbers, self.values = flat
        emit.op("aten::to", (self.row_numbers, DTYPE_NUMBERS["int64"], False, False, None), (self.row_numbers,))
        self._put_together(sparse, self.row_numbers, self.values, (None, None, None, None, None))

    def _kept(self, gradient: Tensor) -> Tensor:
        """How a parameter keeps a sparse gradient: another sparse tensor over the same rows."""
        emit = self.tape.emit
        for _ in range(2):
            self.indices_of(gradient)
            self.values_of(gradient)
        values = self.values_of(gradient)
        numbers = self.indices_of(gradient)
        kept = emit.sparse(gradient.shape)
        self._put_together(kept, numbers, values, (DTYPE_NUMBERS["float32"], SPARSE, emit.device, None, None))
        return kept

    def indices_of(self, sparse: Tensor) -> Tensor:
        """`sparse._indices()`, [1, lookups]."""
        result = self.tape.emit.view(self.row_numbers)
        self.tape.emit.op("aten::_indices", (sparse,), (result,))
        return result

    def values_of(self, sparse: Tensor) -> Tensor:
        """`sparse._values()`, [lookups, dim]."""
        result = self.tape.emit.view(self.values)
        self.tape.emit.op("aten::_values", (sparse,), (result,))
        return result

    def _put_together(self, sparse: Tensor, numbers: Tensor, values: Tensor, options: tuple[int | str | None, ...]) -> None:
        text = (numbers, values, sparse.shape, *options)
        with self.tape.emit.around("aten::_sparse_coo_tensor_unsafe", text, (sparse,)):
            self.put_together(sparse, numbers, values)

    def put_together(self, sparse: Tensor, numbers: Tensor, values: Tensor) -> None:
        """Makes a sparse tensor of row numbers and rows: an empty one, whose parts are then put in."""
        emit, dim = self.tape.emit, self.table.dim
        text = (1, 1, sparse.shape, numbers, values, DTYPE_NUMBERS["float32"], SPARSE, emit.device, None, None)
        with emit.around("aten::_sparse_coo_tensor_with_dims_and_tensors", text, (sparse,)):
            no_values, no_numbers = emit.tensor((0,)), emit.tensor((1, 0), "int64")
            for each in (no_values, no_numbers):
                emit.op("aten::empty", (each.shape, DTYPE_NUMBERS[each.dtype], STRIDED, "cuda", None, None), (each,))
            emit.op("aten::resize_", (no_values, (0, dim), None), (emit.view(no_values, (0, dim)),))
            emit.op("aten::resize_", (no_numbers, (1, 0), None), (no_numbers,))
