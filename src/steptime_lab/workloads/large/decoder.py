"""Decoders: what is divided. Norms, activations, groups of heads and positions vary; every layer is like the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of [batch, heads, tokens, head width] queries over fewer heads of keys and values."""


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder. `experts` of more than none: as many MLPs in place of one, of which a token takes `top`."""

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    tokens: int
    kv_heads: int = 0  # as many as heads
    norm: str = "layer"
    activation: str = "gelu"
    rotary: bool = False
    bias: bool = True
    experts: int = 0
    top: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Of the configuration of a case."""
        return cls(**{field.name: config[field.name] for field in fields(cls) if field.name in config})

    @property
    def head_width(self) -> int:
        """Features of one head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads


def norm(shape: Shape) -> nn.Module:
    """A norm over features."""
    return nn.RMSNorm(shape.width) if shape.norm == "rms" else nn.LayerNorm(shape.width, bias=shape.bias)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Of all tokens, which are here."""
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention; the heads at hand are those of this rank."""

    def __init__(self, shape: Shape, how: Attend = attend) -> None:
        super().__init__()
        self.head_width, self.rotary, self.how = shape.head_width, shape.rotary, how
        whole, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
        self.query = nn.Linear(shape.width, whole, bias=shape.bias)
        self.key = nn.Linear(shape.width, keys, bias=shape.bias)
        self.value = nn.Linear(shape.width, keys, bias=shape.bias)
        self.out = nn.Linear(whole, shape.width, bias=shape.bias)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same; `angles` [tokens, head width] of rotary positions."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.rotary:
            cosine, sine = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
            query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        mixed = self.how(query, key, value)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [batch, heads, tokens, head width]."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class FeedForward(nn.Module):
    """Two linear layers with GELU or a squared ReLU between them, or three with a gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.activation = shape.activation
        self.up = nn.Linear(shape.width, shape.inner, bias=shape.bias)
        self.gate = nn.Linear(shape.width, shape.inner, bias=shape.bias) if shape.activation == "swiglu" else None
        self.down = nn.Linear(shape.inner, shape.width, bias=shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        inner = self.up(x)
        if self.gate is not None:
            inner = functional.silu(self.gate(x)) * inner
        else:
            inner = functional.gelu(inner) if self.activation == "gelu" else functional.relu(inner).square()
        out: torch.Tensor = self.down(inner)
        return out


class Layer(nn.Module):
    """Attention, then an MLP or experts, both on top of what comes in."""

    def __init__(self, shape: Shape, how: Attend = attend, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norm(shape), norm(shape)
        self.attention = Attention(shape, how)
        self.mlp = mlp or FeedForward(shape)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        x = x + self.attention(self.attention_norm(x), angles)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class DividedDecoder(nn.Module):
    """Tokens to logits, or the part of that from some layer to another: the first has the embedding, the last the head."""

    def __init__(
        self,
        shape: Shape,
        how: Attend = attend,
        *,
        first: int = 0,
        last: int | None = None,
        mlp: Callable[[], nn.Module | None] = lambda: None,
    ) -> None:
        super().__init__()
        last = shape.layers if last is None else last
        self.embedding = nn.Embedding(shape.vocabulary, shape.width) if first == 0 else None
        self.positions = None
        if first == 0 and not shape.rotary:
            self.positions = nn.Parameter(torch.randn(shape.tokens, shape.width) / 50)
        self.layers = nn.ModuleList(Layer(shape, how, mlp()) for _ in range(first, last))
        self.norm = norm(shape) if last == shape.layers else None
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if last == shape.layers else None
        self.register_buffer("angles", torch.randn(shape.tokens, shape.head_width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] to [batch, tokens, vocabulary]; between stages [batch, tokens, width]."""
        if self.embedding is not None:
            x = self.embedding(x)
        if self.positions is not None:
            x = x + self.positions
        for layer in self.layers:
            x = layer(x, self.angles)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
