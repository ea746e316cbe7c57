"""Encoder-decoders and speech."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import CrossAttention, Perceptron, PreNormBlock, SelfAttention, split_heads
from steptime_lab.workloads.zoo.layers import joined_heads as joined

_KIN = "sequences and speech"


class RelativeBias(nn.Module):
    """A learnt number per head and bucket of distances, buckets growing with the distance."""

    def __init__(self, heads: int, buckets: int = 32, farthest: int = 128) -> None:
        super().__init__()
        self.table, self.buckets, self.farthest = nn.Embedding(buckets, heads), buckets, farthest

    def forward(self, tokens: int, device: torch.device) -> Any:
        """(1, heads, tokens, tokens)."""
        places = torch.arange(tokens, device=device)
        apart = (places[:, None] - places[None, :]).abs()
        half = self.buckets // 2
        far = half + (torch.log(apart.clamp(min=1).float() / half) / 2.1 * half).long()
        return self.table(torch.where(apart < half, apart, far.clamp(max=self.buckets - 1))).permute(2, 0, 1)[None]


class BiasedBlock(nn.Module):
    """RMSNorm, attention with a bias on its scores that is not fused, a perceptron with ReLU; and what it looks up."""

    def __init__(self, width: int, heads: int, inner: int, *, looks_up: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if looks_up else 2))
        self.mixed, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.cross = CrossAttention(width, heads) if looks_up else None
        self.perceptron = Perceptron(width, inner, nn.ReLU)

    def forward(self, x: Tensor, bias: Tensor, context: Tensor | None = None) -> Any:
        """One layer."""
        query, key, value = (split_heads(part, self.heads) for part in self.mixed(self.norms[0](x)).chunk(3, -1))
        weights = torch.softmax((query @ key.transpose(-1, -2)).float() + bias, -1).to(value.dtype)
        x = x + self.out(joined(weights @ value))
        if self.cross is not None and context is not None:
            x = x + self.cross(self.norms[2](x), context)
        return x + self.perceptron(self.norms[1](x))


class BiasedPair(nn.Module):
    """Encoder and decoder with one table of relative positions each."""

    def __init__(self, width: int, heads: int, inner: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(BiasedBlock(width, heads, inner, looks_up=False) for _ in range(layers))
        self.decoder = nn.ModuleList(BiasedBlock(width, heads, inner, looks_up=True) for _ in range(layers))
        self.near, self.before = RelativeBias(heads), RelativeBias(heads)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, words: Tensor, said: Tensor) -> Any:
        """Scores of every word that is said."""
        x, y = self.words(words), self.words(said)
        bias = self.near(x.shape[1], x.device)
        for layer in self.encoder:
            x = layer(x, bias)
        later = torch.ones(y.shape[1], y.shape[1], device=y.device, dtype=torch.bool).triu(1)
        bias = self.before(y.shape[1], y.device).masked_fill(later, -1e9)
        for layer in self.decoder:
            y = layer(y, bias, x)
        return self.head(y)


def _translated(at: Place, model: nn.Module, vocabulary: int, batch: int, tokens: tuple[int, int]) -> Trainee:
    words, said = (at.integers(vocabulary, at.batch(batch), at.tokens(count)) for count in tokens)
    return Trainee(model, lambda: functional.cross_entropy(model(words, said).flatten(0, 1), said.flatten()))


@architecture(_KIN, "bf16", "adamw")
def t5_base(at: Place) -> Trainee:
    """12 and 12 layers of width 768 with relative positions, 32 texts of 512 and 128 tokens."""
    return _translated(at, BiasedPair(768, 12, 3072, at.layers(12), 32_128), 32_128, 32, (512, 128))


@architecture(_KIN, "fp32", "adam")
def translation_small(at: Place) -> Trainee:
    """3 and 3 layers of width 256 as PyTorch has them, 16 texts of 32 tokens: the host takes longest."""
    layers = at.layers(3)
    core = nn.Transformer(256, 4, layers, layers, 1024, 0.1, batch_first=True)
    words, head = nn.Embedding(8_000, 256), nn.Linear(256, 8_000)
    model = nn.ModuleList((core, words, head))
    source, said = at.integers(8_000, at.batch(16), 32), at.integers(8_000, at.batch(16), 32)
    mask = torch.full((32, 32), float("-inf"), device=at.device).triu(1)

    def loss() -> Tensor:
        scores = head(core(words(source), words(said), tgt_mask=mask))
        return functional.cross_entropy(scores.flatten(0, 1), said.flatten())

    return Trainee(model, loss)


class CrossBlock(nn.Module):
    """A decoder's layer that looks at an encoder's output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.cross = SelfAttention(width, heads, causal=True), CrossAttention(width, heads)
        self.perceptron, self.norms = Perceptron(width, 4 * width), nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor) -> Any:
        """One layer."""
        x = x + self.attention(self.norms[0](x))
        x = x + self.cross(self.norms[1](x), context)
        return x + self.perceptron(self.norms[2](x))


class Listener(nn.Module):
    """A spectrogram through two convolutions and an encoder; a decoder says what it hears."""

    def __init__(self, width: int, heads: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(80, width, 3, 1, 1), nn.GELU(), nn.Conv1d(width, width, 3, 2, 1), nn.GELU())
        self.encoder = nn.Sequential(*(PreNormBlock(width, heads, 4 * width) for _ in range(layers)), nn.LayerNorm(width))
        self.words, self.decoder = (
            nn.Embedding(vocabulary, width),
            nn.ModuleList(CrossBlock(width, heads) for _ in range(layers)),
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, sound: Tensor, said: Tensor) -> Any:
        """Scores of every word that is said."""
        heard, y = self.encoder(self.stem(sound).transpose(1, 2)), self.words(said)
        for layer in self.decoder:
            y = layer(y, heard)
        return self.norm(y) @ self.words.weight.T.to(y.dtype)


