"""Tables of one rank that one kernel looks up together, and that are updated in the backward pass, as PyTorch records it.

`table_batched` are the project's own kernels (`steptime_lab.workloads.table_batched`), which PyTorch sees as a Python function.
`fbgemm` are FBGEMM's split table-batched embeddings, which it sees as an op: names and places of arguments are those of
`split_embedding_codegen_lookup_*_function` in FBGEMM 0.1 to 0.5, which `_models.lookups.fbgemm` reads from recordings too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steptime._build.dlrm.tables import LocalTable, TableOps, sizes_of
from steptime._build.emit.tape import Tape
from steptime._build.emit.writer import is_contiguous
from steptime._lookups.workload import STATE_PER_WEIGHT, row_bytes
from steptime._program.program import Tensor, Value

# Of the table-batched kernels (steptime_lab.workloads.table_batched.launch): positions walked in a row, and from how many quads
# of weights on keys are sorted as 64 bits.
_CHUNK = 32
_INT32 = 1 << 31
_ROWWISE = "rowwise_adagrad"

SORTING = 2
"""The stream on which lookups are sorted ahead."""


@dataclass(frozen=True, slots=True)
class TableBatchedSizes:
    """All that a table-batched lookup's ops tell of its tables."""

    tables: int
    columns: int  # summed dims
    widest: int
    indices: int
    key_type: str  # of what is sorted: half the bytes where the quads of all tables can be counted in int32
    dtype: str
    weighted: bool
    sequence: int


def table_batched_sizes(tables: Sequence[LocalTable]) -> TableBatchedSizes:
    """Of these tables, one or more, which one kernel looks up."""
    dims, first = [table.dim for table in tables], tables[0]
    key_type = "int32" if sum(sizes_of(tables)) // 4 < _INT32 else "int64"
    indices = sum(table.indices for table in tables)
    return TableBatchedSizes(
        len(dims), sum(dims), max(dims), indices, key_type, first.dtype, first.weighted, first.sequence
    )  # fmt: skip


class TableBatchedOps(TableOps):
    """All tables in one launch forward, and a handful backward which update the rows themselves.

    `dense`: they leave a gradient of all rows instead, as an optimiser of dense parameters takes it.
    """

    def __init__(
        self,
        tape: Tape,
        tables: Sequence[LocalTable],
        batch: int,
        optimizer: str,
        *,
        dense: bool = False,
        vectors: str = "float32",
    ) -> None:
        emit, sizes = tape.emit, table_batched_sizes(tables)
        self._vectors, self._sorted = vectors, False
        self._tape, self._bags, self._sizes = tape, batch * (sizes.sequence or 1), sizes
        self._adagrad = optimizer == _ROWWISE and not dense
        self._anchor = tape.parameter(emit.tensor((sum(sizes_of(tables)) if dense else 0,), sizes.dtype))
        self._indices = emit.tensor((sizes.indices,), "int64")
        self._offsets = emit.tensor((sizes.tables * self._bags + 1,), "int64")
        self._weights = (emit.tensor((sizes.indices,)),) if sizes.weighted else ()
        self.parameters = [self._anchor] if dense else []

    def look_up(self) -> Tensor:
        """One launch."""
        emit, call = self._tape.emit, (self._anchor, self._indices, self._offsets, *self._weights)
        with emit.write("TableBatchedLookupFunction", call, sequence=emit.sequence):
            pooled = emit.empty_from_python((self._bags, self._sizes.columns), self._vectors)
        return self._tape.node("TableBatchedLookupFunctionBackward", (self._anchor,), pooled, self._backward)

    def _backward(self, gradient: Tensor) -> Tensor | None:
        """Sorts lookups by row, then sums and updates, level by level while a run of one row is longer than a chunk."""
        emit = self._tape.emit
        if not is_contiguous(gradient):
            emit.contiguous(gradient)
        dense = emit.zeros(emit.tensor(self._anchor.shape, self._anchor.dtype), from_python=True) if self.parameters else None
        if self._indices.numel:
            if self._sorted:
                emit.follow(0, SORTING)
            else:
                self._sort()
            self._sum_rows()
        return dense

    def sort_ahead(self) -> None:
        """Keys of all lookups, sorted, and where each is from."""
        if self._indices.numel:
            self._sorted = True
            with self._tape.emit.write("TableBatchedLookupIndices", (self._indices, self._offsets)):
                self._sort()

    def _sort(self) -> None:
        emit, count, key_type = self._tape.emit, self._indices.numel, self._sizes.key_type
        keys, infos = emit.empty_from_python((count,), key_type), emit.empty_from_python((count,), "int64")
        values, order = emit.tensor(keys.shape, keys.dtype), emit.tensor(keys.shape, "int64")
        with emit.op("sort", (keys, True, -1, False), (values, order)):
            emit.op("copy_", (values, keys, False), (values,))
        emit.index_select(infos, order)
        for weights in self._weights:
            emit.index_select(weights, order)

    def _sum_rows(self) -> None:
        emit, count, key_type = self._tape.emit, self._indices.numel, self._sizes.key_type
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


