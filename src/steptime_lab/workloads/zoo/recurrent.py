"""Recurrent and state-space models, and convolutions over time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import Perceptron, language_model, regressor

_KIN = "recurrent"


class Recurrent(nn.Module):
    """Words through layers of cuDNN."""

    def __init__(self, layer: nn.RNNBase, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(words, width), layer
        self.head = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), classes)

    def forward(self, words: Tensor) -> Any:
        """Scores at every place."""
        return self.head(self.layer(self.words(words))[0])


@architecture(_KIN, "fp32", "sgd")
def lstm_language(at: Place) -> Trainee:
    """Two layers of 1,024 over 32 texts of 128 words, a head over 32,000."""
    model = Recurrent(nn.LSTM(512, 1024, 2, batch_first=True), 32_000, 512, 32_000)
    return language_model(at, model, 32_000, 32, 128)


@architecture(_KIN, "bf16", "adam")
def gru_language(at: Place) -> Trainee:
    """Three layers of 768 over 256 texts of 64 words, autocast."""
    model = Recurrent(nn.GRU(512, 768, 3, batch_first=True), 16_000, 512, 16_000)
    return language_model(at, model, 16_000, 256, 64)


@architecture(_KIN, "fp32", "adam")
def bidirectional_tagger(at: Place) -> Trainee:
    """Two layers of 512 from both sides with dropout over 256 texts of 100 words, 20 tags."""
    layer = nn.LSTM(256, 512, 2, batch_first=True, bidirectional=True, dropout=0.2)
    model = Recurrent(layer, 20_000, 256, 20)
    words, tags = at.integers(20_000, at.batch(256), 100), at.integers(20, at.batch(256), 100)
    return Trainee(model, lambda: functional.cross_entropy(model(words).flatten(0, 1), tags.flatten()))


@architecture(_KIN, "fp32", "rmsprop")
def lstm_cells(at: Place) -> Trainee:
    """A cell of 256 written out over 24 places, 32 texts: the host takes longest."""
    words, cell, head = nn.Embedding(4_000, 128), nn.Linear(128 + 256, 4 * 256), nn.Linear(256, 4_000)
    model, text = nn.ModuleList((words, cell, head)), at.integers(4_000, at.batch(32), 24)

    def loss() -> Tensor:
        inputs = words(text)
        hidden = state = torch.zeros(len(text), 256, device=at.device)
        outs = []
        for place in range(text.shape[1]):
            enter, keep, leave, new = cell(torch.cat((inputs[:, place], hidden), -1)).chunk(4, -1)
            state = torch.sigmoid(keep) * state + torch.sigmoid(enter) * torch.tanh(new)
            hidden = torch.sigmoid(leave) * torch.tanh(state)
            outs.append(hidden)
        return functional.cross_entropy(head(torch.stack(outs, 1)).flatten(0, 1), text.flatten())

    return Trainee(model, loss)


class SelectiveScan(nn.Module):
    """A short depthwise convolution and a linear recurrence whose rates depend on the input, by sums along time."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        inner = 2 * width
        self.states, self.norm, self.mixed = states, nn.RMSNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.near = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.rates, self.sides = nn.Linear(inner, inner), nn.Linear(inner, 2 * states, bias=False)
        self.decay, self.skip = nn.Parameter(torch.rand(inner)), nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        inner, gate = self.mixed(self.norm(x)).chunk(2, -1)
        inner = functional.silu(self.near(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        enter, leave = self.sides(inner).chunk(2, -1)
        steps = functional.softplus(self.rates(inner)).float()
        # What is left of what came in at a place decays by all rates since.
        since = torch.cumsum(-steps * functional.softplus(self.decay) * 1e-3, 1)[..., None]
        driven = (steps * inner)[..., None] * enter[:, :, None, :] * torch.exp(-since)
        states = torch.cumsum(driven, 1) * torch.exp(since)
        made = (states * leave[:, :, None, :]).sum(-1).to(x.dtype) + self.skip * inner
        return x + self.out(made * functional.silu(gate))


class Scanned(nn.Module):
    """Words through scanning layers."""

    def __init__(self, layers: list[nn.Module], width: int, words: int) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(words, width), nn.Sequential(*layers)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Any:
        """Scores of every word at every place."""
        return self.head(self.norm(self.layers(self.words(words))))


@architecture(_KIN, "bf16", "adamw")
def state_space(at: Place) -> Trainee:
    """6 layers of width 512 with 16 states a channel, scanned by cumulative sums, 16 texts of 512 tokens."""
    layers: list[nn.Module] = [SelectiveScan(512, 16) for _ in range(at.layers(6))]
    return language_model(at, Scanned(layers, 512, 16_000), 16_000, 16, 512)


class TimeMix(nn.Module):
    """Keys and values weighed by how long ago they were, as running sums, with tokens mixed with the one before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix = nn.Parameter(torch.full((4, width), 0.5))
        self.decay = nn.Parameter(torch.zeros(width))
        self.key, self.value, self.gate, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        inner = self.norms[0](x)
        before = functional.pad(inner, (0, 0, 1, -1))
        key, value, gate = (
            layer(torch.lerp(before, inner, self.mix[index].to(inner.dtype)))
            for index, layer in enumerate((self.key, self.value, self.gate))
        )
        away = torch.arange(x.shape[1], device=x.device)[:, None] * torch.exp(self.decay) * 1e-3
        weights = torch.exp(key.float().clamp(max=8.0) + away)
        weighed = torch.cumsum(weights * value, 1) / torch.cumsum(weights, 1)
        x = x + self.out(torch.sigmoid(gate) * weighed.to(gate.dtype))
        inner = self.norms[1](x)
        inner = torch.lerp(functional.pad(inner, (0, 0, 1, -1)), inner, self.mix[3].to(inner.dtype))
        return x + self.down(functional.relu(self.up(inner)).square())


@architecture(_KIN, "bf16", "adam")
def weighed_sums(at: Place) -> Trainee:
    """12 layers of width 768 with running sums for attention, 12 texts of 1,024 tokens."""
    layers: list[nn.Module] = [TimeMix(768) for _ in range(at.layers(12))]
    return language_model(at, Scanned(layers, 768, 32_000), 32_000, 12, 1024)


class Retention(nn.Module):
    """Attention without a softmax, decaying with the distance, in chunks that hand a state on."""

    def __init__(self, width: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.chunk, self.norm = heads, chunk, nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.second, self.perceptron = nn.LayerNorm(width), Perceptron(width, 4 * width)
        self.rates = torch.log(1 - 2.0 ** (-5.0 - torch.arange(heads)))

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        chunk = min(self.chunk, x.shape[1])
        parts = self.mixed(self.norm(x)).unflatten(1, (-1, chunk)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(3, 1, 0, 4, 2, 5)  # (chunk, batch, head, place, size)
        places = torch.arange(chunk, device=x.device)
        apart = places[:, None] - places[None, :]
        inside = torch.exp(self.rates[:, None, None] * apart).masked_fill(apart < 0, 0.0).to(query.dtype)
        later = torch.exp(self.rates[:, None] * (chunk - 1 - places))[..., None].to(query.dtype)
        earlier = torch.exp(self.rates[:, None] * (places + 1))[..., None].to(query.dtype)
        state = torch.zeros(*key.shape[1:3], key.shape[-1], key.shape[-1], device=x.device, dtype=query.dtype)
        outs = []
        for now, known, said in zip(query, key, value, strict=True):
            outs.append((now @ known.mT * inside) @ said + (now * earlier) @ state)
            state = state * torch.exp(self.rates * chunk)[:, None, None].to(state.dtype) + (known * later).mT @ said
        made = torch.stack(outs).permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2)
        x = x + self.out(functional.layer_norm(made, made.shape[-1:]).to(x.dtype))
        return x + self.perceptron(self.second(x))


@architecture(_KIN, "pure_bf16", "adamw_fused")
def retention(at: Place) -> Trainee:
    """8 layers of width 1,024 in chunks of 256 that hand a state on, 24 texts of 1,024 tokens."""
    layers: list[nn.Module] = [Retention(1024, 8, 256) for _ in range(at.layers(8))]
    return language_model(at, Scanned(layers, 1024, 32_000), 32_000, 24, 1024)


class CausalBlock(nn.Module):
    """Two dilated convolutions that see the past alone, with dropout."""

    def __init__(self, first: int, second: int, dilation: int) -> None:
        super().__init__()
        self.past = 2 * dilation
        self.one = nn.Conv1d(first, second, 3, dilation=dilation)
        self.two = nn.Conv1d(second, second, 3, dilation=dilation)
        self.side = nn.Conv1d(first, second, 1) if first != second else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        """One block."""
        inner = x
        for layer in (self.one, self.two):
            inner = functional.dropout(functional.relu(layer(functional.pad(inner, (self.past, 0)))), 0.1)
        return functional.relu(inner + self.side(x))


@architecture(_KIN, "fp32", "adam")
def temporal_convolutions(at: Place) -> Trainee:
    """Eight blocks of width 256 with dilations to 128, 64 signals of 1,024 places."""
    widths = [32, *[256] * 8]
    blocks = [CausalBlock(first, second, 1 << level) for level, (first, second) in enumerate(pairwise(widths))]
    model = nn.Sequential(*blocks, nn.Conv1d(256, 32, 1))
    signals = at.floats(at.batch(64), 32, 1024)
    return regressor(model, signals, torch.roll(signals, -1, 2))
