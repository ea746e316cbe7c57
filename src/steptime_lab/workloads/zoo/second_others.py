"""Recommenders, graphs and fields of the second visit: written after the models were fitted, as other people write them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import SECOND_VISIT, Place, Trainee, architecture

_arriving = partial(architecture, visit=SECOND_VISIT)


class MeanTower(nn.Module):
    """The mean of a list of padded ids beside other features, through products with batch norm."""

    def __init__(self, items: nn.Embedding, fields: tuple[int, ...], dim: int) -> None:
        super().__init__()
        self.items, self.fields = items, nn.ModuleList(nn.Embedding(rows, 20) for rows in fields)
        width = items.embedding_dim + 20 * len(fields)
        self.net = nn.Sequential(nn.Linear(width, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Dropout(0.1), nn.Linear(300, dim))

    def forward(self, seen: Tensor, fields: Tensor) -> Any:
        """A vector per sample."""
        real = (seen > 0).float().unsqueeze(-1)
        mean = (self.items(seen) * real).sum(1) / real.sum(1).clamp(min=1.0)
        named = [table(fields[:, index]) for index, table in enumerate(self.fields)]
        return self.net(torch.cat([mean, *named], dim=1))


@_arriving("recommenders", "tf32", "adam")
def sampled_softmax(at: Place) -> Trainee:
    """A tower over means of 40 items of 48 numbers, 700 drawn negatives corrected by their odds, 6,000 users, TF32."""
    rows, drawn, batch = 300_000, 700, at.batch(6_000)
    items, out = nn.Embedding(rows, 48, padding_idx=0), nn.Embedding(rows, 64)
    users = MeanTower(items, (900, 24, 7_000), 64)
    model = nn.ModuleList((users, out))
    seen, fields, clicked = at.integers(rows, batch, 40), at.integers(24, batch, 3), at.integers(rows, batch)
    odds = torch.log(at.floats(rows).abs() + 0.1)

    def loss() -> Tensor:
        user = users(seen, fields)
        others = torch.randint(rows, (drawn,), device=at.device)
        right = (user * out(clicked)).sum(-1, keepdim=True) - odds[clicked].unsqueeze(1)
        wrong = user @ out(others).t() - odds[others]
        wrong = wrong.masked_fill(clicked[:, None] == others[None], -1e4)
        return functional.cross_entropy(torch.cat((right, wrong), 1), torch.zeros_like(clicked))

    return Trainee(model, loss)


class Dice(nn.Module):
    """An activation that bends where a batch norm says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn, self.alpha = nn.BatchNorm1d(width, eps=1e-8), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Any:
        """Of the same shape."""
        gate = torch.sigmoid(self.bn(x.reshape(-1, x.shape[-1])).view_as(x))
        return self.alpha * (1 - gate) * x + gate * x


class Interest(nn.Module):
    """What a user did, weighed by a net that compares each of it with what is shown."""

    def __init__(self, items: int, kinds: int, dim: int) -> None:
        super().__init__()
        self.item, self.kind, self.user = nn.Embedding(items, dim), nn.Embedding(kinds, dim), nn.Embedding(80_000, dim)
        self.unit = nn.Sequential(nn.Linear(8 * dim, 80), Dice(80), nn.Linear(80, 40), Dice(40), nn.Linear(40, 1))
        self.top = nn.Sequential(nn.Linear(5 * dim, 200), Dice(200), nn.Linear(200, 80), Dice(80), nn.Linear(80, 1))

    def forward(self, user: Tensor, shown: tuple[Tensor, Tensor], done: tuple[Tensor, Tensor], length: Tensor) -> Any:
        """How likely a click is."""
        query = torch.cat((self.item(shown[0]), self.kind(shown[1])), -1)
        keys = torch.cat((self.item(done[0]), self.kind(done[1])), -1)
        queries = query.unsqueeze(1).expand(-1, keys.shape[1], -1)
        scores = self.unit(torch.cat([queries, keys, queries - keys, queries * keys], dim=-1)).squeeze(-1)
        real = torch.arange(keys.shape[1], device=keys.device)[None] < length[:, None]
        weights = torch.where(real, scores, torch.full_like(scores, -(2**15))).softmax(-1)
        interest = torch.bmm(weights.unsqueeze(1), keys).squeeze(1)
        return self.top(torch.cat([self.user(user), query, interest], -1)).squeeze(-1)


@_arriving("recommenders", "fp32", "adam")
def interest_network(at: Place) -> Trainee:
    """What 7,000 users did, 70 items of 2 by 18 numbers, compared with what is shown, odd activations, decayed tables."""
    batch = at.batch(7_000)
    model = Interest(120_000, 1_500, 18)
    user, shown = at.integers(80_000, batch), (at.integers(120_000, batch), at.integers(1_500, batch))
    done = (at.integers(120_000, batch, 70), at.integers(1_500, batch, 70))
    length, clicked = at.integers(70, batch) + 1, (at.floats(batch) > 0).float()

    def loss() -> Tensor:
        odds = model(user, shown, done, length)
        decay = model.item(shown[0]).pow(2).sum() + model.user(user).pow(2).sum()
        value: Tensor = functional.binary_cross_entropy(torch.sigmoid(odds), clicked) + 1e-6 * decay
        return value

    return Trainee(model, loss)


