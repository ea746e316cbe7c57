"""Layers that several architectures of the zoo share, and the losses they are trained with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import Place, Trainee


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, width) to (batch, heads, tokens, size)."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def joined_heads(x: Tensor) -> Tensor:
    """And back."""
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Queries, keys and values by one product; fused attention."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.mixed, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """Of tokens among themselves; the mask is added to the scores, or says which to keep."""
        query, key, value = (split_heads(part, self.heads) for part in self.mixed(x).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=self.causal)
        return self.out(joined_heads(attended))


class CrossAttention(nn.Module):
    """Queries of one sequence, keys and values of another; fused attention."""

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.both = nn.Linear(context or width, 2 * width)

    def forward(self, x: Tensor, context: Tensor) -> Any:
        """Of tokens to those of a context."""
        key, value = (split_heads(part, self.heads) for part in self.both(context).chunk(2, -1))
        attended = functional.scaled_dot_product_attention(split_heads(self.query(x), self.heads), key, value)
        return self.out(joined_heads(attended))


class Perceptron(nn.Sequential):
    """Two products with an activation between."""

    def __init__(self, width: int, inner: int, activation: Callable[[], nn.Module] = nn.GELU, dropout: float = 0.0) -> None:
        last = [nn.Dropout(dropout)] if dropout else []
        super().__init__(nn.Linear(width, inner), activation(), nn.Linear(inner, width), *last)


class PreNormBlock(nn.Module):
    """A Transformer's layer with the norms first."""

    def __init__(self, width: int, heads: int, inner: int, *, causal: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal=causal)
        self.perceptron = Perceptron(width, inner)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        x = x + self.attention(self.first(x))
        return x + self.perceptron(self.second(x))


def angles(tokens: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions."""
    rates = 10_000.0 ** (-torch.arange(0, size, 2, device=device).float() / size)
    turns = torch.outer(torch.arange(tokens, device=device).float(), rates)
    return turns.cos(), turns.sin()


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Queries or keys, turned by their positions."""
    first, second = x.chunk(2, -1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def convolved(first: int, second: int, kernel: int, stride: int = 1, *, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the size, or divides it by the stride."""
    return nn.Conv2d(first, second, kernel, stride, kernel // 2, groups=groups, bias=False)


def language_model(at: Place, model: nn.Module, vocabulary: int, batch: int, tokens: int) -> Trainee:
    """Trained to say each token, by cross entropy."""
    words = at.integers(vocabulary, at.batch(batch), at.tokens(tokens))
    return Trainee(model, lambda: functional.cross_entropy(model(words).flatten(0, 1), words.flatten()))


def classifier(at: Place, model: nn.Module, inputs: Tensor, classes: int = 1000) -> Trainee:
    """Trained to name a class of each input."""
    labels = at.integers(classes, inputs.shape[0])
    return Trainee(model, lambda: functional.cross_entropy(model(inputs), labels))


def regressor(model: nn.Module, inputs: Tensor, wanted: Tensor) -> Trainee:
    """Trained to give values, by the mean of squares."""
    return Trainee(model, lambda: functional.mse_loss(model(inputs), wanted))