class FbgemmOps(TableOps):
    """FBGEMM's lookup of many tables with a fused optimiser; `dense`: with a gradient of all rows."""

    def __init__(
        self,
        tape: Tape,
        tables: Sequence[LocalTable],
        batch: int,
        optimizer: str,
        *,
        dense: bool = False,
        vectors: str = "float32",
    ) -> None:
        emit, sizes = tape.emit, table_batched_sizes(tables)
        self._vectors, self._sorted = vectors, False
        self._tape, self._bags, self._sizes = tape, batch * (sizes.sequence or 1), sizes
        self._rows = sum(table.rows for table in tables)
        if sizes.dtype == "int8":  # rows of bytes, with what they are scaled by among them
            self._of_weights = emit.tensor((sum(table.rows * row_bytes(table.dim, table.dtype) for table in tables),), "uint8")
        else:
            self._of_weights = emit.tensor((sum(table.rows * table.dim for table in tables),), sizes.dtype)
        self._anchor = tape.parameter(self._of_weights if dense else emit.tensor((0,)))
        self._indices = emit.tensor((sizes.indices,), "int64")
        self._offsets = emit.tensor((sizes.tables * self._bags + 1,), "int64")
        self._lookup_weights = emit.tensor((sizes.indices,)) if sizes.weighted else None
        self.parameters = [self._anchor] if dense else []
        self._optimizer = "Dense" if dense else optimizer
        per_row = 1 if optimizer == _ROWWISE else 0
        each = STATE_PER_WEIGHT.get(optimizer, 0) * sum(table.rows * table.dim for table in tables)
        self._state = None if dense else emit.tensor((each or per_row * self._rows,))

    def look_up(self) -> Tensor:
        """One op."""
        emit = self._tape.emit
        name = f"split_embedding_codegen_lookup_{self._optimizer}_function"
        if self.parameters:
            name = "dense_embedding_codegen_lookup_function"
        pooled = emit.tensor((self._bags, self._sizes.columns), self._vectors)
        with emit.write(f"fbgemm::{name}", self._arguments(), (pooled,), sequence=emit.sequence):
            emit.empty(pooled, pinned=False)
        node = f"torch::autograd::CppNode<SplitLookupFunction_{self._optimizer}_Op>"
        return self._tape.node(node, (self._anchor,), pooled, self._backward)

    def _arguments(self) -> tuple[Value, ...]:
        emit, sizes = self._tape.emit, self._sizes
        d_offsets, rows_before = emit.tensor((sizes.tables + 1,), "int32"), emit.tensor((sizes.tables + 1,), "int64")
        bits = int(math.log2(max(self._rows, 1)) + 1)
        known = (
            d_offsets,
            sizes.columns,
            sizes.widest,
            rows_before,
            bits,
            self._indices,
            self._offsets,
            0,
            self._lookup_weights,
        )
        starts = emit.tensor((sizes.tables,), "int64")
        if self.parameters:
            return (self._anchor, starts, *known)
        nothing, cache = emit.tensor((0,)), emit.tensor((0, 0))
        placements = emit.tensor((sizes.tables,), "int32")
        return (
            *(self._anchor, self._of_weights, nothing, cache, placements, starts, *known),
            *(None, None, False, 0.0, False, self._state),
        )

    def _backward(self, gradient: Tensor) -> Tensor | None:
        """Rows are summed and updated run by run."""
        emit, count = self._tape.emit, self._indices.numel
        if not is_contiguous(gradient):
            emit.contiguous(gradient)
        dense = emit.zeros(emit.tensor(self._anchor.shape, self._anchor.dtype)) if self.parameters else None
        if self._sorted:
            emit.follow(0, SORTING)
        elif count:
            self._sort()
        if self._lookup_weights is not None:
            emit.empty(emit.tensor((count,)))
        return dense

    def sort_ahead(self) -> None:
        """Row numbers over all tables, sorted, and the runs of equal ones."""
        if self._indices.numel:
            self._sorted = True
            with self._tape.emit.write("SplitLookupIndices", (self._indices, self._offsets)):
                self._sort()

    def _sort(self) -> None:
        emit, count = self._tape.emit, self._indices.numel
        for dtype in ("int64", "int32", "int64", "int32", "int64", "int32"):
            emit.empty(emit.tensor((count,), dtype))
