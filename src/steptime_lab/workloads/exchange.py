"""`Exchange`: the all_to_all of a sharded DLRM, forward and backward, each beside the bottom MLP.

A rank looks its own tables up for the samples of all ranks; the exchange gives every rank its own samples' rows of all tables.
Forward, the collective starts when the lookups are queued and is waited for after the bottom MLP; backward, it starts when the
interaction's gradient is there and is waited for after the bottom MLP's backward, because autograd runs nodes made later first.
"""

from __future__ import annotations

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


class Exchange:
    """The exchange of one step after another: `widths` are the columns (summed table dims) that each rank looks up."""

    def __init__(self, widths: Sequence[int], rank: int, local_batch: int, dtype: torch.dtype = torch.float32) -> None:
        self.widths, self.dtype = tuple(widths), dtype
        self.local_batch = local_batch
        # Flat elements, by other rank: what it is sent of this rank's columns, and what comes of its columns.
        self.sent = [local_batch * self.widths[rank]] * len(self.widths)
        self.received = [local_batch * width for width in self.widths]
        self.shape = (local_batch * len(self.widths), self.widths[rank])  # of what this rank looks up
        self.work: Any = None  # forward: what is sent of a batch ahead is on its way while gradients of this one come back
        self.back: Any = None
        self.gradient: torch.Tensor | None = None

    def start(self, pooled: torch.Tensor) -> torch.Tensor:
        """Starts to send `pooled` [global batch, local columns]; what is returned is only for `finish`."""
        received: torch.Tensor = _Start.apply(pooled, self)  # type: ignore[no-untyped-call]
        return received

    def finish(self, received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every rank's columns of this rank's samples: [local batch, columns of rank 0], [local batch, ...], ..."""
        blocks: tuple[torch.Tensor, ...] = _Finish.apply(received, self)  # type: ignore[no-untyped-call]
        return blocks

    def blocks(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of what all ranks sent, one per rank."""
        parts = zip(torch.split(flat, self.received), self.widths, strict=True)
        return tuple(part.view(self.local_batch, width) for part, width in parts)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pooled: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        sent = encoded(pooled.contiguous(), exchange.dtype)
        received = sent.new_empty(sum(exchange.received))
        exchange.work = dist.all_to_all_single(received, sent.view(-1), exchange.received, exchange.sent, async_op=True)
        return received

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
        exchange: Exchange = ctx.exchange
        flat = gradients[0].new_empty(sum(exchange.received))
        for place, gradient in zip(exchange.blocks(flat), gradients, strict=True):
            place.copy_(gradient)
        sent = encoded(flat, exchange.dtype)
        exchange.gradient = sent.new_empty(exchange.shape)
        exchange.back = dist.all_to_all_single(
            exchange.gradient.view(-1), sent, exchange.sent, exchange.received, async_op=True
        )
        # The engine wants a gradient of this shape; the real one is on its way, and `_Start` takes it up.
        return sent, None
