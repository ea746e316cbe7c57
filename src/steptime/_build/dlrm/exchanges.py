"""How ranks of a DLRM exchange what they looked up, forward and backward, each beside the bottom MLP.

Tables on single ranks, whole or in slices of columns, send their sums to the ranks of the samples by an all_to_all. Tables
whose rows are spread over all ranks send partial sums by a reduce_scatter, and gradients come back by an all_gather, as in
TorchRec (torchrec.distributed.comm_ops: `ReduceScatter_Req`, `ReduceScatter_Wait`). Where only the ranks of a node share a
table's rows, they do so among themselves, and an all_to_all across nodes follows. What is sent in 16 bits is clamped to their
range and cast, and cast back where it arrives, as TorchRec's quantised collectives do (FBGEMM: quantize_utils.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from steptime._build.emit.emitter import Emitter
from steptime._build.emit.tape import Gradients, Tape
from steptime._build.emit.writer import GROUP, is_contiguous
from steptime._program.program import Tensor

NODE, ACROSS = "node", "across"
"""Groups of ranks: those of a node, and those at one place in every node."""

FULL = "float32"
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}


def encoded(emit: Emitter, x: Tensor, dtype: str) -> Tensor:
    """What is sent of a tensor."""
    if dtype == x.dtype:
        return x
    return emit.cast(emit.new("clamp", (x, -_LARGEST[dtype], _LARGEST[dtype])), dtype)


def decoded(emit: Emitter, x: Tensor, dtype: str) -> Tensor:
    """What becomes of it where it arrives."""
    return x if x.dtype == dtype else emit.cast(x, dtype)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes whose ranks share the rows of tables: how many ranks each has, and the columns of its tables."""

    per_node: int
    widths: tuple[int, ...]

    def groups(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The ranks of a rank's node, and those at its place in every node."""
        node, place = divmod(rank, self.per_node)
        first, ranks = node * self.per_node, self.per_node * len(self.widths)
        return {NODE: tuple(range(first, first + self.per_node)), ACROSS: tuple(range(place, ranks, self.per_node))}


class _Exchange:
    """What both exchanges are made of: a collective under way, and the gradient that one brings back."""

    def __init__(self, tape: Tape, dtype: str, group: str) -> None:
        self._tape, self._dtype, self._group = tape, dtype, group
        self._number, self._full = 0, FULL
        self._gradient: Tensor | None = None

    def _awaited(self, _: Tensor) -> Tensor | None:
        """The gradient of what was sent, in the type that it had."""
        self._tape.emit.wait(self._number, self._group)
        assert self._gradient is not None
        return decoded(self._tape.emit, self._gradient, self._full)


class ColumnExchangeOps(_Exchange):
    """One step's exchange of columns: `widths` are the columns (summed dims) that each rank of a group looks up."""

    def __init__(self, tape: Tape, widths: Sequence[int], local_batch: int, dtype: str = FULL, node: int | None = None) -> None:
        """`node`: among the ranks at one place in every node, of which this is the one of that node."""
        super().__init__(tape, dtype, GROUP if node is None else ACROSS)
        self._widths, self._local_batch = tuple(widths), local_batch
        columns = self._widths[tape.emit.rank if node is None else node]
        self._sent = [local_batch * columns] * len(self._widths)
        self._received = [local_batch * width for width in self._widths]
        self._shape = (local_batch * len(self._widths), columns)

    def start(self, pooled: Tensor) -> Tensor:
        """Starts to send the lookups of this rank's tables for all samples."""
        emit = self._tape.emit
        with emit.write("_Start", (pooled,), sequence=emit.sequence):
            self._full = pooled.dtype
            sent = encoded(emit, pooled, self._dtype)
            received = emit.new_empty(sent, (sum(self._received),))
            flat = emit.viewed(sent, (sent.numel,), (-1,))
            self._number = emit.all_to_all(received, flat, self._received, self._sent, group=self._group)

        return self._tape.node("_StartBackward", (pooled,), received, self._awaited)

    def finish(self, received: Tensor) -> tuple[Tensor, ...]:
        """Waits; every rank's columns of this rank's samples."""
        emit = self._tape.emit
        with emit.write("_Finish", (received,), sequence=emit.sequence):
            emit.wait(self._number, self._group)
            blocks = self._blocks(decoded(emit, emit.detached(received), self._full))

        def backward(gradients: Gradients) -> Gradients:
            assert gradients[0] is not None
            flat = emit.new_empty(gradients[0], (sum(self._received),))
            for block, gradient in zip(self._blocks(flat), gradients, strict=True):
                emit.op("copy_", (block, gradient, False), (block,))
            sent = encoded(emit, flat, self._dtype)
            self._gradient = emit.new_empty(sent, self._shape)
            received = emit.viewed(self._gradient, (self._gradient.numel,), (-1,))
            self._number = emit.all_to_all(received, sent, self._sent, self._received, group=self._group)
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


class RowExchangeOps(_Exchange):
    """One step's exchange of partial sums: every rank of a group has looked up its rows of all tables for all samples."""

    def __init__(self, tape: Tape, kept: int, dtype: str = FULL, group: str = GROUP) -> None:
        """`kept`: samples whose sums are left on this rank."""
        super().__init__(tape, dtype, group)
        self._kept = kept

    def start(self, pooled: Tensor) -> Tensor:
        """Starts to add the partial sums of all ranks, [global batch, columns]."""
        emit = self._tape.emit
        with emit.write("_Start", (pooled,), sequence=emit.sequence):
            self._full = pooled.dtype
            sent = encoded(emit, pooled, self._dtype)
            summed = emit.new_empty(sent, (self._kept, pooled.shape[1]))
            self._number = emit.reduce_scatter(summed, sent, self._group)

        return self._tape.node("_StartBackward", (pooled,), summed, self._awaited)

    def finish(self, summed: Tensor) -> tuple[Tensor, ...]:
        """Waits; the sums of this rank's samples."""
        emit, columns = self._tape.emit, summed.shape[1]
        with emit.write("_Finish", (summed,), sequence=emit.sequence):
            emit.wait(self._number, self._group)
            awaited = decoded(emit, emit.detached(summed), self._full)

        def backward(gradient: Tensor) -> Tensor:
            if not is_contiguous(gradient):
                gradient = emit.contiguous(gradient)
            sent = encoded(emit, gradient, self._dtype)
            self._gradient = emit.new_empty(sent, (self._kept * emit.group_size(self._group), columns))
            self._number = emit.all_gather(self._gradient, sent, self._group)
            return sent

        return (self._tape.node("_FinishBackward", (summed,), awaited, backward),)


class NodeExchangeOps:
    """One step's exchange where the ranks of a node share rows: sums are added within the node, then sent across nodes.

    As in TorchRec (torchrec.distributed.sharding.twrw_sharding: `TwRwPooledEmbeddingDist`): the reduce_scatter is awaited at
    once, and leaves every rank the samples of all ranks at its place in their nodes, with which it then exchanges columns.
    """

    def __init__(self, tape: Tape, nodes: Nodes, samples: int, dtype: str = FULL) -> None:
        node, count = tape.emit.rank // nodes.per_node, len(nodes.widths)
        added = nodes.per_node > 1 and nodes.widths[node] > 0
        self._rows = RowExchangeOps(tape, count * samples, dtype, NODE) if added else None
        self._columns = ColumnExchangeOps(tape, nodes.widths, samples, dtype, node) if count > 1 else None

    def start(self, pooled: Tensor) -> Tensor:
        """Adds the partial sums of the node, and starts to send them to the ranks of the samples."""
        if self._rows is not None:
            (pooled,) = self._rows.finish(self._rows.start(pooled))
        return pooled if self._columns is None else self._columns.start(pooled)

    def finish(self, received: Tensor) -> tuple[Tensor, ...]:
        """Waits; every node's columns of this rank's samples."""
        return (received,) if self._columns is None else self._columns.finish(received)
