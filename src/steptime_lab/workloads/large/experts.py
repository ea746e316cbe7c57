"""Experts divided over ranks: tokens go to the ranks of the experts that a router chose for them, and come back.

`dropless` sends every token, however many an expert gets, which the host has to know; with `capacity` every expert takes the
same number, which is known before. The rest of the model is the same on every rank, its gradients by DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from steptime_lab.workloads.large.decoder import DividedDecoder, Shape, loss_of
from steptime_lab.workloads.large.settings import Batch, autocast, mesh_of, optimizer_of, prepared


class _Sent(torch.autograd.Function):
    """Rows to ranks, so many to each; gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: list[int], to_come: list[int], group: Any) -> torch.Tensor:
        ctx.back = to_come, counts, group
        return _sent(rows, counts, to_come, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _sent(gradients[0].contiguous(), *ctx.back), None, None, None


def _sent(rows: torch.Tensor, counts: list[int], to_come: list[int], group: Any) -> torch.Tensor:
    out = rows.new_empty(sum(to_come), rows.shape[1])
    dist.all_to_all_single(out, rows, to_come, counts, group=group)
    return out


_exchanged: Any = _Sent.apply


class DividedExperts(nn.Module):
    """The experts of this rank as two batched matrices, and the router of all."""

    def __init__(self, config: Mapping[str, Any], group: Any, ranks: int) -> None:
        super().__init__()
        shape = Shape.of(config)
        self.ranks, self.group, self.top, self.own = ranks, group, shape.top, shape.experts // ranks
        self.capacity, self.grouped = config.get("capacity", 0.0), config.get("grouped", False)
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.up = nn.Parameter(torch.randn(self.own, shape.width, shape.inner) / 50)
        self.down = nn.Parameter(torch.randn(self.own, shape.inner, shape.width) / 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(self.top)
        order = chosen.flatten().argsort(stable=True)  # (token, choice) by expert
        sent = rows[order // self.top]
        back = self._even(sent) if self.capacity else self._dropless(sent, chosen)
        weighted = back * weights.flatten()[order, None].to(back.dtype)
        return torch.zeros_like(rows).index_add(0, order // self.top, weighted).view_as(x)

    def _even(self, rows: torch.Tensor) -> Any:
        """Equal parts of the rows to every expert, as a router does that was trained to balance them; none is dropped."""
        share = [len(rows) // self.ranks] * self.ranks
        here = _exchanged(rows, share, share, self.group)
        tokens = here.unflatten(0, (self.ranks, self.own, -1)).transpose(0, 1).flatten(1, 2)
        spare = int(tokens.shape[1] * (self.capacity - 1.0))
        inner: Any = functional.relu(functional.pad(tokens, (0, 0, 0, spare)).bmm(self.up)).square()
        out: Any = inner.bmm(self.down)[:, : tokens.shape[1]]
        out = out.unflatten(1, (self.ranks, -1)).transpose(0, 1).flatten(0, 2)
        return _exchanged(out, share, share, self.group)

    def _dropless(self, rows: torch.Tensor, chosen: torch.Tensor) -> Any:
        """Every row to its expert; ranks tell each other how many come."""
        counts = torch.bincount(chosen.flatten(), minlength=self.ranks * self.own)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        by_rank = torch.stack((counts.view(self.ranks, -1).sum(1), coming.view(self.ranks, -1).sum(1))).tolist()
        here = _exchanged(rows, by_rank[0], by_rank[1], self.group)
        own = coming.view(self.ranks, self.own)
        expert = (
            torch.arange(self.own, device=rows.device)
            .repeat(self.ranks)
            .repeat_interleave(own.flatten(), output_size=len(here))
        )
        order = expert.argsort(stable=True)
        out = torch.empty_like(here).index_copy(0, order, self._by_expert(here[order], own.sum(0)))
        return _exchanged(out, by_rank[1], by_rank[0], self.group)

    def _by_expert(self, rows: Any, counts: torch.Tensor) -> torch.Tensor:
        if self.grouped:
            ends = counts.cumsum(0).to(torch.int32)
            inner = functional.relu(torch._grouped_mm(rows, self.up, offs=ends)).square()
            return torch._grouped_mm(inner, self.down, offs=ends)
        parts = rows.split(counts.tolist())
        each = (functional.relu(part @ up).square() @ down for part, up, down in zip(parts, self.up, self.down, strict=True))
        return torch.cat(list(each))


def step_of(config: Mapping[str, Any], batch: Batch, device: torch.device) -> Callable[[], None]:
    """The training step of this rank, whose experts are no other rank's."""
    shape, ranks = Shape.of(config), batch.ranks
    group = mesh_of(device.type, expert=ranks).get_group("expert")
    model = prepared(config, lambda: DividedDecoder(shape, mlp=lambda: DividedExperts(config, group, ranks)), device)
    own = [name for name, _ in model.named_parameters() if name.endswith(("mlp.up", "mlp.down"))]
    ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, own)
    network = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = optimizer_of(config, model)
    words, labels = batch.tokens(shape, batch.samples, device)

    def step() -> None:
        optimizer.zero_grad()
        with autocast(config, device):
            loss_of(network(words), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
