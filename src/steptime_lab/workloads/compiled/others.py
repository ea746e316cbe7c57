"""Recommenders, tables, graphs, signals and plain perceptrons."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.compiled.architecture import Network, Site, classes, likely, near, network
from steptime_lab.workloads.compiled.language import HeadsAttention, SmallLayer, heads_of


def _tower(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers)


class Bags(nn.Module):
    """Pooled embeddings of each table, crossed with each other and with dense features."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = _tower(13, 256, width)
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.top = nn.Sequential(_tower(pairs.shape[1] + width, 512, 256), nn.Linear(256, 1))

    def forward(self, dense: Tensor, rows: Tensor) -> Any:
        """One score per sample; `rows` is (tables, batch, lookups)."""
        bottom = self.bottom(dense)
        pooled = [bag(own) for bag, own in zip(self.bags, rows, strict=True)]
        every = torch.stack([bottom, *(each.to(bottom.dtype) for each in pooled)], 1)
        crossed = every @ every.transpose(1, 2)
        first, second = self.get_buffer("pairs")
        return self.top(torch.cat((bottom, crossed[:, first, second]), 1))


@network
def embedding_bags(at: Site) -> Network:
    """10 embedding bags of 20,000 rows, crossed: 2 and 3 layers."""
    batch, rows = at.batch(4096), at.rows(20_000)
    model = Bags(10, rows, 48)
    return Network(model, (at.floats(batch, 13), at.integers(rows, 10, batch, 8)), likely(at.floats(batch).sigmoid()))


class FieldFactors(nn.Module):
    """One table for all fields; products of pairs by sums of squares, and a tower."""

    def __init__(self, fields: int, rows: int, width: int) -> None:
        super().__init__()
        self.rows = rows
        self.table, self.linear = nn.Embedding(fields * rows, width), nn.Embedding(fields * rows, 1)
        self.tower = nn.Sequential(_tower(fields * width, 400, 400, 200), nn.Linear(200, 1))
        self.register_buffer("starts", torch.arange(fields) * rows, persistent=False)

    def forward(self, chosen: Tensor) -> Any:
        """One score per sample."""
        chosen = chosen + self.get_buffer("starts")
        found = self.table(chosen)
        pairs = 0.5 * (found.sum(1).square() - found.square().sum(1)).sum(-1)
        return pairs + self.linear(chosen).sum((1, 2)) + self.tower(found.flatten(1)).squeeze(-1)


@network
def field_factors(at: Site) -> Network:
    """Factorised pairs of 20 fields in one table of 100,000 rows: 4 layers."""
    batch, rows = at.batch(8192), at.rows(5_000)
    return Network(FieldFactors(20, rows, 24), (at.integers(rows, batch, 20),), likely(at.floats(batch).sigmoid()))


class Columns(nn.Module):
    """A token for every column of a table."""

    def __init__(self, columns: int, numbers: int, width: int, layers: int) -> None:
        super().__init__()
        self.table, self.columns = nn.Embedding(columns * 100, width), columns
        self.scale, self.shift = nn.Parameter(torch.randn(numbers, width)), nn.Parameter(torch.zeros(numbers, width))
        self.layers = nn.ModuleList(
            SmallLayer(
                width, HeadsAttention(width, 4, causal=False, bias=True), _tower(width, 2 * width, width), nn.LayerNorm, 0.1
            )
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))

    def forward(self, chosen: Tensor, numbers: Tensor) -> Any:
        """One score per row."""
        chosen = chosen + 100 * torch.arange(self.columns, device=chosen.device)
        x = torch.cat((self.table(chosen), numbers[..., None] * self.scale + self.shift), 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.amax(1))


@network
def table_columns(at: Site) -> Network:
    """A Transformer over 30 columns of a table: 3 layers of 64."""
    batch = at.batch(2048)
    model = Columns(20, 10, 64, 3)
    inputs = (at.integers(100, batch, 20), at.floats(batch, 10))
    return Network(model, inputs, likely(at.floats(batch).sigmoid()), model.layers)


class Towers(nn.Module):
    """Two towers whose outputs point the same way for pairs."""

    def __init__(self, first: int, second: int, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(_tower(first, 1024, 1024), nn.LayerNorm(1024), nn.Linear(1024, width))
        self.second = nn.Sequential(_tower(second, 1024, 512), nn.LayerNorm(512), nn.Linear(512, width))
        self.heat = nn.Parameter(torch.tensor(2.6))

    def forward(self, first: Tensor, second: Tensor) -> Any:
        """Scores of every pair."""
        a, b = functional.normalize(self.first(first), dim=-1), functional.normalize(self.second(second), dim=-1)
        return self.heat.exp() * a @ b.t()


@network
def contrasted_towers(at: Site) -> Network:
    """Two towers of 3 layers and the contrast of all pairs of 3,072 samples."""
    batch = at.batch(3072)
    labels = torch.arange(batch, device=at.device)

    def loss(scores: Tensor) -> Tensor:
        return 0.5 * (functional.cross_entropy(scores, labels) + functional.cross_entropy(scores.t(), labels))

    return Network(Towers(768, 300, 256), (at.floats(batch, 768), at.floats(batch, 300)), loss)


@network
def wide_perceptron(at: Site) -> Network:
    """Products of 3,072 with batch norms, GELU and dropout: 5 layers."""
    width, batch = 3072, at.batch(2048)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(width, 50))
    return Network(model, (at.floats(batch, width),), classes(at.integers(50, batch)))


