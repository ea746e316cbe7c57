"""How ranks of a sharded DLRM exchange looked-up rows, as PyTorch records it: beside the bottom MLP, both ways.

Tables on single ranks, whole or in slices of columns, send their sums to the ranks of the samples by an all_to_all. Tables
whose rows are spread over all ranks send partial sums by a reduce_scatter, and gradients come back by an all_gather, as TorchRec
does it (torchrec.distributed.comm_ops: `ReduceScatter_Req`, `ReduceScatter_Wait`).
"""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.emit.autograd import Gradients, Tape
from steptime._build.emit.layers import contiguous, empty, given
from steptime._build.emit.ops import is_contiguous
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
        with emit.around("_Start", (pooled,), sequence=emit.sequence):
            received = _new_empty(self._tape, pooled, (sum(self._received),))
            flat = emit.reshaped(pooled, (pooled.numel,), (-1,))
            self._number = emit.all_to_all(received, flat, self._received, self._sent)

        def backward(_: Gradients) -> Gradients:
            emit.wait(self._number)
            return (self._gradient,)

        self._tape.record("_StartBackward", (pooled,), (received,), backward)
        return received

    def finish(self, received: Tensor) -> tuple[Tensor, ...]:
        """Waits; every rank's columns of this rank's samples."""
        emit = self._tape.emit
        with emit.around("_Finish", (received,), sequence=emit.sequence):
            emit.wait(self._number)
            blocks = self._blocks(emit.detached(received))

        def backward(gradients: Gradients) -> Gradients:
            flat = _new_empty(self._tape, given(gradients), (sum(self._received),))
            for block, gradient in zip(self._blocks(flat), gradients, strict=True):
                emit.op("aten::copy_", (block, gradient, False), (block,))
            self._gradient = _new_empty(self._tape, flat, self._shape)
            taken = emit.reshaped(self._gradient, (self._gradient.numel,), (-1,))
            self._number = emit.all_to_all(taken, flat, self._sent, self._received)
            return (flat,)

        self._tape.record("_FinishBackward", (received,), blocks, backward)
        return blocks

    def _blocks(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of what all ranks send, one per rank."""
        emit, starts = self._tape.emit, [0]
        for size in self._received:
            starts.append(starts[-1] + size)
        parts = tuple(
            emit.view(flat, (size,), offset=start) for size, start in zip(self._received, starts, strict=False)
        )
        with emit.around("aten::split_with_sizes", (flat, tuple(self._received), 0), (parts,)):
            for part in parts:
                emit.op("aten::as_strided", (flat, part.shape, part.strides, part.offset), (part,))
        pairs = zip(parts, self._widths, strict=True)
        return tuple(emit.reshaped(part, (self._local_batch, width)) for part, width in pairs)


class RowExchangeOps:
    """One step's exchange of partial sums: every rank has looked up its rows of all tables for all samples."""

    def __init__(self, tape: Tape, local_batch: int) -> None:
        self._tape, self._local_batch, self._number = tape, local_batch, 0
        self._gradient: Tensor | None = None

    def start(self, pooled: Tensor) -> Tensor:
        """Starts to add the partial sums of all ranks, [global batch, columns]."""
        emit = self._tape.emit
        with emit.around("ReduceScatter_Req", (pooled,), sequence=emit.sequence):
            summed = _new_empty(self._tape, pooled, (self._local_batch, pooled.shape[1]))
            self._number = emit.reduce_scatter(summed, pooled)

        def backward(_: Gradients) -> Gradients:
            emit.wait(self._number)
            return (self._gradient,)

        self._tape.record("ReduceScatter_ReqBackward", (pooled,), (summed,), backward)
        return summed

    def finish(self, summed: Tensor) -> Tensor:
        """Waits; the sums of this rank's samples."""
        emit, columns = self._tape.emit, summed.shape[1]
        with emit.around("ReduceScatter_Wait", (summed,), sequence=emit.sequence):
            emit.wait(self._number)
            awaited = emit.detached(summed)

        def backward(gradients: Gradients) -> Gradients:
            own = given(gradients)
            if not is_contiguous(own):
                own = contiguous(emit, own)
            self._gradient = _new_empty(self._tape, own, (self._local_batch * emit.world_size, columns))
            self._number = emit.all_gather(self._gradient, own)
            return (own,)

        self._tape.record("ReduceScatter_WaitBackward", (summed,), (awaited,), backward)
        return awaited


def _new_empty(tape: Tape, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    emit = tape.emit
    result = emit.tensor(shape, like.dtype)
    with emit.around("aten::new_empty", (like, shape, None, None, None, False), (result,)):
        empty(emit, shape, like.dtype, pinned=False, made=result)
    return result
