"""FSDP2 over a mesh of copies and shards (HSDP), and tensor with sequence parallelism by DTensor, alone or under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from steptime_lab.workloads.large.decoder import DividedDecoder, Shape, loss_of
from steptime_lab.workloads.large.settings import Batch, mesh_of, optimizer_of, prepared


def step_of(config: Mapping[str, Any], batch: Batch, device: torch.device) -> Callable[[], None]:
    """The training step of this rank: `copies` of the shards of the parts of a tensor."""
    shape, parts = Shape.of(config), config.get("tensor", 1)
    model = prepared(config, lambda: DividedDecoder(shape), device)
    if batch.ranks > 1:
        divide(model, config, batch.ranks, device)
    optimizer = optimizer_of(config, model)
    words, labels = batch.tokens(shape, batch.samples * parts, device)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(words), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def divide(model: Any, config: Mapping[str, Any], ranks: int, device: torch.device) -> None:
    """Tensors first, then shards of what a rank has left; under `bf16-mixed` parameters are cast as they are gathered."""
    copies, parts = config.get("copies", 1), config.get("tensor", 1)
    mesh = mesh_of(device.type, copies=copies, shards=ranks // copies // parts, tensor=parts)
    if parts > 1:
        divide_tensors(model, mesh["tensor"])
    if mesh.size() == parts:
        return
    mixed = config["precision"] == "bf16-mixed"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    over = mesh["copies", "shards"] if copies > 1 else mesh["shards"]
    for part in (*model.layers, model):
        fully_shard(part, mesh=over, mp_policy=policy, reshard_after_forward=config.get("reshard", True))


def divide_tensors(model: Any, mesh: Any) -> None:
    """Matrices by columns, then rows; norms and what is between layers by tokens."""
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    whole = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    for layer in model.layers:
        plan: dict[str, Any] = {
            "attention_norm": SequenceParallel(),
            "attention": whole,
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        if layer.mlp.gate is not None:
            plan["mlp.gate"] = ColwiseParallel()
        parallelize_module(layer, mesh, plan)
