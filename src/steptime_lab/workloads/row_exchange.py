"""`RowExchange`: sums of the rows that ranks hold of the same tables, forward and backward, each beside the bottom MLP.

Every rank looks its share of the rows up for the samples of all ranks; a reduce_scatter adds these partial sums and gives every
rank those of its own samples, and an all_gather brings their gradients to all ranks, as TorchRec does for row-wise tables.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from steptime_lab.workloads.exchange import decoded, encoded


class RowExchange:
    """The exchange of one step after another."""

    def __init__(self, ranks: int, local_batch: int, dtype: torch.dtype = torch.float32) -> None:
        self.ranks, self.local_batch, self.dtype = ranks, local_batch, dtype
        self.work: Any = None  # forward: what is sent of a batch ahead is on its way while gradients of this one come back
        self.back: Any = None
        self.gradient: torch.Tensor | None = None

    def start(self, partial: torch.Tensor) -> torch.Tensor:
        """Starts to add `partial` [global batch, columns]; what is returned is only for `finish`."""
        summed: torch.Tensor = _Start.apply(partial, self)  # type: ignore[no-untyped-call]
        return summed

    def finish(self, summed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The sums of this rank's samples, [local batch, columns]."""
        return (_Finish.apply(summed, self),)  # type: ignore[no-untyped-call]


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        sent = encoded(partial.contiguous(), exchange.dtype)
        summed = sent.new_empty(exchange.local_batch, partial.shape[1])
        exchange.work = dist.reduce_scatter_tensor(summed, sent, async_op=True)
        return summed

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        exchange: RowExchange = ctx.exchange
        exchange.back.wait()
        gradient, exchange.gradient, exchange.back = exchange.gradient, None, None
        return None if gradient is None else decoded(gradient), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, summed: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.work.wait()
        exchange.work = None
        return decoded(summed.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange: RowExchange = ctx.exchange
        own = encoded(gradients[0].contiguous(), exchange.dtype)
        exchange.gradient = own.new_empty(exchange.ranks * exchange.local_batch, own.shape[1])
        exchange.back = dist.all_gather_into_tensor(exchange.gradient, own, async_op=True)
        # The engine wants a gradient of this shape; the real one is on its way, and `_Start` takes it up.
        return own, None