class Messages(nn.Module):
    """What neighbours say, summed at every node, and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update, self.norm = nn.Linear(2 * width, width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Any:
        """One layer."""
        said = functional.relu(self.message(torch.cat((x[source], x[target]), -1)))
        heard = torch.zeros_like(x).index_add(0, target, said.to(x.dtype))
        return self.norm(x + functional.relu(self.update(torch.cat((x, heard), -1))))


class GraphNet(nn.Module):
    """Layers of messages."""

    def __init__(self, inputs: int, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(inputs, width), nn.Linear(width, 16)
        self.layers = nn.ModuleList(Messages(width) for _ in range(layers))

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Any:
        """Scores of every node's classes."""
        x = self.first(nodes)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.head(x)


@network
def graph_messages(at: Site) -> Network:
    """Messages along 80,000 edges of 10,000 nodes: 4 layers of 96."""
    nodes, edges = at.batch(10_000), at.batch(80_000)
    source, target = at.integers(nodes, edges), at.integers(nodes, edges)
    return Network(GraphNet(64, 96, 4), (at.floats(nodes, 64), source, target), classes(at.integers(16, nodes)))


class DilatedLayer(nn.Module):
    """A gated convolution that looks back further with every layer."""

    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        self.reach, self.near = reach, nn.Conv1d(width, 2 * width, 2, dilation=reach)
        self.out, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Any:
        """What goes on, and what goes to the end."""
        value, gate = self.near(functional.pad(x, (self.reach, 0))).chunk(2, 1)
        y = value.tanh() * gate.sigmoid()
        return x + self.out(y), self.skip(y)


class Waves(nn.Module):
    """Layers whose skips are summed."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(DilatedLayer(width, 2**at) for at in range(layers))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 64, 1))

    def forward(self, signal: Tensor) -> Any:
        """Scores of 64 levels at every time."""
        x, total = self.first(signal), None
        for layer in self.layers:
            x, skip = layer(x)
            total = skip if total is None else total + skip
        return self.last(total)


@network
def dilated_waves(at: Site) -> Network:
    """Dilated gated convolutions over a signal: 6 layers of 96 channels."""
    batch, tokens = at.batch(8), at.tokens(4096)
    return Network(Waves(96, 6), (at.floats(batch, 1, tokens),), classes(at.integers(64, batch, tokens)))


class SeparableLayer(nn.Module):
    """Norm, a gated product, a depthwise convolution over time, a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.deep, self.batch_norm = nn.Conv1d(width, width, 15, padding=7, groups=width), nn.BatchNorm1d(width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        y = functional.glu(self.wide(self.norm(x)), -1).transpose(1, 2)
        return x + self.out(functional.silu(self.batch_norm(self.deep(y))).transpose(1, 2))


class Speech(nn.Module):
    """Frames in, scores of sounds out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(80, width), nn.Linear(width, 128)
        self.layers = nn.ModuleList(SeparableLayer(width) for _ in range(layers))

    def forward(self, frames: Tensor) -> Any:
        """Of every frame."""
        x = self.first(frames)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).transpose(1, 2)


@network
def gated_frames(at: Site) -> Network:
    """Depthwise convolutions over time with gates: 6 layers of 320."""
    batch, tokens = at.batch(16), at.tokens(600)
    model = Speech(320, 6)
    return Network(model, (at.floats(batch, tokens, 80),), classes(at.integers(128, batch, tokens)), model.layers)


class Sines(nn.Module):
    """Perceptrons of sines of coordinates."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width if at else 2, width) for at in range(layers))
        self.last = nn.Linear(width, 3)

    def forward(self, places: Tensor) -> Any:
        """Colours."""
        x = places
        for layer in self.layers:
            x = torch.sin(30.0 * layer(x))
        return self.last(x)


@network
def sine_layers(at: Site) -> Network:
    """An image as sines of coordinates: 5 layers of 192 at 65,536 places."""
    batch = at.batch(65_536)
    return Network(Sines(192, 5), (at.floats(batch, 2),), near(at.floats(batch, 3)))


class Latents(nn.Module):
    """A few latents look at many inputs, then at each other."""

    def __init__(self, inputs: int, width: int, latents: int, layers: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, latents, width))
        self.both, self.query, self.out = nn.Linear(inputs, 2 * width), nn.Linear(width, width), nn.Linear(width, width)
        self.norm_inputs, self.norm = nn.LayerNorm(inputs), nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            SmallLayer(width, HeadsAttention(width, 8, causal=False, bias=True), _tower(width, 4 * width, width), nn.LayerNorm)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 30)

    def forward(self, inputs: Tensor) -> Any:
        """Scores of 30 classes."""
        x = self.latents.expand(inputs.shape[0], -1, -1)
        key, value = (heads_of(part, 4) for part in self.both(self.norm_inputs(inputs)).chunk(2, -1))
        looked = functional.scaled_dot_product_attention(heads_of(self.query(self.norm(x)), 4), key, value)
        x = x + self.out(looked.transpose(1, 2).flatten(2))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@network
def latent_reader(at: Site) -> Network:
    """96 latents that read 2,048 inputs: one look and 3 layers of 256."""
    batch = at.batch(32)
    model = Latents(64, 256, 96, 3)
    return Network(model, (at.floats(batch, at.tokens(2048), 64),), classes(at.integers(30, batch)), model.layers)
