"""What the ranks of a sharded DLRM exchange, forward and backward, each beside the bottom MLP: columns, or sums of rows.

A rank looks its own tables up for the samples of all ranks; an all_to_all gives every rank its own samples' rows of all tables.
Of tables by rows, every rank looks up its share for the samples of all ranks; a reduce_scatter adds these partial sums, and an
all_gather brings their gradients to all ranks, as TorchRec does. Forward, the collective starts when the lookups are queued and
is waited for after the bottom MLP; backward, it starts when the interaction's gradient is there and is waited for after the
bottom MLP's backward, because autograd runs nodes made later first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from steptime._build.dlrm.model import EXCHANGE_DTYPES

DTYPES = {name: getattr(torch, dtype) for name, dtype in EXCHANGE_DTYPES.items()}


def encoded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is sent of a tensor: in 16 bits clamped to their range, as by TorchRec's quantised collectives."""
    if dtype == torch.float32:
        return x
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def decoded(x: torch.Tensor) -> torch.Tensor:
    """What becomes of it where it arrives."""
    return x if x.dtype == torch.float32 else x.float()


class Exchange(ABC):
    """The exchange of one step after another."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.work: Any = None  # forward: what is sent of a batch ahead is on its way while gradients of this one come back
        self.back: Any = None
        self.gradient: torch.Tensor | None = None

    def start(self, pooled: torch.Tensor) -> torch.Tensor:
        """Starts to send `pooled` [global batch, local columns]; what is returned is only for `finish`."""
        received: torch.Tensor = _Start.apply(pooled, self)  # type: ignore[no-untyped-call]
        return received

    def finish(self, received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Columns of this rank's samples, in one or more blocks, [local batch, columns] each."""
        blocks: tuple[torch.Tensor, ...] = _Finish.apply(received, self)  # type: ignore[no-untyped-call]
        return blocks

    @abstractmethod
    def send(self, pooled: torch.Tensor) -> torch.Tensor:
        """Starts the collective forward; where its result will be."""

    @abstractmethod
    def blocks(self, received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What was received, as `finish` gives it."""

    @abstractmethod
    def send_back(self, gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Starts the collective backward; what it sends."""


class ColumnExchange(Exchange):
    """`widths` are the columns (summed table dims) that each rank looks up; a block is what one rank sent."""

    def __init__(self, widths: Sequence[int], rank: int, local_batch: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self._widths, self._local_batch = tuple(widths), local_batch
        # Flat elements, by other rank: what it is sent of this rank's columns, and what comes of its columns.
        self._sent = [local_batch * self._widths[rank]] * len(self._widths)
        self._received = [local_batch * width for width in self._widths]
        self._shape = (local_batch * len(self._widths), self._widths[rank])  # of what this rank looks up

    def send(self, pooled: torch.Tensor) -> torch.Tensor:
        """An all_to_all of this rank's columns."""
        sent = encoded(pooled.contiguous(), self.dtype)
        received = sent.new_empty(sum(self._received))
        self.work = dist.all_to_all_single(received, sent.view(-1), self._received, self._sent, async_op=True)
        return received

    def blocks(self, received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of what all ranks sent, one per rank."""
        parts = zip(torch.split(received, self._received), self._widths, strict=True)
        return tuple(part.view(self._local_batch, width) for part, width in parts)

    def send_back(self, gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """An all_to_all of gradients, put together first."""
        flat = gradients[0].new_empty(sum(self._received))
        for place, gradient in zip(self.blocks(flat), gradients, strict=True):
            place.copy_(gradient)
        sent = encoded(flat, self.dtype)
        self.gradient = sent.new_empty(self._shape)
        self.back = dist.all_to_all_single(self.gradient.view(-1), sent, self._sent, self._received, async_op=True)
        return sent


class RowExchange(Exchange):
    """Sums of the rows that ranks have of the same tables; one block."""

    def __init__(self, ranks: int, local_batch: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self._ranks, self._local_batch = ranks, local_batch

    def send(self, pooled: torch.Tensor) -> torch.Tensor:
        """A reduce_scatter of partial sums."""
        sent = encoded(pooled.contiguous(), self.dtype)
        summed = sent.new_empty(self._local_batch, pooled.shape[1])
        self.work = dist.reduce_scatter_tensor(summed, sent, async_op=True)
        return summed

    def blocks(self, received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The sums of this rank's samples."""
        return (received,)

    def send_back(self, gradients: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """An all_gather of gradients."""
        own = encoded(gradients[0].contiguous(), self.dtype)
        self.gradient = own.new_empty(self._ranks * self._local_batch, own.shape[1])
        self.back = dist.all_gather_into_tensor(self.gradient, own, async_op=True)
        return own


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.send(pooled)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        exchange: Exchange = ctx.exchange
        exchange.back.wait()
        gradient, exchange.gradient, exchange.back = exchange.gradient, None, None
        return None if gradient is None else decoded(gradient), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        exchange.work.wait()
        exchange.work = None
        return exchange.blocks(decoded(received.detach()))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The engine wants a gradient of this shape; the real one is on its way, and `_Start` takes it up.
        return ctx.exchange.send_back(gradients), None
