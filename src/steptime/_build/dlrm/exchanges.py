"""How ranks of a DLRM exchange what they looked up, forward and backward, each beside the bottom MLP.

Tables on single ranks, whole or in slices of columns, send their sums to the ranks of the samples by an all_to_all. Tables
whose rows are spread over all ranks send partial sums by a reduce_scatter, and gradients come back by an all_gather, as in
TorchRec (torchrec.distributed.comm_ops: `ReduceScatter_Req`, `ReduceScatter_Wait`). What is sent in 16 bits is clamped to their
range and cast, and cast back where it arrives, as TorchRec's quantised collectives do (FBGEMM: quantize_utils.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.writer import is_contiguous
from steptime._program.program import Tensor

FULL = "float32"
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}


def encoded(emit: Emitter, x: Tensor, dtype: str) -> Tensor:
    """What is sent of a tensor."""
    if dtype == FULL:
        return x
    return emit.cast(emit.new("clamp", (x, -_LARGEST[dtype], _LARGEST[dtype])), dtype)


def decoded(emit: Emitter, x: Tensor) -> Tensor:
    """What becomes of it where it arrives."""
    return x if x.dtype == FULL else emit.cast(x, FULL)


class ColumnExchangeOps:
    """One step's exchange of columns: `widths` are the columns (summed dims) that each rank looks up."""

    def __init__(self, tape: Tape, widths: Sequence[int], local_batch: int, dtype: str = FULL) -> None:
        self._tape, self._widths, self._local_batch, self._dtype = tape, tuple(widths), local_batch, dtype
        columns = self._widths[tape.emit.rank]
        self._sent = [local_batch * columns] * len(self._widths)
        self._received = [local_batch * width for width in self._widths]
        self._shape = (local_batch * len(self._widths), columns)
        self._number = 0
        self._gradient: Tensor | None = None

    def start(self, pooled: Tensor) -> Tensor:
        """Starts to send the lookups of this rank's tables for all samples."""
        emit = self._tape.emit
        with emit.write("_Start", (pooled,), sequence=emit.sequence):
            sent = encoded(emit, pooled, self._dtype)
            received = emit.new_empty(sent, (sum(self._received),))
            flat = emit.viewed(sent, (sent.numel,), (-1,))
            self._number = emit.all_to_all(received, flat, self._received, self._sent)

        def backward(_: Tensor) -> Tensor | None:
            emit.wait(self._number)
            assert self._gradient is not None
            return decoded(emit, self._gradient)

        return self._tape.node("_StartBackward", (pooled,), received, backward)

    def finish(self, received: Tensor) -> tuple[Tensor, ...]:
        """Waits; every rank's columns of this rank's samples."""
        emit = self._tape.emit
        with emit.write("_Finish", (received,), sequence=emit.sequence):
            emit.wait(self._number)
            blocks = self._blocks(decoded(emit, emit.detached(received)))

        def backward(gradients: Gradients) -> Gradients:
            assert gradients[0] is not None
            flat = emit.new_empty(gradients[0], (sum(self._received),))
            for block, gradient in zip(self._blocks(flat), gradients, strict=True):
                emit.op("copy_", (block, gradient, False), (block,))
            sent = encoded(emit, flat, self._dtype)
            self._gradient = emit.new_empty(sent, self._shape)
            received = emit.viewed(self._gradient, (self._gradient.numel,), (-1,))
            self._number = emit.all_to_all(received, sent, self._sent, self._received)
            return (sent,)

        self._tape.record("_FinishBackward", (received,), blocks, backward)
        return blocks

    def _blocks(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of what all ranks send, one per rank."""
        emit, starts = self._tape.emit, accumulate(self._received, initial=0)
        shares = tuple(emit.view(flat, (size,), offset=at) for size, at in zip(self._received, starts, strict=False))
        with emit.op("split_with_sizes", (flat, tuple(self._received), 0), (shares,)):
            for share in shares:
                emit.op("as_strided", (flat, share.shape, share.strides, share.offset), (share,))
        pairs = zip(shares, self._widths, strict=True)
        return tuple(emit.viewed(share, (self._local_batch, width)) for share, width in pairs)


class RowExchangeOps:
    """One step's exchange of partial sums: every rank has looked up its rows of all tables for all samples."""

    def __init__(self, tape: Tape, local_batch: int, dtype: str = FULL) -> None:
        self._tape, self._local_batch, self._dtype, self._number = tape, local_batch, dtype, 0
        self._gradient: Tensor | None = None

    def start(self, pooled: Tensor) -> Tensor:
        """Starts to add the partial sums of all ranks, [global batch, columns]."""
        emit = self._tape.emit
        with emit.write("_Start", (pooled,), sequence=emit.sequence):
            sent = encoded(emit, pooled, self._dtype)
            summed = emit.new_empty(sent, (self._local_batch, pooled.shape[1]))
            self._number = emit.reduce_scatter(summed, sent)

        def backward(_: Tensor) -> Tensor | None:
            emit.wait(self._number)
            assert self._gradient is not None
            return decoded(emit, self._gradient)

        return self._tape.node("_StartBackward", (pooled,), summed, backward)

    def finish(self, summed: Tensor) -> tuple[Tensor, ...]:
        """Waits; the sums of this rank's samples."""
        emit, columns = self._tape.emit, summed.shape[1]
        with emit.write("_Finish", (summed,), sequence=emit.sequence):
            emit.wait(self._number)
            awaited = decoded(emit, emit.detached(summed))

        def backward(gradient: Tensor) -> Tensor:
            if not is_contiguous(gradient):
                gradient = emit.contiguous(gradient)
            sent = encoded(emit, gradient, self._dtype)
            self._gradient = emit.new_empty(sent, (self._local_batch * emit.world_size, columns))
            self._number = emit.all_gather(self._gradient, sent)
            return sent

        return (self._tape.node("_FinishBackward", (summed,), awaited, backward),)
