"""What all divided steps share: precision, inputs, optimiser, and the ranks as a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from steptime_lab.workloads.large.decoder import Shape

DTYPES = {"bf16": torch.bfloat16}


@dataclass(frozen=True)
class Batch:
    """Who trains on how many samples: `samples` of each rank, drawn from its own seed."""

    rank: int
    ranks: int
    samples: int

    def tokens(self, shape: Shape, samples: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Words and the labels of each, [samples, tokens]."""
        source = torch.Generator(device).manual_seed(1 + self.rank)
        size = (samples, shape.tokens)
        words = torch.randint(shape.vocabulary, size, device=device, generator=source)
        return words, torch.randint(shape.vocabulary, size, device=device, generator=source)


def prepared(config: Mapping[str, Any], make: Callable[[], nn.Module], device: torch.device) -> Any:
    """The module on its device, in the precision of the case; TF32 is a switch of the process."""
    precision = config["precision"]
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    with torch.device(device):
        module = make()
    return module.to(DTYPES.get(precision, torch.float32))


def autocast(config: Mapping[str, Any], device: torch.device) -> AbstractContextManager[Any]:
    """What the forward pass runs under."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config["precision"] == "bf16-autocast")


def optimizer_of(config: Mapping[str, Any], module: nn.Module) -> torch.optim.Optimizer:
    """As the case names it. Steps are small, so that values stay finite however often they are repeated."""
    name = config.get("optimizer", "adamw")
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=1e-5, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=1e-6, fused=name == "adamw-fused")


_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def mesh_of(device: str, **sizes: int) -> DeviceMesh:
    """The ranks as a mesh, the last dimension neighbours. Made once for a job: communicators are dear."""
    world = dist.group.WORLD
    if any(key[0] is not world for key in _meshes):
        _meshes.clear()
    key = (world, device, tuple(sizes.items()))
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return _meshes[key]
