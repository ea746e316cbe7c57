"""Training steps recorded after the reader's rules were settled: what they get wrong here was not tuned away."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from step_cases import GPT, SHALLOW, Block, Case, Step, gpt_of, language_step, token_batches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def scaled_convnet(config: dict[str, Any], device: torch.device) -> Step:
    """A residual network in fp16 with a gradient scaler, which reads a flag from the device every step."""
    from torchvision.models import resnet18

    torch.manual_seed(1)
    model = DistributedDataParallel(resnet18().to(device), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    images = torch.randn(config["batch"], 3, 224, 224, device=device)
    labels = torch.randint(1000, (config["batch"],), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            loss = functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def pipeline(config: dict[str, Any], device: torch.device) -> Step:
    """Two stages of layers; activations and their gradients go by send and receive, micro-batch by micro-batch."""
    torch.manual_seed(1)
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    stage = nn.Sequential(*[Block(config["width"], config["heads"]) for _ in range(config["layers"])]).to(device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4, fused=True)
    shape = (config["batch"], config["length"], config["width"])
    inputs = torch.randn(shape, device=device)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        if rank == 0:
            x = inputs.detach().requires_grad_()
            y = stage(x)
            dist.send(y.detach(), other)
            return x, y
        x = torch.empty(shape, device=device)
        dist.recv(x, other)
        x.requires_grad_()
        return x, stage(x).square().mean()

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        if rank == 1:
            y.backward()
            assert x.grad is not None
            dist.send(x.grad, other)
            return
        gradient = torch.empty(shape, device=device)
        dist.recv(gradient, other)
        y.backward(gradient)

    def step() -> None:
        done = [forward() for _ in range(config["micro_batches"])]
        for x, y in done:
            backward(x, y)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def tensor_parallel(config: dict[str, Any], device: torch.device) -> Step:
    """The feed-forward halves of a small language model split over two ranks."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = gpt_of(config, device)
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
    batches = token_batches(config, device)
    turn = 0

    def step() -> None:
        nonlocal turn
        tokens, targets = batches[turn % len(batches)]
        turn += 1
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compiled(config: dict[str, Any], device: torch.device) -> Step:
    """The model through torch.compile: fused Triton kernels, few launches."""
    return language_step(torch.compile(gpt_of(config, device)), config, device, autocast=True)


def accumulated(config: dict[str, Any], device: torch.device) -> Step:
    """Data parallel with two micro-batches per step, gradients clipped, the loss read every step."""
    model = DistributedDataParallel(gpt_of(config, device), device_ids=[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = token_batches(config, device)

    def micro(index: int) -> torch.Tensor:
        tokens, targets = batches[index]
        with torch.autocast("cuda", torch.bfloat16):
            loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        return loss

    def step() -> None:
        with model.no_sync():
            micro(0)
        loss = micro(1)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def overlapped_lookups(config: dict[str, Any], device: torch.device) -> Step:
    """A recommender: tables of unequal number per rank, pooled rows exchanged by an uneven all_to_all beside the dense part."""
    torch.manual_seed(dist.get_rank())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts, dim = config["tables_per_rank"], config["dim"]
    local = config["batch"] // ranks
    tables = nn.ModuleList([nn.EmbeddingBag(config["rows"], dim, mode="sum") for _ in range(counts[rank])]).to(device)
    dense = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, dim)).to(device)
    top = nn.Sequential(nn.Linear((sum(counts) + 1) * dim, 512), nn.ReLU(), nn.Linear(512, 1)).to(device)
    dense, top = (DistributedDataParallel(m, device_ids=[0]) for m in (dense, top))
    parameters = [*tables.parameters(), *dense.parameters(), *top.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    indices = torch.randint(config["rows"], (config["batch"], config["pooling"]), device=device)
    features = torch.randn(local, 64, device=device)
    sent, received = [local * counts[rank] * dim] * ranks, [local * n * dim for n in counts]

    def step() -> None:
        pooled = torch.cat([t(indices).view(ranks, local, dim) for t in tables], dim=2)
        out = torch.empty(sum(received), device=device)
        work = dist.all_to_all_single(out, pooled.detach().flatten(), received, sent, async_op=True)
        bottom = dense(features)
        work.wait()
        looked_up = torch.cat([part.view(local, -1) for part in out.split(received)], dim=1).requires_grad_()
        loss = top(torch.cat([bottom, looked_up], dim=1)).square().mean()
        loss.backward()
        assert looked_up.grad is not None
        parts = looked_up.grad.split([n * dim for n in counts], dim=1)
        back = torch.empty(sum(sent), device=device)
        dist.all_to_all_single(back, torch.cat([p.flatten() for p in parts]), sent, received)
        pooled.backward(back.view_as(pooled))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


HELD_OUT = {
    case.name: case
    for case in (
        Case("resnet18_amp_ddp4", 4, "fp16 with a gradient scaler, data parallel", 15, scaled_convnet, {"batch": 64}),
        Case("dlrm_overlap4", 4, "uneven all_to_all beside the dense part, 4 ranks", 20, overlapped_lookups,
             {"tables_per_rank": [5, 2, 3, 2], "rows": 200_000, "dim": 64, "pooling": 20, "batch": 8192}),
        Case("pipeline2", 2, "two pipeline stages, send and receive", 10, pipeline,
             {"layers": 3, "width": 512, "heads": 8, "length": 256, "batch": 16, "micro_batches": 4}),
        Case("gpt_tp2", 2, "tensor parallel feed-forward", 15, tensor_parallel, {**SHALLOW, "batch": 32}),
        Case("gpt_accumulate2", 2, "two micro-batches, clipping, loss.item()", 10, accumulated, {**SHALLOW, "batch": 64}),
        Case("gpt_compiled", 1, "torch.compile", 20, compiled, {**GPT, "batch": 64}),
    )
}  # fmt: skip
