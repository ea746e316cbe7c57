"""Pipelines by `torch.distributed.pipelining`, each stage on a rank, with copies of the pipeline beside one another or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from steptime_lab.workloads.large.decoder import DividedDecoder, Shape, loss_of
from steptime_lab.workloads.large.settings import Batch, mesh_of, optimizer_of, prepared

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def step_of(config: Mapping[str, Any], batch: Batch, device: torch.device) -> Callable[[], None]:
    """The training step of this rank: micro-batches through its stage, or its stages where the schedule interleaves."""
    shape, stages = Shape.of(config), config["pipeline"]
    mesh = mesh_of(device.type, data=batch.ranks // stages, pipeline=stages)
    here, group = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline")
    chunks = config.get("chunks", 1)
    parts = [_stage(config, index, stages * chunks, device, mesh) for index in range(here, stages * chunks, stages)]
    made: list[Any] = [
        PipelineStage(part, here + at * stages, stages * chunks, device, group=group) for at, part in enumerate(parts)
    ]
    micro = config["micro_batches"]
    schedule: Any = (
        ScheduleInterleaved1F1B(made, micro, loss_fn=loss_of)
        if chunks > 1
        else _SINGLE[config["schedule"]](made[0], micro, loss_fn=loss_of)
    )
    whole = nn.ModuleList(parts)
    optimizer = optimizer_of(config, whole)
    average = averaged(whole, mesh.get_group("data")) if config.get("copies") == "averaged" else lambda: None
    words, labels = batch.tokens(shape, batch.samples * stages, device)
    first, last = here == 0, here == stages - 1

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*((words,) if first else ()), **({"target": labels, "losses": []} if last else {}))
        average()
        optimizer.step()

    return step


def _stage(config: Mapping[str, Any], index: int, count: int, device: torch.device, mesh: Any) -> Any:
    """Layers evenly over stages, or as many as `sizes` says; its copies may be shards (FSDP2)."""
    shape = Shape.of(config)
    sizes = config.get("sizes") or [shape.layers // count] * count
    first = sum(sizes[:index])
    module: Any = prepared(config, lambda: DividedDecoder(shape, first=first, last=first + sizes[index]), device)
    if mesh.size() > mesh["pipeline"].size() and config["copies"] == "fsdp":
        for part in (*module.layers, module):
            fully_shard(part, mesh=mesh["data"], reshard_after_forward=False)
    return module


def averaged(module: nn.Module, group: Any) -> Callable[[], None]:
    """The mean of gradients over the copies of a stage, in one piece, once all micro-batches are through."""
    weights = list(module.parameters())

    def call() -> None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        whole: Any = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(whole, group=group)
        whole /= dist.get_world_size(group)
        parts = whole.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients, strict=True)])

    return call
