"""Recommenders and tabular models: many embeddings, few and narrow products."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import PreNormBlock

_KIN = "recommenders"


def tower(*widths: int) -> nn.Sequential:
    """Products with ReLU between."""
    layers: list[nn.Module] = []
    for first, second in pairwise(widths):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _clicks(at: Place, model: nn.Module, inputs: tuple[Tensor, ...]) -> Trainee:
    clicked = (at.floats(len(inputs[0])) > 0).float()
    return Trainee(model, lambda: functional.binary_cross_entropy_with_logits(model(*inputs).flatten().float(), clicked))


class Interacting(nn.Module):
    """Bags of many tables and a tower over numbers, multiplied with one another."""

    def __init__(self, tables: int, rows: int, dim: int, *, sparse: bool) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse) for _ in range(tables))
        self.below, self.above = tower(13, 512, 256, dim), tower(dim + tables * (tables + 1) // 2, 1024, 512, 256, 1)
        self.pairs = torch.tril_indices(tables + 1, tables + 1, -1)

    def forward(self, numbers: Tensor, indices: Tensor) -> Any:
        """How likely a click is."""
        below = self.below(numbers)
        looked_up = [bag(indices[:, table]) for table, bag in enumerate(self.bags)]
        every = torch.stack((below, *looked_up), 1)
        products = torch.bmm(every, every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.above(torch.cat((below, products), 1))


@architecture(_KIN, "fp32", "sgd_plain")
def dlrm_sparse(at: Place) -> Trainee:
    """26 tables of 200,000 rows of 64 with sparse gradients, bags of 8, 8,192 samples."""
    model = Interacting(26, 200_000, 64, sparse=True)
    return _clicks(at, model, (at.floats(at.batch(8192), 13), at.integers(200_000, at.batch(8192), 26, 8)))


@architecture(_KIN, "tf32", "adagrad")
def dlrm_dense(at: Place) -> Trainee:
    """12 tables of 100,000 rows of 128 with dense gradients under Adagrad, bags of 4, 65,536 samples, TF32."""
    model = Interacting(12, 100_000, 128, sparse=False)
    return _clicks(at, model, (at.floats(at.batch(65_536), 13), at.integers(100_000, at.batch(65_536), 12, 4)))


class Factorised(nn.Module):
    """A sum of weights, pairs by the square of sums, and a tower over all embeddings."""

    def __init__(self, fields: int, rows: int, dim: int) -> None:
        super().__init__()
        self.rows, self.weights, self.vectors = rows, nn.Embedding(fields * rows, 1), nn.Embedding(fields * rows, dim)
        self.tower, self.offsets = tower(fields * dim, 1024, 512, 256, 1), torch.arange(fields) * rows

    def forward(self, indices: Tensor) -> Any:
        """How likely a click is."""
        indices = indices + self.offsets
        vectors = self.vectors(indices)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(-1, keepdim=True)
        return self.weights(indices).sum(1) + pairs + self.tower(vectors.flatten(1))


@architecture(_KIN, "fp32", "adam")
def deepfm(at: Place) -> Trainee:
    """39 fields of 40,000 rows of 32 in one table with dense gradients, 65,536 samples."""
    return _clicks(at, Factorised(39, 40_000, 32), (at.integers(40_000, at.batch(65_536), 39),))


class Crossed(nn.Module):
    """Layers that multiply a product of what they get with what came in, beside a tower."""

    def __init__(self, fields: int, rows: int, dim: int, layers: int) -> None:
        super().__init__()
        width = fields * dim
        self.vectors, self.offsets = nn.Embedding(fields * rows, dim), torch.arange(fields) * rows
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.tower, self.head = tower(width, 1024, 512), nn.Linear(width + 512, 1)

    def forward(self, indices: Tensor) -> Any:
        """How likely a click is."""
        first = x = self.vectors(indices + self.offsets).flatten(1)
        for cross in self.crosses:
            x = first * cross(x) + x
        return self.head(torch.cat((x, self.tower(first)), 1))


@architecture(_KIN, "bf16", "adamw_fused")
def deep_cross(at: Place) -> Trainee:
    """26 fields of 20,000 rows of 48, four cross layers of 1,248, 65,536 samples, autocast."""
    return _clicks(at, Crossed(26, 20_000, 48, at.layers(4)), (at.integers(20_000, at.batch(65_536), 26),))


@architecture(_KIN, "tf32", "adam")
def two_towers(at: Place) -> Trainee:
    """A tower for users and one for items, scores of all pairs of a batch of 16,384, products in TF32."""
    users, items = (nn.Sequential(nn.EmbeddingBag(100_000, 128), tower(128, 512, 256, 128)) for _ in range(2))
    model, batch = nn.ModuleList((users, items)), at.batch(16_384)
    seen, shown, same = at.integers(100_000, batch, 16), at.integers(100_000, batch, 4), torch.arange(batch, device=at.device)

    def loss() -> Tensor:
        one, two = functional.normalize(users(seen), dim=-1), functional.normalize(items(shown), dim=-1)
        return functional.cross_entropy(one @ two.T / 0.05, same)

    return Trainee(model, loss)


class WideDeep(nn.Module):
    """A sparse weight per crossed feature beside a tower over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(1_000_000, 1, mode="sum")
        self.deep = nn.ModuleList(nn.Embedding(10_000, 32) for _ in range(20))
        self.tower = tower(640, 512, 256, 1)

    def forward(self, crossed: Tensor, fields: Tensor) -> Any:
        """How likely a click is."""
        looked_up = [table(fields[:, index]) for index, table in enumerate(self.deep)]
        return self.wide(crossed) + self.tower(torch.cat(looked_up, -1))


