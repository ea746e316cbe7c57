"""A 70 B Llama-like Transformer on 1,024 ranks: FSDP2 over 128 of them, tensor parallelism over 8, captured without a GPU.

    steptime capture examples/llama70b_capture.py:training_step --ranks 1024 -o llama70b.json.gz

Plain PyTorch as it would run under torchrun; nothing here knows that it is being captured. Dimensions are those of Llama 2 70B
(Touvron et al. 2023, table 1 and section 2.2; feed-forward width and vocabulary from the released configuration).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional


@dataclass(frozen=True)
class Llama:
    """Dimensions of the model, and what one rank trains on."""

    layers: int = 80
    width: int = 8192
    heads: int = 64
    kv_heads: int = 8
    feed_forward: int = 28672
    vocabulary: int = 32000
    length: int = 4096
    batch: int = 1
    tensor_parallel: int = 8

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the heads at hand are those of this rank."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.head_width = model.head_width
        self.wq = nn.Linear(model.width, model.heads * model.head_width, bias=False)
        self.wk = nn.Linear(model.width, model.kv_heads * model.head_width, bias=False)
        self.wv = nn.Linear(model.width, model.kv_heads * model.head_width, bias=False)
        self.wo = nn.Linear(model.heads * model.head_width, model.width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for projection in (self.wq, self.wk, self.wv)
        )
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.wo(mixed.transpose(1, 2).flatten(-2))
        return out


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [batch, heads, length, head width]."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.w1 = nn.Linear(model.width, model.feed_forward, bias=False)
        self.w2 = nn.Linear(model.feed_forward, model.width, bias=False)
        self.w3 = nn.Linear(model.width, model.feed_forward, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        out: torch.Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One layer."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.width)
        self.attention = Attention(model)
        self.feed_forward_norm = nn.RMSNorm(model.width)
        self.feed_forward = FeedForward(model)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] to the same."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Transformer(nn.Module):
    """Tokens to logits."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.width)
        self.output = nn.Linear(model.width, model.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """[batch, length] to [batch, length, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def split_tensors(model: Transformer, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism: matrices by columns then rows, norms by position."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    whole = PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None))
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": whole,
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )


def training_step(model: Llama | None = None) -> Callable[[], None]:
    """Builds the sharded model of this rank and gives its training step: forward, backward, optimiser."""
    model = model or Llama()
    device = torch.device("cuda")
    data_parallel = dist.get_world_size() // model.tensor_parallel
    mesh = init_device_mesh("cuda", (data_parallel, model.tensor_parallel), mesh_dim_names=("data", "tensor"))
    with torch.device("meta"):
        network = Transformer(model)
    if model.tensor_parallel > 1:
        split_tensors(network, mesh["tensor"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in network.blocks:
        fully_shard(block, mesh=mesh["data"], mp_policy=policy)
    fully_shard(network, mesh=mesh["data"], mp_policy=policy)
    network.to_empty(device=device)
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.02)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4, fused=True)
    tokens = torch.randint(model.vocabulary, (model.batch, model.length), device=device)
    labels = torch.randint(model.vocabulary, (model.batch, model.length), device=device)
    angles = torch.randn(model.length, model.head_width, device=device, dtype=torch.bfloat16)
    cosine, sine = angles.cos(), angles.sin()

    def step() -> None:
        optimizer.zero_grad()
        logits = network(tokens, cosine, sine)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