@architecture(_KIN, "bf16", "adamw_fused")
def whisper_small(at: Place) -> Trainee:
    """12 and 12 layers of width 768, 16 sounds of 3,000 frames and 224 words of each."""
    model = Listener(768, 12, at.layers(12), 51_865)
    sound, said = at.floats(at.batch(16), 80, 2 * at.tokens(1500)), at.integers(51_865, at.batch(16), at.tokens(224))
    return Trainee(model, lambda: functional.cross_entropy(model(sound, said).flatten(0, 1), said.flatten()))


class ConformerBlock(nn.Module):
    """Half a perceptron, attention, a depthwise convolution over time, half a perceptron."""

    def __init__(self, width: int, heads: int, kernel: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.before, self.after = Perceptron(width, 4 * width, nn.SiLU, 0.1), Perceptron(width, 4 * width, nn.SiLU, 0.1)
        self.attention = SelfAttention(width, heads)
        self.pointwise = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.batch_norm, self.out = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Any:
        """One block."""
        x = x + 0.5 * self.before(self.norms[0](x))
        x = x + self.attention(self.norms[1](x))
        inner = functional.glu(self.pointwise(self.norms[2](x).transpose(1, 2)), 1)
        x = x + self.out(functional.silu(self.batch_norm(self.depthwise(inner)))).transpose(1, 2)
        return self.norms[4](x + 0.5 * self.after(self.norms[3](x)))


def _framed(at: Place, model: nn.Module, frames: Tensor, classes: int, rate: int) -> Trainee:
    labels = at.integers(classes, frames.shape[0], frames.shape[-1] // rate)

    def loss() -> Tensor:
        scores = model(frames)
        return functional.cross_entropy(scores[:, : labels.shape[1]].flatten(0, 1), labels[:, : scores.shape[1]].flatten())

    return Trainee(model, loss)


class Conformer(nn.Module):
    """Frames, thinned out by four, through blocks; a class of each."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU())
        self.widened, self.head = nn.Linear(64 * 20, width), nn.Linear(width, 1024)
        self.blocks = nn.Sequential(*(ConformerBlock(width, 8, 31) for _ in range(layers)))

    def forward(self, sound: Tensor) -> Any:
        """Scores of every class at every frame."""
        x = self.stem(sound.transpose(1, 2)[:, None]).transpose(1, 2).flatten(2)
        return self.head(self.blocks(self.widened(x)))


@architecture(_KIN, "bf16", "adamw")
def conformer(at: Place) -> Trainee:
    """12 blocks of width 512 with depthwise convolutions of 31, 48 sounds of 1,600 frames."""
    return _framed(at, Conformer(512, at.layers(12)), at.floats(at.batch(48), 80, 4 * at.tokens(400)), 1024, 4)


class WaveEncoder(nn.Module):
    """Seven convolutions over the samples of a sound, then Transformer layers with positions by a wide convolution."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = [(1, 10, 5), *[(512, 3, 2)] * 4, *[(512, 2, 2)] * 2]
        stem: list[nn.Module] = []
        for index, (first, kernel, stride) in enumerate(sizes):
            stem += [
                nn.Conv1d(first, 512, kernel, stride, bias=False),
                *([nn.GroupNorm(512, 512)] if not index else []),
                nn.GELU(),
            ]
        self.stem, self.norm = nn.Sequential(*stem), nn.LayerNorm(512)
        self.widened, self.places = nn.Linear(512, width), nn.Conv1d(width, width, 128, padding=64, groups=16)
        self.layers, self.head = (
            nn.Sequential(*(PreNormBlock(width, 12, 4 * width) for _ in range(layers))),
            nn.Linear(width, 320),
        )

    def forward(self, sound: Tensor) -> Any:
        """Scores of every unit at every frame."""
        x = self.widened(self.norm(self.stem(sound).transpose(1, 2)))
        x = x + functional.gelu(self.places(x.transpose(1, 2))[..., :-1]).transpose(1, 2)
        return self.head(self.layers(x))


@architecture(_KIN, "fp16", "adam")
def wave_encoder(at: Place) -> Trainee:
    """Seven convolutions over 64,000 samples and 12 layers of width 768, 32 sounds, GradScaler."""
    return _framed(at, WaveEncoder(768, at.layers(12)), at.floats(at.batch(32), 1, 64_000), 320, 320)


class DilatedStack(nn.Module):
    """Dilated convolutions that each add to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, padding=rate, dilation=rate) for rate in (1, 3, 5))

    def forward(self, x: Tensor) -> Any:
        """One stack."""
        for layer in self.layers:
            x = x + layer(functional.leaky_relu(x, 0.1))
        return x


@architecture(_KIN, "fp32", "adamw")
def vocoder(at: Place) -> Trainee:
    """Spectrograms to samples by four transposed convolutions over time with dilated stacks between, 96 sounds."""
    stages: list[nn.Module] = [nn.Conv1d(80, 512, 7, padding=3)]
    for index, rate in enumerate((8, 8, 2, 2)):
        width = 512 >> (index + 1)
        stages += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(2 * width, width, 2 * rate, rate, rate // 2), DilatedStack(width)]
    model = nn.Sequential(*stages, nn.LeakyReLU(0.1), nn.Conv1d(32, 1, 7, padding=3), nn.Tanh())
    frames, sound = at.floats(at.batch(96), 80, 64), at.floats(at.batch(96), 1, 64 * 256)
    return Trainee(model, lambda: functional.l1_loss(model(frames), sound))