class EdgeMessages(nn.Module):
    """Neighbours with their bonds, summed, through a perceptron with batch norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bonds = nn.ModuleList(nn.Embedding(rows, dim) for rows in (6, 3))
        self.eps, self.norm = nn.Parameter(torch.zeros(1)), nn.BatchNorm1d(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.BatchNorm1d(2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, edges: Tensor, bonds: Tensor) -> Any:
        """One layer."""
        bond = self.bonds[0](bonds[:, 0]) + self.bonds[1](bonds[:, 1])
        message = functional.relu(x[edges[0]] + bond)
        summed = torch.zeros_like(x).scatter_add_(0, edges[1][:, None].expand_as(message), message)
        return self.norm(self.mlp((1 + self.eps) * x + summed))


class Molecules(nn.Module):
    """Atoms by several tables, layers with a node that all of a graph talk to, the mean and the largest of every graph."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.atoms = nn.ModuleList(nn.Embedding(rows, dim) for rows in (119, 5, 12, 12, 10))
        self.layers = nn.ModuleList(EdgeMessages(dim) for _ in range(layers))
        self.virtual = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)) for _ in range(layers)
        )
        self.start, self.head = nn.Parameter(torch.zeros(1, dim)), nn.Linear(2 * dim, 128)

    def forward(self, atoms: Tensor, edges: Tensor, bonds: Tensor, graph: Tensor, graphs: int) -> Any:
        """Scores of 128 tests per graph."""
        x = torch.stack([table(atoms[:, index]) for index, table in enumerate(self.atoms)]).sum(0)
        common = self.start.expand(graphs, -1)
        count = torch.zeros(graphs, device=x.device).index_add_(0, graph, torch.ones_like(graph, dtype=x.dtype))
        for layer, virtual in zip(self.layers, self.virtual, strict=True):
            x = functional.dropout(functional.relu(layer(x + common[graph], edges, bonds)), 0.2, self.training)
            common = common + virtual(common + torch.zeros_like(common).index_add_(0, graph, x))
        mean = torch.zeros_like(common).index_add_(0, graph, x) / count.clamp(min=1)[:, None]
        index = graph[:, None].expand_as(x)
        most = torch.full_like(common, -1e4).scatter_reduce(0, index, x, "amax", include_self=True)
        return self.head(torch.cat((mean, most), -1))


@_arriving("graphs and others", "fp32", "adam")
def molecules(at: Place) -> Trainee:
    """5 layers of width 300 over 900 graphs of 26 atoms and 56 bonds, a node that all talk to, 128 tests, not all known."""
    graphs = at.batch(900)
    nodes, edges = 26 * graphs, 56 * graphs
    model = Molecules(300, at.layers(5))
    graph = torch.arange(graphs, device=at.device).repeat_interleave(26)
    start = torch.arange(graphs, device=at.device).repeat_interleave(56) * 26
    ends = torch.stack((start + at.integers(26, edges), start + at.integers(26, edges)))
    atoms, bonds = at.integers(5, nodes, 5), at.integers(3, edges, 2)
    known, wanted = (at.floats(graphs, 128) > 0).float(), (at.floats(graphs, 128) > 0).float()

    def loss() -> Tensor:
        odds = model(atoms, ends, bonds, graph, graphs)
        each = functional.binary_cross_entropy_with_logits(odds, wanted, reduction="none")
        return (each * known).sum() / known.sum()

    return Trainee(model, loss)


class HashGrid(nn.Module):
    """Eight corners of a cell on each of several grids, looked up by a hash and mixed by how near they are."""

    def __init__(self, levels: int, rows: int, features: int) -> None:
        super().__init__()
        self.rows, self.sizes = rows, [int(16 * 1.45**level) for level in range(levels)]
        self.tables = nn.ModuleList(nn.Embedding(rows, features) for _ in range(levels))
        self.primes = (1, 2_654_435_761, 805_459_861)
        self.corners = torch.tensor([[i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(8)])

    def forward(self, x: Tensor) -> Any:
        """Features of all levels of every point."""
        outs = []
        for size, table in zip(self.sizes, self.tables, strict=True):
            scaled = x * size
            floor = scaled.floor()
            near = (scaled - floor).unsqueeze(1)
            places = floor.long().unsqueeze(1) + self.corners
            hashed = places[..., 0] * self.primes[0] ^ places[..., 1] * self.primes[1] ^ places[..., 2] * self.primes[2]
            weight = torch.where(self.corners.bool(), near, 1 - near).prod(-1, keepdim=True)
            outs.append((table(hashed % self.rows) * weight).sum(1))
        return torch.cat(outs, -1)


@_arriving("graphs and others", "fp16", "adam")
def hash_grid(at: Place) -> Trainee:
    """8 grids of 60,000 rows of 2 numbers by a hash, a net of 64, colours along 8,500 rays of 70 points, GradScaler."""
    rays, points = at.batch(8500), 70
    grid = HashGrid(at.layers(8), 60_000, 2)
    density = nn.Sequential(nn.Linear(2 * at.layers(8), 64), nn.ReLU(), nn.Linear(64, 16))
    colour = nn.Sequential(nn.Linear(16 + 9, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    model = nn.ModuleList((grid, density, colour))
    places, towards = torch.rand(rays * points, 3, device=at.device), at.floats(rays, 9)
    steps, wanted = torch.rand(rays, points, device=at.device), at.floats(rays, 3)

    def loss() -> Tensor:
        inner = density(grid(places))
        thick = functional.softplus(inner[:, 0].float()).view(rays, points) * steps
        seen = torch.cat((inner, towards.repeat_interleave(points, 0)), -1)
        shade = torch.sigmoid(colour(seen).float()).view(rays, points, 3)
        through = torch.exp(-torch.cumsum(functional.pad(thick, (1, 0)), -1))[:, :-1]
        weights = through * (1 - torch.exp(-thick))
        return functional.smooth_l1_loss((weights.unsqueeze(-1) * shade).sum(1), wanted)

    return Trainee(model, loss)
