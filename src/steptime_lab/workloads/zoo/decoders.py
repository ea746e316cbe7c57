"""Decoders: language models that see what came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import (
    Perceptron,
    PreNormBlock,
    SelfAttention,
    angles,
    joined_heads,
    language_model,
    split_heads,
    turned,
)  # fmt: skip

_KIN = "decoders"


class Decoder(nn.Module):
    """Embedding, positions, layers, norm, head."""

    def __init__(
        self, vocabulary: int, width: int, layers: list[nn.Module], norm: nn.Module, tokens: int = 0, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(tokens, width) if tokens else None
        self.layers, self.norm = nn.ModuleList(layers), norm
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Any:
        """Scores of every word at every place."""
        x = self.embedding(words)
        if self.positions is not None:
            x = x + self.positions.weight[: words.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Gated(nn.Module):
    """A perceptron whose inner values are gated by SiLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, inner, bias=False),
            nn.Linear(width, inner, bias=False),
            nn.Linear(inner, width, bias=False),
        )

    def forward(self, x: Tensor) -> Any:
        """Of every token."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class RotaryAttention(nn.Module):
    """Rotary positions, fewer keys than queries, causal or within a window."""

    def __init__(self, width: int, heads: int, keys: int, turns: tuple[Tensor, Tensor], window: Tensor | None = None) -> None:
        super().__init__()
        self.heads, self.keys, self.turns, self.window = heads, keys, turns, window
        size = width // heads
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, keys * size, bias=False), nn.Linear(width, keys * size, bias=False)

    def forward(self, x: Tensor) -> Any:
        """Of tokens to those before."""
        query = turned(split_heads(self.query(x), self.heads), *self.turns)
        key = turned(split_heads(self.key(x), self.keys), *self.turns)
        value = split_heads(self.value(x), self.keys)
        if self.keys < self.heads:
            key, value = (each.repeat_interleave(self.heads // self.keys, 1) for each in (key, value))
        causal = self.window is None
        return self.out(joined_heads(functional.scaled_dot_product_attention(query, key, value, self.window, is_causal=causal)))


class NormedPair(nn.Module):
    """Attention and a perceptron, each behind a norm of its own, one after the other or side by side behind one."""

    def __init__(
        self, attention: nn.Module, perceptron: nn.Module, norm: Callable[[], nn.Module], *, beside: bool = False
    ) -> None:
        super().__init__()
        self.attention, self.perceptron = attention, perceptron
        self.first = norm()
        self.second = None if beside else norm()

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        inner = self.first(x)
        if self.second is None:
            return x + self.attention(inner) + self.perceptron(inner)
        x = x + self.attention(inner)
        return x + self.perceptron(self.second(x))


@architecture(_KIN, "bf16", "adamw_fused")
def gpt2_medium(at: Place) -> Trainee:
    """24 layers of width 1,024 with tied embeddings, learnt positions, 8 texts of 1,024 tokens."""
    layers: list[nn.Module] = [PreNormBlock(1024, 16, 4096, causal=True) for _ in range(at.layers(24))]
    model = Decoder(50_257, 1024, layers, nn.LayerNorm(1024), 1024, tied=True)
    return language_model(at, model, 50_257, 8, 1024)


@architecture(_KIN, "pure_bf16", "adamw_fused")
def llama_grouped(at: Place) -> Trainee:
    """8 layers of width 2,048, 32 heads on 8 keys, rotary positions, SwiGLU, RMSNorm, 4 texts of 2,048 tokens."""
    turns = angles(at.tokens(2048), 64, at.device)
    layers: list[nn.Module] = [
        NormedPair(RotaryAttention(2048, 32, 8, turns), Gated(2048, 5632), lambda: nn.RMSNorm(2048))
        for _ in range(at.layers(8))
    ]
    return language_model(at, Decoder(32_000, 2048, layers, nn.RMSNorm(2048)), 32_000, 4, 2048)


@architecture(_KIN, "fp16", "adamw")
def parallel_block(at: Place) -> Trainee:
    """12 layers of width 1,280 with attention and perceptron side by side, rotary positions, GradScaler."""
    turns = angles(at.tokens(1024), 80, at.device)
    layers: list[nn.Module] = [
        NormedPair(RotaryAttention(1280, 16, 16, turns), Perceptron(1280, 5120), lambda: nn.LayerNorm(1280), beside=True)
        for _ in range(at.layers(12))
    ]
    return language_model(at, Decoder(50_400, 1280, layers, nn.LayerNorm(1280)), 50_400, 6, 1024)


class BiasedAttention(nn.Module):
    """Scores with a slope per head added, the farther away the lower."""

    def __init__(self, width: int, heads: int, bias: Tensor) -> None:
        super().__init__()
        self.attention, self.bias = SelfAttention(width, heads), bias

    def forward(self, x: Tensor) -> Any:
        """Of tokens to those before."""
        return self.attention(x, self.bias.to(torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled() else x.dtype))


@architecture(_KIN, "bf16", "adamw")
def alibi(at: Place) -> Trainee:
    """12 layers of width 1,024, positions by slopes added to the scores, 4 texts of 2,048 tokens."""
    tokens, heads = at.tokens(2048), 16
    places = torch.arange(tokens, device=at.device)
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=at.device) / heads)
    away = (places[None, :] - places[:, None]).float()
    bias = (slopes[:, None, None] * away).masked_fill(away > 0, float("-inf"))
    layers: list[nn.Module] = [
        NormedPair(BiasedAttention(1024, heads, bias), Perceptron(1024, 4096), lambda: nn.LayerNorm(1024))
        for _ in range(at.layers(12))
    ]
    return language_model(at, Decoder(50_304, 1024, layers, nn.LayerNorm(1024)), 50_304, 4, 2048)


@architecture(_KIN, "pure_bf16", "adamw")
def sliding_window(at: Place) -> Trainee:
    """8 layers of width 1,536 that see 512 tokens back, by a mask; 2 texts of 4,096 tokens."""
    tokens = at.tokens(4096)
    places = torch.arange(tokens, device=at.device)
    back = places[:, None] - places[None, :]
    window, turns = (back >= 0) & (back < 512), angles(tokens, 96, at.device)
    layers: list[nn.Module] = [
        NormedPair(RotaryAttention(1536, 16, 4, turns, window), Gated(1536, 4096), lambda: nn.RMSNorm(1536))
        for _ in range(at.layers(8))
    ]
    return language_model(at, Decoder(32_000, 1536, layers, nn.RMSNorm(1536)), 32_000, 2, 4096)


class LatentAttention(nn.Module):
    """Keys and values from a narrow vector per token, with a part for positions that all heads share."""

    def __init__(self, width: int, heads: int, latent: int, turns: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.heads, self.turns, self.size, self.turning = heads, turns, 128, 64
        self.query = nn.Linear(width, heads * (self.size + self.turning), bias=False)
        self.narrow = nn.Linear(width, latent + self.turning, bias=False)
        self.norm = nn.RMSNorm(latent)
        self.wide = nn.Linear(latent, heads * 2 * self.size, bias=False)
        self.out = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        """Of tokens to those before."""
        query, query_turned = torch.split(split_heads(self.query(x), self.heads), [self.size, self.turning], -1)
        latent, shared = self.narrow(x).split([self.norm.normalized_shape[0], self.turning], -1)
        key, value = split_heads(self.wide(self.norm(latent)), self.heads).chunk(2, -1)
        shared = turned(shared[:, None], *self.turns).expand(-1, self.heads, -1, -1)
        query = torch.cat((query, turned(query_turned, *self.turns)), -1)
        attended = functional.scaled_dot_product_attention(query, torch.cat((key, shared), -1), value, is_causal=True)
        return self.out(joined_heads(attended))


@architecture(_KIN, "pure_bf16", "adamw_fused")
def latent_attention(at: Place) -> Trainee:
    """6 layers of width 2,048 whose keys and values come from 512 numbers a token, 4 texts of 2,048 tokens."""
    turns = angles(at.tokens(2048), 64, at.device)
    layers: list[nn.Module] = [
        NormedPair(LatentAttention(2048, 16, 512, turns), Gated(2048, 5632), lambda: nn.RMSNorm(2048))
        for _ in range(at.layers(6))
    ]
    return language_model(at, Decoder(32_000, 2048, layers, nn.RMSNorm(2048)), 32_000, 4, 2048)


@architecture(_KIN, "tf32", "adam")
def decoder_tf32(at: Place) -> Trainee:
    """12 layers of width 768 with products in TF32, 8 texts of 512 tokens."""
    layers: list[nn.Module] = [PreNormBlock(768, 12, 3072, causal=True) for _ in range(at.layers(12))]
    return language_model(at, Decoder(32_000, 768, layers, nn.LayerNorm(768), 512), 32_000, 8, 512)


@architecture(_KIN, "fp32", "adam_single")
def decoder_tiny(at: Place) -> Trainee:
    """6 layers of width 384, 4 texts of 128 tokens, one tensor at a time in Adam: the host takes longest."""
    layers: list[nn.Module] = [PreNormBlock(384, 6, 1536, causal=True) for _ in range(at.layers(6))]
    return language_model(at, Decoder(8_000, 384, layers, nn.LayerNorm(384), 128), 8_000, 4, 128)
