"""Training steps with a known character: bound by the GPU, the wire or the host, with and without synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """One configuration: how many ranks, what it is made of, how many steps one timing takes."""

    name: str
    ranks: int
    about: str
    steps: int
    build: Callable[[dict[str, Any], torch.device], Step]
    config: dict[str, Any] = field(default_factory=dict)


class Block(nn.Module):
    """A pre-norm Transformer layer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) in and out."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_mlp(x))))


class Gpt(nn.Module):
    """A small decoder-only language model."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("positions", torch.arange(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token numbers (batch, sequence) to logits (batch, sequence, vocabulary)."""
        x = self.tokens(tokens) + self.places(self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_of(config: dict[str, Any], device: torch.device) -> Gpt:
    """The model a configuration asks for."""
    torch.manual_seed(1)
    with device:
        return Gpt(config["layers"], config["width"], config["heads"], config["length"], config["vocabulary"])


def token_batches(config: dict[str, Any], device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four batches of random tokens and targets, to go round in."""
    shape = (2, config["batch"], config["length"])
    pairs = [torch.randint(config["vocabulary"], shape, device=device) for _ in range(4)]
    return [(pair[0], pair[1]) for pair in pairs]


def language_step(model: nn.Module, config: dict[str, Any], device: torch.device, *, autocast: bool) -> Step:
    """Forward, loss, backward, fused AdamW; nothing synchronises."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = token_batches(config, device)
    turn = 0

    def step() -> None:
        nonlocal turn
        tokens, targets = batches[turn % len(batches)]
        turn += 1
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def gpt_ddp(config: dict[str, Any], device: torch.device) -> Step:
    """Data parallel, gradients all-reduced in buckets while backward runs."""
    model = DistributedDataParallel(gpt_of(config, device), device_ids=[0] if device.type == "cuda" else None)
    return language_step(model, config, device, autocast=True)


def gpt_fsdp(config: dict[str, Any], device: torch.device) -> Step:
    """Parameters sharded layer by layer (FSDP2), gathered in bf16, gradients reduced in fp32."""
    model = gpt_of(config, device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return language_step(model, config, device, autocast=False)


def deep_mlp(config: dict[str, Any], device: torch.device) -> Step:
    """Many layers of large enough kernels: the host is far ahead and its launches block on the full queue."""
    width, dtype = config["width"], torch.bfloat16
    layers: list[nn.Module] = []
    for _ in range(config["layers"]):
        layers += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*layers).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    x = torch.randn(config["batch"], width, device=device, dtype=dtype)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    return step


def prefetched(config: dict[str, Any], device: torch.device) -> Step:
    """Inputs come from pinned memory over a side stream one step ahead; the loss is read every step."""
    width, batch = config["width"], config["batch"]
    layers: list[nn.Module] = [nn.Linear(config["features"], width), nn.ReLU()]
    for _ in range(config["layers"]):
        layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, config["classes"])).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    side = torch.cuda.Stream()
    hosts = [torch.randn(batch, config["features"]).pin_memory() for _ in range(2)]
    places = [torch.empty(batch, config["features"], device=device) for _ in range(2)]
    labels = torch.randint(config["classes"], (batch,))
    copied, used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
    turn = 0

    def fetch(slot: int) -> None:
        side.wait_event(used[slot])
        with torch.cuda.stream(side):
            places[slot].copy_(hosts[slot], non_blocking=True)
            copied[slot].record(side)

    def step() -> None:
        nonlocal turn
        slot = turn % 2
        turn += 1
        if turn == 1:
            fetch(slot)
        torch.cuda.current_stream().wait_event(copied[slot])
        fetch(1 - slot)
        targets = labels.to(device)
        copied[1 - slot].synchronize()  # from here on a loader would fill the host buffer again
        loss = functional.cross_entropy(model(places[slot]), targets)
        used[slot].record()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def captured(config: dict[str, Any], device: torch.device) -> Step:
    """The whole training step as one CUDA graph, with fresh tokens copied in from pinned memory before each replay."""
    model = gpt_of(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)
    pair = torch.randint(config["vocabulary"], (2, config["batch"], config["length"]), device=device)
    fresh = torch.randint(config["vocabulary"], tuple(pair.shape)).pin_memory()

    def body() -> None:
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            loss = functional.cross_entropy(model(pair[0]).flatten(0, 1).float(), pair[1].flatten())
        loss.backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            body()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()

    def step() -> None:
        pair.copy_(fresh, non_blocking=True)
        graph.replay()

    return step


GPT = {"layers": 8, "width": 512, "heads": 8, "length": 256, "vocabulary": 8192}
SHALLOW = {**GPT, "layers": 4}
NARROW = {"layers": 8, "width": 128, "heads": 4, "length": 64, "vocabulary": 1024}

CASES = {
    case.name: case
    for case in (
        Case("gpt_ddp2_gpu", 2, "GPU-bound data parallel", 10, gpt_ddp, {**GPT, "batch": 256}),
        Case("gpt_ddp2_wire", 2, "the same with a tiny batch: bound by the all-reduce", 15, gpt_ddp, {**GPT, "batch": 8}),
        Case("gpt_ddp2_host", 2, "a narrow model with a tiny batch: bound by the host", 60, gpt_ddp, {**NARROW, "batch": 8}),
        Case("gpt_fsdp2", 2, "fully sharded (FSDP2)", 10, gpt_fsdp, {**GPT, "batch": 128}),
        Case("gpt_ddp2_small", 2, "data parallel, half the layers", 15, gpt_ddp, {**SHALLOW, "batch": 128}),
        Case("gpt_fsdp2_small", 2, "fully sharded (FSDP2), half the layers", 15, gpt_fsdp, {**SHALLOW, "batch": 128}),
        Case("deep_mlp", 1, "launches block on the full queue", 15, deep_mlp, {"layers": 120, "width": 2048, "batch": 8192}),
        Case("prefetch_sync", 1, "prefetch on a side stream, events, loss.item() every step", 60, prefetched,
             {"layers": 6, "width": 2048, "features": 4096, "classes": 1000, "batch": 4096}),
        Case("gpt_graph", 1, "the step as one CUDA graph", 60, captured, {**GPT, "batch": 8}),
    )
}  # fmt: skip