@architecture(_KIN, "fp32", "adagrad")
def wide_and_deep(at: Place) -> Trainee:
    """20 tables of 10,000 rows and a million crossed weights under Adagrad, 2,048 samples: the host takes longest."""
    batch = at.batch(2048)
    return _clicks(at, WideDeep(), (at.integers(1_000_000, batch, 10), at.integers(10_000, batch, 20)))


class NextItem(nn.Module):
    """What a user did, through a few layers, against the item that came next and one that did not."""

    def __init__(self, items: int, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, width), nn.Embedding(tokens, width)
        self.layers = nn.Sequential(*(PreNormBlock(width, 2, width, causal=True) for _ in range(layers)), nn.LayerNorm(width))

    def forward(self, done: Tensor, candidates: Tensor) -> Any:
        """A score of each candidate."""
        x = self.layers(self.items(done) + self.places.weight[: done.shape[1]])
        return (x[:, :, None] * self.items(candidates)).sum(-1)


@architecture(_KIN, "bf16", "adam")
def next_item(at: Place) -> Trainee:
    """2 layers of width 128 over 200 items of 2,048 users, autocast."""
    model, batch, tokens = NextItem(200_000, 128, at.layers(2), 200), at.batch(2048), at.tokens(200)
    done, candidates = at.integers(200_000, batch, tokens), at.integers(200_000, batch, tokens, 2)
    labels = torch.tensor([1.0, 0.0], device=at.device).expand(batch, tokens, 2)
    return Trainee(model, lambda: functional.binary_cross_entropy_with_logits(model(done, candidates).float(), labels))


@architecture(_KIN, "fp32", "adam_single")
def matrix_factors(at: Place) -> Trainee:
    """Users, items and a small tower, 256 samples: the host takes longest."""
    tables = nn.ModuleList(nn.Embedding(5_000, 32) for _ in range(4))
    head, batch = tower(64, 64, 32, 8), at.batch(256)
    last = nn.Linear(40, 1)
    model, users, items = nn.ModuleList((tables, head, last)), at.integers(5_000, batch), at.integers(5_000, batch)
    clicked = (at.floats(batch) > 0).float()

    def loss() -> Tensor:
        product = tables[0](users) * tables[1](items)
        deep = head(torch.cat((tables[2](users), tables[3](items)), -1))
        return functional.binary_cross_entropy_with_logits(last(torch.cat((product, deep), -1)).flatten(), clicked)

    return Trainee(model, loss)


class FieldTransformer(nn.Module):
    """Every column of a table is a token."""

    def __init__(self, columns: int, width: int, layers: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(columns, width) * 0.02) for _ in range(2))
        self.layers = nn.Sequential(*(PreNormBlock(width, 8, 2 * width) for _ in range(layers)))
        self.head = nn.Linear(width, 1)

    def forward(self, table: Tensor) -> Any:
        """A value of every row."""
        return self.head(self.layers(table[..., None] * self.weight + self.bias).mean(1))


@architecture(_KIN, "tf32", "adamw")
def tabular_transformer(at: Place) -> Trainee:
    """3 layers of width 192 over 100 columns, 1,024 rows, products in TF32."""
    return _clicks(at, FieldTransformer(100, 192, at.layers(3)), (at.floats(at.batch(1024), 100),))
