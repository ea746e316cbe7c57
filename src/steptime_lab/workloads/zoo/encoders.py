"""Encoders: texts seen from both sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import Perceptron, SelfAttention, joined_heads, language_model, split_heads

_KIN = "encoders"


class PostNormBlock(nn.Module):
    """A layer of BERT: dropout and a norm behind each half."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float = 0.1, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads) if attention is None else attention
        self.perceptron, self.dropout = Perceptron(width, inner), nn.Dropout(dropout)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        x = self.first(x + self.dropout(self.attention(x)))
        return self.second(x + self.dropout(self.perceptron(x)))


class Encoder(nn.Module):
    """Three embeddings, layers, and a head over all words."""

    def __init__(self, vocabulary: int, width: int, layers: list[nn.Module], tokens: int, narrow: int | None = None) -> None:
        super().__init__()
        narrow = narrow or width
        self.words, self.places = nn.Embedding(vocabulary, narrow), nn.Embedding(tokens, narrow)
        self.kinds, self.norm = nn.Embedding(2, narrow), nn.LayerNorm(narrow)
        self.widened = nn.Linear(narrow, width) if narrow != width else nn.Identity()
        self.layers, self.dropout = nn.ModuleList(layers), nn.Dropout(0.1)
        self.head = nn.Sequential(nn.Linear(width, narrow), nn.GELU(), nn.LayerNorm(narrow), nn.Linear(narrow, vocabulary))

    def forward(self, words: Tensor) -> Any:
        """Scores of every word at every place."""
        places = torch.arange(words.shape[1], device=words.device)
        x = self.words(words) + self.places(places) + self.kinds(torch.zeros_like(words))
        x = self.widened(self.dropout(self.norm(x)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@architecture(_KIN, "bf16", "adamw_fused")
def bert_base(at: Place) -> Trainee:
    """12 layers of width 768, 32 texts of 256 tokens."""
    layers: list[nn.Module] = [PostNormBlock(768, 12, 3072) for _ in range(at.layers(12))]
    return language_model(at, Encoder(30_522, 768, layers, 512), 30_522, 32, 256)


@architecture(_KIN, "fp32", "lamb")
def bert_small_lamb(at: Place) -> Trainee:
    """4 layers of width 512 in fp32 under an optimiser of its own that goes tensor by tensor: the host takes longest."""
    layers: list[nn.Module] = [PostNormBlock(512, 8, 2048) for _ in range(at.layers(4))]
    return language_model(at, Encoder(8_000, 512, layers, 128), 8_000, 8, 64)


@architecture(_KIN, "fp16", "adamw")
def electra_base(at: Place) -> Trainee:
    """12 layers of width 768 that tell real tokens from others, 128 texts of 128 tokens, GradScaler."""
    layers: list[nn.Module] = [PostNormBlock(768, 12, 3072) for _ in range(at.layers(12))]
    model = Encoder(30_522, 768, layers, 512)
    model.head = nn.Sequential(nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 1))
    words, real = at.integers(30_522, at.batch(128), 128), at.floats(at.batch(128), 128) > 0
    return Trainee(model, lambda: functional.binary_cross_entropy_with_logits(model(words)[..., 0], real.float()))


class SharedLayers(nn.Module):
    """One layer, run several times."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Any:
        """All of them."""
        for _ in range(self.times):
            x = self.layer(x)
        return x


@architecture(_KIN, "bf16", "lamb")
def albert(at: Place) -> Trainee:
    """One layer of width 1,024 run 16 times, embeddings of 128, 48 texts of 256 tokens."""
    shared = SharedLayers(PostNormBlock(1024, 16, 4096, 0.0), at.layers(16))
    return language_model(at, Encoder(30_000, 1024, [shared], 512, narrow=128), 30_000, 48, 256)


class DisentangledAttention(nn.Module):
    """Scores from contents and from distances, the latter gathered by how far apart two tokens are."""

    def __init__(self, width: int, heads: int, span: int) -> None:
        super().__init__()
        self.heads, self.span = heads, span
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.distances = nn.Embedding(2 * span, width)
        self.distance_key, self.distance_query = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        """Of tokens among themselves."""
        batch, tokens, _ = x.shape
        query, key, value = (split_heads(part, self.heads) for part in self.mixed(x).chunk(3, -1))
        places = torch.arange(tokens, device=x.device)
        apart = (places[:, None] - places[None, :]).clamp(-self.span, self.span - 1) + self.span
        apart = apart.expand(batch, self.heads, tokens, tokens)
        table = self.distances.weight[None]
        to_place = query @ split_heads(self.distance_key(table), self.heads).transpose(-1, -2)
        from_place = key @ split_heads(self.distance_query(table), self.heads).transpose(-1, -2)
        scores = query @ key.transpose(-1, -2) + to_place.gather(-1, apart) + from_place.gather(-1, apart).transpose(-1, -2)
        weights = torch.softmax(scores / (3 * query.shape[-1]) ** 0.5, -1)
        return self.out(joined_heads(weights.to(value.dtype) @ value))


@architecture(_KIN, "fp32", "adamw")
def deberta(at: Place) -> Trainee:
    """6 layers of width 768 with disentangled attention in fp32, 8 texts of 256 tokens."""
    layers: list[nn.Module] = [
        PostNormBlock(768, 12, 3072, 0.1, DisentangledAttention(768, 12, 256)) for _ in range(at.layers(6))
    ]
    return language_model(at, Encoder(32_000, 768, layers, 512), 32_000, 8, 256)


class LocalAttention(nn.Module):
    """Tokens of a chunk see it and the chunks on either side; scores by batched products."""

    def __init__(self, width: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        """Of tokens to those near."""
        query, key, value = (split_heads(part, self.heads) for part in self.mixed(x).chunk(3, -1))
        chunk = min(self.chunk, x.shape[1])
        query = query.reshape(*query.shape[:2], -1, chunk, query.shape[-1])
        near = [functional.pad(each, (0, 0, chunk, chunk)).unfold(2, 3 * chunk, chunk) for each in (key, value)]
        scores = query @ near[0] / query.shape[-1] ** 0.5
        attended = torch.softmax(scores, -1).to(query.dtype) @ near[1].transpose(-1, -2)
        return self.out(joined_heads(attended.flatten(2, 3)))


@architecture(_KIN, "bf16", "adamw")
def local_attention(at: Place) -> Trainee:
    """6 layers of width 768 over 4,096 tokens, each sees chunks of 256 near it, 4 texts."""
    layers: list[nn.Module] = [PostNormBlock(768, 12, 3072, 0.0, LocalAttention(768, 12, 256)) for _ in range(at.layers(6))]
    return language_model(at, Encoder(16_000, 768, layers, 4096), 16_000, 4, 4096)


class PooledEncoder(nn.Module):
    """Halves the tokens between stages."""

    def __init__(self, width: int, stages: list[nn.Module]) -> None:
        super().__init__()
        self.words, self.stages = nn.Embedding(30_000, width), nn.ModuleList(stages)
        self.head = nn.Linear(width, 64)

    def forward(self, words: Tensor) -> Any:
        """Scores of every class."""
        x = self.words(words)
        for stage in self.stages:
            x = functional.avg_pool1d(stage(x).transpose(1, 2), 2).transpose(1, 2)
        return self.head(x.amax(1))


@architecture(_KIN, "tf32", "adamw")
def funnel(at: Place) -> Trainee:
    """Three stages of four layers of width 768, tokens halved behind each, products in TF32, 32 texts of 512 tokens."""
    stages: list[nn.Module] = [
        nn.Sequential(*(PostNormBlock(768, 12, 3072, 0.0) for _ in range(at.layers(4)))) for _ in range(3)
    ]
    model = PooledEncoder(768, stages)
    words, labels = at.integers(30_000, at.batch(32), at.tokens(512)), at.integers(64, at.batch(32))
    return Trainee(model, lambda: functional.cross_entropy(model(words), labels))
