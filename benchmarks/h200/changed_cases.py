"""Training steps in pairs: as somebody wrote one, and with one change made for real, which a what-if on the first foretells."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from step_cases import Case, Step, gpt_of, token_batches
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

SMALL = {"layers": 8, "width": 256, "heads": 4, "length": 128, "vocabulary": 8192}
MEDIUM = {"layers": 8, "width": 768, "heads": 12, "length": 512, "vocabulary": 16384}


@dataclass(frozen=True)
class Change:
    """A pair. `what_if` is asked of the recording of the first; the second is `config` with `changed`."""

    name: str
    what_if: str
    build: Callable[[dict[str, Any], torch.device], Step]
    config: dict[str, Any]
    changed: dict[str, Any]
    ranks: int = 1
    steps: int = 30

    def cases(self) -> tuple[Case, Case]:
        """The step as it was, and with the change."""
        after = {**self.config, **self.changed}
        return (
            Case(self.name, self.ranks, f"before '{self.what_if}'", self.steps, self.build, self.config),
            Case(f"{self.name}_changed", self.ranks, f"after '{self.what_if}'", self.steps, self.build, after),
        )


def optimizer_of(parameters: Any, config: dict[str, Any]) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum, as `implementation` says: fused, foreach or a loop over parameters."""
    how = config.get("implementation", "foreach")
    options = {"fused": how == "fused", "foreach": how == "foreach"}
    if config.get("optimizer") == "sgd":
        return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4, **options)
    return torch.optim.AdamW(parameters, lr=1e-4, **options)


def eager_all_reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP that waits for each bucket's all_reduce before backward goes on."""
    del state
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


# DDP compares the annotations themselves, which are text in this file.
eager_all_reduce.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})


def gpt(config: dict[str, Any], device: torch.device) -> Step:
    """A decoder; keys say precision, optimiser, synchronisation, data on the host, how gradients are reduced."""
    torch.set_float32_matmul_precision("high" if config.get("tf32") else "highest")
    model: nn.Module = gpt_of(config, device)
    if dist.is_initialized():
        model = DistributedDataParallel(model, device_ids=[0])
        if config.get("overlap") is False:
            model.register_comm_hook(None, eager_all_reduce)
    optimizer = optimizer_of(model.parameters(), config)
    batches = token_batches(config, device)
    if config.get("on_host"):
        batches = [(tokens.cpu(), targets.cpu()) for tokens, targets in batches]
    turn = 0

    def step() -> None:
        nonlocal turn
        if config.get("loading_s"):
            busy(config["loading_s"])
        tokens, targets = (each.to(device) for each in batches[turn % len(batches)])
        turn += 1
        with torch.autocast(device.type, torch.bfloat16, enabled=bool(config.get("bf16"))):
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if config.get("reads_loss"):
            loss.item()
        loss.backward()
        if config.get("clips"):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if config.get("reads_norm"):
                float(norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def busy(seconds: float) -> None:
    """Python that makes a batch, while nothing is launched."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(100))


def classifier(config: dict[str, Any], device: torch.device) -> Step:
    """torchvision's ResNet-50 on random images."""
    from torchvision.models import resnet50

    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(1)
    with device:
        model = resnet50()
    optimizer = optimizer_of(model.parameters(), {**config, "optimizer": "sgd"})
    images = torch.randn(config["batch"], 3, 224, 224, device=device)
    labels = torch.randint(1000, (config["batch"],), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=bool(config.get("bf16"))):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def tower(config: dict[str, Any], device: torch.device) -> Step:
    """Wide linear layers with dropout, fp32."""
    torch.set_float32_matmul_precision("high" if config.get("tf32") else "highest")
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    with device:
        for _ in range(config["layers"]):
            layers += [nn.Linear(config["width"], config["width"]), nn.ReLU()]
            if config["dropout"]:
                layers.append(nn.Dropout(config["dropout"]))
    model = nn.Sequential(*layers)
    optimizer = optimizer_of(model.parameters(), config)
    x = torch.randn(config["batch"], config["width"], device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


CHANGES = (
    Change("gpt_fused", "optimizer fused", gpt, {**SMALL, "batch": 32, "bf16": True}, {"implementation": "fused"}),
    Change(
        "resnet_fused", "optimizer fused", classifier, {"batch": 64, "bf16": True, "implementation": "loop"},
        {"implementation": "fused"},
    ),
    Change("tower_fused", "optimizer fused", tower, {"layers": 12, "width": 4096, "batch": 2048, "dropout": 0, "tf32": True},
           {"implementation": "fused"}),
    Change("gpt_foreach", "optimizer foreach", gpt, {**SMALL, "batch": 16, "implementation": "loop"},
           {"implementation": "foreach"}),
    Change("gpt_batch", "batch = 64", gpt, {**MEDIUM, "batch": 16, "bf16": True}, {"batch": 64}),
    Change("resnet_batch", "batch = 128", classifier, {"batch": 32}, {"batch": 128}),
    Change("gpt_batch_small", "batch = 256", gpt, {**SMALL, "batch": 32}, {"batch": 256}),
    Change("gpt_loss_read", "sync remove", gpt, {**SMALL, "batch": 96, "reads_loss": True}, {"reads_loss": False}),
    Change("gpt_norm_read", "sync remove", gpt, {**SMALL, "batch": 64, "bf16": True, "clips": True, "reads_norm": True,
                                                 "reads_loss": True}, {"reads_norm": False, "reads_loss": False}),
    Change("gpt_tf32", "tf32 on", gpt, {**MEDIUM, "batch": 16}, {"tf32": True}, steps=12),
    Change("tower_tf32", "tf32 on", tower, {"layers": 12, "width": 3072, "batch": 4096, "dropout": 0},
           {"tf32": True}, steps=12),
    Change("gpt_bf16", "bf16 on", gpt, {**MEDIUM, "batch": 24}, {"bf16": True}, steps=12),
    Change("tower_dropout", "op:native_dropout remove", tower,
           {"layers": 12, "width": 2048, "batch": 16384, "dropout": 0.1, "tf32": True}, {"dropout": 0}),
    Change("gpt_loading", "python remove", gpt, {**SMALL, "batch": 16, "loading_s": 0.006, "reads_loss": True},
           {"loading_s": 0}),
    Change("gpt_ddp_no_overlap", "all_reduce no-overlap", gpt, {**MEDIUM, "batch": 16, "bf16": True}, {"overlap": False},
           ranks=2, steps=15),
    Change("gpt_ddp_overlap", "all_reduce overlap", gpt, {**MEDIUM, "batch": 24, "bf16": True, "overlap": False},
           {"overlap": True}, ranks=2, steps=15),
    Change("gpt_ddp_fused", "optimizer fused", gpt, {**SMALL, "batch": 32, "implementation": "loop"},
           {"implementation": "fused"}, ranks=2, steps=25),
)  # fmt: skip

CHANGED = {case.name: case for change in CHANGES for case in change.cases()}
