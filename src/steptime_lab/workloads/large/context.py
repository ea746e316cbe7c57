"""Context parallelism: the tokens of a sample divided over ranks, which exchange what attention needs of the others.

`ulysses` sends heads round so that every rank has all tokens of some of them; `ring` passes keys and values on from rank to
rank and sums up softmax as they come, in plain tensor operations; `torch` is `context_parallel` as PyTorch has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

from steptime_lab.workloads.large.decoder import Attend, DividedDecoder, Shape, attend, loss_of
from steptime_lab.workloads.large.settings import Batch, autocast, mesh_of, optimizer_of, prepared


class _Exchange(torch.autograd.Function):
    """Equal parts of the first dimension to every rank of a group, and the same of gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        sent = gradients[0].contiguous()
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent, group=ctx.group)
        return out, None


_exchanged: Any = _Exchange.apply


def by_heads(group: Any, ranks: int) -> Attend:
    """All tokens of some heads on every rank, then all heads of its own tokens again."""

    def gathered(x: Any) -> Any:
        """[batch, heads, own tokens, features] to [batch, own heads, tokens, features]."""
        parts = x.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
        return _exchanged(parts, group).movedim(0, 2).flatten(2, 3)

    def divided(x: Any) -> Any:
        parts = x.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous()
        return _exchanged(parts, group).movedim(0, 1).flatten(1, 2)

    return lambda query, key, value: divided(attend(gathered(query), gathered(key), gathered(value)))


class _Passed(torch.autograd.Function):
    """Keys and values on to the next rank of a ring, from the one before; gradients the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, before: int, after: int) -> torch.Tensor:
        ctx.ring = group, before, after
        return _passed(x, group, before, after)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group, before, after = ctx.ring
        return _passed(gradients[0].contiguous(), group, after, before), None, None, None


_on: Any = _Passed.apply


def _passed(x: torch.Tensor, group: Any, source: int, target: int) -> torch.Tensor:
    out = torch.empty_like(x)
    calls = [dist.P2POp(dist.isend, x, target, group), dist.P2POp(dist.irecv, out, source, group)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return out


def by_ring(group: Any, ranks: int, rank: int) -> Attend:
    """Every part of the keys in turn; nobody leaves out those that its tokens do not see, so that all take as long."""
    before, after = (dist.get_global_rank(group, (rank + step) % ranks) for step in (-1, 1))

    def ring(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tokens, scale = query.shape[2], query.shape[3] ** -0.5
        position = torch.arange(tokens, device=query.device)
        pair = torch.stack((key, value))
        total = highest = mixed = None
        for turn in range(ranks):
            source = (rank - turn) % ranks
            seen = rank * tokens + position[:, None] >= source * tokens + position
            scores = (query @ pair[0].transpose(-1, -2) * scale).float().masked_fill(~seen, -1e4)
            top = scores.amax(-1, keepdim=True) if highest is None else torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights = (scores - top).exp()
            part, share = weights.to(value.dtype) @ pair[1], weights.sum(-1, keepdim=True)
            if highest is None or mixed is None or total is None:
                mixed, total = part.float(), share
            else:
                kept = (highest - top).exp()
                mixed, total = mixed * kept + part, total * kept + share
            highest = top
            if turn < ranks - 1:
                pair = _on(pair, group, before, after)
        assert mixed is not None and total is not None
        result: torch.Tensor = (mixed / total).to(query.dtype)
        return result

    return ring


def step_of(config: Mapping[str, Any], batch: Batch, device: torch.device) -> Callable[[], None]:
    """The training step of this rank: its part of the tokens of samples that `context` ranks share; gradients by DDP."""
    shape, ranks = Shape.of(config), config["context"]
    mesh = mesh_of(device.type, data=batch.ranks // ranks, context=ranks)
    group, here = mesh.get_group("context"), mesh.get_local_rank("context")
    how = {"ulysses": lambda: by_heads(group, ranks), "ring": lambda: by_ring(group, ranks, here)}.get(
        config["exchange"], lambda: attend
    )()
    own = Shape.of({**config, "tokens": shape.tokens // (1 if config["exchange"] == "torch" else ranks)})
    model = prepared(config, lambda: DividedDecoder(own, how), device)
    network = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = optimizer_of(config, model)
    words, labels = batch.tokens(own, batch.samples * ranks, device)

    def shared() -> Any:
        if config["exchange"] != "torch":
            return nullcontext()
        parts = [words, labels, model.angles]
        return context_parallel(mesh["context"], buffers=parts, buffer_seq_dims=[1, 1, 0])

    def step() -> None:
        optimizer.zero_grad()
        with shared(), autocast(config, device):
            loss_of(network(words), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
