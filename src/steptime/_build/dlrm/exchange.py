"""The exchange of looked-up rows between ranks of a sharded DLRM, as PyTorch records it: beside the bottom MLP, both ways."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.emit.autograd import Gradients, Tape
from steptime._build.emit.layers import empty, given
from steptime._program.program import Tensor


class Exchange:
    """One step's exchange: `widths` are the columns (summed dims) that each rank looks up."""

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
            received = self._new_empty(pooled, (sum(self._received),))
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
            flat = self._new_empty(given(gradients), (sum(self._received),))
            for place, gradient in zip(self._blocks(flat), gradients, strict=True):
                emit.op("aten::copy_", (place, gradient, False), (place,))
            self._gradient = self._new_empty(flat, self._shape)
            taken = emit.reshaped(self._gradient, (self._gradient.numel,), (-1,))
            self._number = emit.all_to_all(taken, flat, self._sent, self._received)
            return (flat,)

        self._tape.record("_FinishBackward", (received,), blocks, backward)
        return blocks

    def _new_empty(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        emit = self._tape.emit
        made = emit.tensor(shape, like.dtype)
        with emit.around("aten::new_empty", (like, shape, None, None, None, False), (made,)):
            empty(emit, shape, like.dtype, pinned=False, made=made)
        return made

    def _blocks(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of what all ranks send, one per rank."""
        emit, starts = self._tape.emit, [0]
        for size in self._received:
            starts.append(starts[-1] + size)
        places = list(zip(self._received, starts, strict=False))
        parts = tuple(emit.view(flat, (size,), offset=start) for size, start in places)
        with emit.around("aten::split_with_sizes", (flat, tuple(self._received), 0), (parts,)):
            for part in parts:
                emit.op("aten::as_strided", (flat, part.shape, part.strides, part.offset), (part,))
        pairs = zip(parts, self._widths, strict=True)
        return tuple(emit.reshaped(part, (self._local_batch, width)) for part, width in pairs)
