"""Where vectors of a DLRM meet, as PyTorch records it: exchanged between ranks beside the bottom MLP, then with each other.

Tables on single ranks, whole or in slices of columns, send their sums to the ranks of the samples by an all_to_all. Tables
whose rows are spread over all ranks send partial sums by a reduce_scatter, and gradients come back by an all_gather, as in
TorchRec (torchrec.distributed.comm_ops: `ReduceScatter_Req`, `ReduceScatter_Wait`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from steptime._build.emit.emitter import is_contiguous, strides_of
from steptime._build.emit.layers import bmm, cat
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.tensors import (
    CONTIGUOUS,
    arange,
    contiguous,
    detached,
    empty_like,
    expanded,
    new_empty,
    new_zeros,
    number,
    reshaped,
    viewed,
)
from steptime._build.emit.views import transpose, view
from steptime._program.program import Tensor


class ColumnExchangeOps:
    """One step's exchange of columns: `widths` are the columns (summed dims) that each rank looks up."""

    def __init__(self, tape: Tape, widths: Sequence[int], local_batch: int) -> None:
        self._tape, self._widths, self._local_batch = tape, tuple(widths), local_batch
        own = self._widths[tape.emit.rank]
        self._sent = [local_batch * own] * len(self._widths)
        self._received = [local_batch * width for width in self._widths]
        self._shape = (local_batch * len(self._widths), own)
        self._number = 0
        self._gradient: Tensor | None = None

    def start(self, pooled: Tensor) -> Tensor:
        """Starts to send the lookups of this rank's tables for all samples."""
        emit = self._tape.emit
        with emit.frame("_Start", (pooled,), sequence=emit.sequence):
            received = new_empty(emit, pooled, (sum(self._received),))
            flat = viewed(emit, pooled, (pooled.numel,), (-1,))
            self._number = emit.all_to_all(received, flat, self._received, self._sent)

        def backward(_: Tensor) -> Tensor | None:
            emit.wait(self._number)
            return self._gradient

        return self._tape.node("_StartBackward", (pooled,), received, backward)

    def finish(self, received: Tensor) -> tuple[Tensor, ...]:
        """Waits; every rank's columns of this rank's samples."""
        emit = self._tape.emit
        with emit.frame("_Finish", (received,), sequence=emit.sequence):
            emit.wait(self._number)
            blocks = self._blocks(detached(emit, received))

        def backward(gradients: Gradients) -> Gradients:
            assert gradients[0] is not None
            flat = new_empty(emit, gradients[0], (sum(self._received),))
            for block, gradient in zip(self._blocks(flat), gradients, strict=True):
                emit.op("copy_", (block, gradient, False), (block,))
            self._gradient = new_empty(emit, flat, self._shape)
            taken = viewed(emit, self._gradient, (self._gradient.numel,), (-1,))
            self._number = emit.all_to_all(taken, flat, self._sent, self._received)
            return (flat,)

        self._tape.record("_FinishBackward", (received,), blocks, backward)
        return blocks

    def _blocks(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of what all ranks send, one per rank."""
        emit, starts = self._tape.emit, accumulate(self._received, initial=0)
        shares = tuple(emit.view(flat, (size,), offset=at) for size, at in zip(self._received, starts, strict=False))
        with emit.around("split_with_sizes", (flat, tuple(self._received), 0), (shares,)):
            for share in shares:
                emit.op("as_strided", (flat, share.shape, share.strides, share.offset), (share,))
        pairs = zip(shares, self._widths, strict=True)
        return tuple(viewed(emit, share, (self._local_batch, width)) for share, width in pairs)


class RowExchangeOps:
    """One step's exchange of partial sums: every rank has looked up its rows of all tables for all samples."""

    def __init__(self, tape: Tape, local_batch: int) -> None:
        self._tape, self._local_batch, self._number = tape, local_batch, 0
        self._gradient: Tensor | None = None

    def start(self, pooled: Tensor) -> Tensor:
        """Starts to add the partial sums of all ranks, [global batch, columns]."""
        emit = self._tape.emit
        with emit.frame("ReduceScatter_Req", (pooled,), sequence=emit.sequence):
            summed = new_empty(emit, pooled, (self._local_batch, pooled.shape[1]))
            self._number = emit.reduce_scatter(summed, pooled)

        def backward(_: Tensor) -> Tensor | None:
            emit.wait(self._number)
            return self._gradient

        return self._tape.node("ReduceScatter_ReqBackward", (pooled,), summed, backward)

    def finish(self, summed: Tensor) -> Tensor:
        """Waits; the sums of this rank's samples."""
        emit, columns = self._tape.emit, summed.shape[1]
        with emit.frame("ReduceScatter_Wait", (summed,), sequence=emit.sequence):
            emit.wait(self._number)
            awaited = detached(emit, summed)

        def backward(gradient: Tensor) -> Tensor:
            if not is_contiguous(gradient):
                gradient = contiguous(emit, gradient)
            self._gradient = new_empty(emit, gradient, (self._local_batch * emit.world_size, columns))
            self._number = emit.all_gather(self._gradient, gradient)
            return gradient

        return self._tape.node("ReduceScatter_WaitBackward", (summed,), awaited, backward)


class InteractionOps:
    """How the bottom MLP meets the lookups: side by side, or all pairwise dot products.

    `dot` interactions index the lower triangle of the products by two rows of one tensor, made before the step.
    """

    def __init__(self, tape: Tape, *, dot: bool, tables: int, dim: int) -> None:
        self._tape, self._dot, self._dim, self._vectors = tape, dot, dim, tables + 1
        pairs = self._vectors * (self._vectors - 1) // 2
        below = tape.emit.tensor((2, pairs), "int64")
        self._rows, self._columns = (tape.emit.view(below, (pairs,), offset=row * pairs) for row in (0, 1))

    def __call__(self, dense: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """What the top MLP sees, [local batch, width]."""
        tape = self._tape
        side_by_side = cat(tape, (dense, *blocks))
        if not self._dot:
            return side_by_side
        samples = side_by_side.shape[0]
        vectors = view(tape, side_by_side, (samples, self._vectors, self._dim), (samples, -1, self._dim))
        products = bmm(tape, vectors, transpose(tape, vectors, 1, 2))
        return cat(tape, (dense, self._lower_triangle(products)))

    def _lower_triangle(self, products: Tensor) -> Tensor:
        emit, (pairs,) = self._tape.emit, self._rows.shape
        indices = (None, self._rows, self._columns)
        picked = emit.tensor((products.shape[0], pairs))
        with emit.around("index", (products, indices), (picked,), node=True):
            emit.strided(products, picked.shape, (self._vectors**2, 0))
            for index in (self._rows, self._columns):
                reshaped(emit, index, (1, pairs))

        def backward(gradient: Tensor) -> Tensor:
            result = new_zeros(emit, gradient, products.shape)
            with emit.around("_index_put_impl_", (result, indices, gradient, True, True), (result,)):
                self._put(gradient)
            return result

        return self._tape.node("IndexBackward0", (products,), picked, backward)

    def _put(self, gradient: Tensor) -> None:
        """Adds gradients at indices: PyTorch counts places, sorts them and sums (index_put_with_sort_kernel)."""
        emit, (pairs,) = self._tape.emit, self._rows.shape
        places = self._counted(self._rows, self._vectors)
        columns = self._counted(self._columns, 1)
        emit.op("add_", (places, columns, 1), (places,))
        spread = expanded(emit, gradient, gradient.shape, strides_of(gradient))
        if not is_contiguous(spread):
            contiguous(emit, spread)
        flat = reshaped(emit, places, (pairs,), (-1,))
        for _ in ("sorted places", "their order"):
            empty_like(emit, flat, emit.tensor((pairs,), "int64"), memory_format=CONTIGUOUS)
        with emit.around("divide_", (flat, 1, "trunc"), (flat,)), emit.around("div_", (flat, 1, "trunc"), (flat,)):
            emit.op("div_", (flat, number(emit, "int64"), "trunc"), (flat,))
        arange(emit, pairs)

    def _counted(self, index: Tensor, step: int) -> Tensor:
        """Indices along one dimension as places in memory, negative ones brought in."""
        emit, counted = self._tape.emit, index
        for name, by in (("remainder", self._vectors), ("mul", step)):
            result = emit.tensor(index.shape, "int64")
            with emit.around(name, (counted, by), (result,)):
                emit.op(name, (counted, number(emit, "int64")), (result,))
            counted = result
        emit.op("to", (counted, None, None, emit.device, None, False, False, None), (counted,))
        return counted
