"""Graphs, mixtures of experts, and what is kin of nothing else here."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import PreNormBlock, SelfAttention, classifier, convolved, language_model, regressor

_KIN = "graphs and others"


class Edges:
    """A graph of random edges, from each to another node."""

    def __init__(self, at: Place, nodes: int, edges: int) -> None:
        self.nodes = 200 if at.small else nodes
        count = 1000 if at.small else edges
        self.source, self.target = at.integers(self.nodes, count), at.integers(self.nodes, count)


class Convolved(nn.Module):
    """Sums over neighbours, scaled by degrees."""

    def __init__(self, widths: tuple[int, ...], edges: Edges) -> None:
        super().__init__()
        self.edges = edges
        self.layers = nn.ModuleList(nn.Linear(first, second) for first, second in pairwise(widths))
        ones = torch.ones(len(edges.source), device=edges.source.device)
        degree = torch.zeros(edges.nodes, device=ones.device).index_add_(0, edges.target, ones).clamp(min=1.0)
        self.scale = (degree[edges.source] * degree[edges.target]).rsqrt()[:, None]

    def forward(self, x: Tensor) -> Any:
        """Scores of every node."""
        for index, layer in enumerate(self.layers):
            x = layer(functional.dropout(functional.relu(x), 0.5, self.training) if index else x)
            x = torch.zeros_like(x).index_add(0, self.edges.target, x[self.edges.source] * self.scale.to(x.dtype))
        return x


@architecture(_KIN, "fp32", "adam")
def graph_convolution(at: Place) -> Trainee:
    """Three layers of width 256 over 100,000 nodes and a million edges, by index_add."""
    edges = Edges(at, 100_000, 1_000_000)
    return classifier(at, Convolved((128, 256, 256, 47), edges), at.floats(edges.nodes, 128), 47)


class GraphAttention(nn.Module):
    """Weights over the neighbours of a node by a softmax that is scattered."""

    def __init__(self, first: int, heads: int, size: int, edges: Edges) -> None:
        super().__init__()
        self.heads, self.edges, self.values = heads, edges, nn.Linear(first, heads * size, bias=False)
        self.from_source, self.to_target = (nn.Parameter(torch.randn(heads, size) * 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        """Every node anew."""
        source, target, nodes = self.edges.source, self.edges.target, self.edges.nodes
        values = self.values(x).unflatten(-1, (self.heads, -1))
        one, two = (values * self.from_source).sum(-1), (values * self.to_target).sum(-1)
        scores = functional.leaky_relu(one[source] + two[target], 0.2)
        index = target[:, None].expand_as(scores)
        most = torch.full((nodes, self.heads), -1e9, device=x.device, dtype=scores.dtype).scatter_reduce(
            0, index, scores, "amax"
        )
        weights = torch.exp(scores - most[target])
        total = torch.zeros(nodes, self.heads, device=x.device, dtype=scores.dtype).scatter_add(0, index, weights)
        messages = values[source] * (weights / total[target].clamp(min=1e-6))[..., None]
        return torch.zeros_like(values).index_add(0, target, messages).flatten(1)


@architecture(_KIN, "fp32", "adam")
def graph_attention(at: Place) -> Trainee:
    """Two layers of 8 heads of 32 over 50,000 nodes and 500,000 edges, softmax by scatter."""
    edges = Edges(at, 50_000, 500_000)
    model = nn.Sequential(GraphAttention(128, 8, 32, edges), nn.ELU(), GraphAttention(256, 8, 32, edges), nn.Linear(256, 40))
    return classifier(at, model, at.floats(edges.nodes, 128), 40)


class SampledNeighbours(nn.Module):
    """Means over a fixed number of sampled neighbours, two hops out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(256, 256), nn.Linear(512, 256), nn.Linear(256, 172)

    def forward(self, features: Tensor, seeds: Tensor, near: Tensor, far: Tensor) -> Any:
        """Scores of the seeds."""
        own = torch.cat((features[seeds], features[near].mean(1)), -1)
        around = torch.cat((features[near], features[far].mean(2)), -1)
        hidden = [functional.normalize(functional.relu(self.one(x)), dim=-1) for x in (own, around)]
        return self.head(functional.relu(self.two(torch.cat((hidden[0], hidden[1].mean(1)), -1))))


@architecture(_KIN, "tf32", "adam")
def sampled_graph(at: Place) -> Trainee:
    """32,768 seeds with 15 neighbours and 10 of each, features of 128 gathered from a million nodes, TF32."""
    batch, nodes = at.batch(32_768), 1_000 if at.small else 1_000_000
    model, features, labels = SampledNeighbours(), at.floats(nodes, 128), at.integers(172, batch)
    seeds, near, far = at.integers(nodes, batch), at.integers(nodes, batch, 15), at.integers(nodes, batch, 15, 10)
    return Trainee(model, lambda: functional.cross_entropy(model(features, seeds, near, far), labels))


class Experts(nn.Module):
    """Tokens go to two of several perceptrons, each of which takes so many at most."""

    def __init__(self, width: int, inner: int, experts: int, *, capacity: float = 1.25) -> None:
        super().__init__()
        self.experts, self.capacity, self.router = experts, capacity, nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * 0.02)

    def forward(self, x: Tensor) -> Any:
        """Of every token, as far as there is room."""
        tokens = x.flatten(0, 1)
        weights, chosen = torch.softmax(self.router(tokens).float(), -1).topk(2, -1)
        room = int(self.capacity * 2 * len(tokens) / self.experts)
        hot = functional.one_hot(chosen.T.flatten(), self.experts)
        place = (torch.cumsum(hot, 0) * hot).sum(-1) - 1
        fits = place < room
        slot = chosen.T.flatten() * room + place.clamp(max=room - 1)
        copied = tokens.repeat(2, 1) * fits[:, None]
        held = torch.zeros(self.experts * room, x.shape[-1], device=x.device, dtype=x.dtype).index_add(0, slot, copied)
        inner = functional.gelu(torch.bmm(held.view(self.experts, room, -1), self.up))
        made = torch.bmm(inner, self.down).flatten(0, 1)[slot] * (weights.T.flatten() * fits)[:, None].to(x.dtype)
        return made.view(2, *x.shape).sum(0)


class ExpertBlock(nn.Module):
    """Attention, then experts."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.experts = SelfAttention(width, heads, causal=True), Experts(width, 4 * width, experts)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        x = x + self.attention(self.first(x))
        return x + self.experts(self.second(x))


@architecture(_KIN, "pure_bf16", "adamw_fused")
def mixture_of_experts(at: Place) -> Trainee:
    """6 layers of width 1,024 with 8 experts of which each token has two, with room for a quarter more, 8 texts of 1,024."""
    layers = [ExpertBlock(1024, 16, 8) for _ in range(at.layers(6))]
    model = nn.Sequential(nn.Embedding(32_000, 1024), *layers, nn.LayerNorm(1024), nn.Linear(1024, 32_000, bias=False))
    return language_model(at, model, 32_000, 8, 1024)


class Radiance(nn.Module):
    """Points and directions, as waves, to a density and a colour."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(layer for first in (60, 256, 256, 256) for layer in (nn.Linear(first, 256), nn.ReLU())))
        self.second = nn.Sequential(*(layer for first in (316, 256, 256) for layer in (nn.Linear(first, 256), nn.ReLU())))
        self.density, self.colour = nn.Linear(256, 1), nn.Sequential(nn.Linear(256 + 24, 128), nn.ReLU(), nn.Linear(128, 3))

    def forward(self, points: Tensor, directions: Tensor) -> Any:
        """The colour of every ray, from its points."""
        encoded, ahead = waves(points, 10), waves(directions, 4).expand(-1, points.shape[1], -1)
        inner = self.second(torch.cat((self.first(encoded), encoded), -1))
        opaque = 1 - torch.exp(-functional.softplus(self.density(inner)[..., 0].float()) * 0.05)
        left = torch.cumprod(torch.cat((torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-10), 1), 1)[:, :-1]
        return ((opaque * left)[..., None] * torch.sigmoid(self.colour(torch.cat((inner, ahead), -1)))).sum(1)


def waves(x: Tensor, count: int) -> Tensor:
    """Sines and cosines at doubling rates."""
    turns = x[..., None] * (2.0 ** torch.arange(count, device=x.device))
    return torch.cat((turns.sin(), turns.cos()), -1).flatten(-2)


@architecture(_KIN, "fp16", "adam")
def radiance_field(at: Place) -> Trainee:
    """8,192 rays of 128 points through nine layers of 256, GradScaler."""
    model, rays = Radiance(), at.batch(8192)
    points, directions, wanted = at.floats(rays, 128, 3), at.floats(rays, 1, 3), at.floats(rays, 3)
    return Trainee(model, lambda: functional.mse_loss(model(points, directions), wanted))


class Spectral(nn.Module):
    """Low frequencies multiplied by learnt weights, beside a convolution of one place."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes, self.side = modes, nn.Conv2d(width, width, 1)
        self.weights = nn.Parameter(torch.randn(2, width, width, modes, modes, 2) / width**2)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        waves_of_x = torch.fft.rfft2(x)
        weights = torch.view_as_complex(self.weights)
        out = torch.zeros_like(waves_of_x)
        for index, rows in enumerate((slice(None, self.modes), slice(-self.modes, None))):
            out[:, :, rows, : self.modes] = torch.einsum(
                "bixy,ioxy->boxy", waves_of_x[:, :, rows, : self.modes], weights[index]
            )
        return functional.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.side(x))


@architecture(_KIN, "fp32", "adam")
def neural_operator(at: Place) -> Trainee:
    """Four layers of width 64 by FFT, 16 modes, 32 fields of 128 by 128."""
    layers = [Spectral(64, 16) for _ in range(at.layers(4))]
    model = nn.Sequential(nn.Conv2d(3, 64, 1), *layers, nn.Conv2d(64, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1))
    return regressor(model, at.images(32, 128), at.images(32, 128, 1))


class PointCloud(nn.Module):
    """The same layers for every point, and the largest of each channel."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 256, 1024)
        layers: list[nn.Module] = []
        for first, second in pairwise(widths):
            layers += [nn.Conv1d(first, second, 1), nn.BatchNorm1d(second), nn.ReLU()]
        self.points = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 40))

    def forward(self, points: Tensor) -> Any:
        """Scores of every class."""
        return self.head(self.points(points).amax(-1))


@architecture(_KIN, "tf32", "adam")
def point_cloud(at: Place) -> Trainee:
    """Convolutions of one place over 256 clouds of 2,048 points, widths to 1,024."""
    return classifier(at, PointCloud(), at.floats(at.batch(256), 3, 2048), 40)


@architecture(_KIN, "bf16", "adamw")
def contrastive(at: Place) -> Trainee:
    """An encoder of images and one of texts, scores of all pairs of 256, autocast."""
    patches = nn.Conv2d(3, 512, 16, 16)
    images = nn.Sequential(*(PreNormBlock(512, 8, 2048) for _ in range(at.layers(8))))
    texts = nn.Sequential(nn.Embedding(16_000, 512), *(PreNormBlock(512, 8, 2048, causal=True) for _ in range(at.layers(6))))
    heat = nn.Linear(1, 1)
    model, batch = nn.ModuleList((patches, images, texts, heat)), at.batch(256)
    seen, said, same = at.images(256, 128), at.integers(16_000, batch, 77), torch.arange(batch, device=at.device)

    def loss() -> Tensor:
        one = functional.normalize(images(patches(seen).flatten(2).transpose(1, 2)).mean(1), dim=-1)
        two = functional.normalize(texts(said)[:, -1], dim=-1)
        scores = one @ two.T * heat.weight.exp()
        return (functional.cross_entropy(scores, same) + functional.cross_entropy(scores.T, same)) / 2

    return Trainee(model, loss)


@architecture(_KIN, "fp32", "adam")
def policy_gradient(at: Place) -> Trainee:
    """A convnet with a head for actions and one for values, clipped ratios, an entropy, 64 frames: the host takes longest."""
    body = nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 49, 512), nn.ReLU(),
    )  # fmt: skip
    acts, values = nn.Linear(512, 6), nn.Linear(512, 1)
    model, frames = nn.ModuleList((body, acts, values)), at.images(64, 84, 4)
    action, earned, before = at.integers(6, len(frames)), at.floats(len(frames)), -at.floats(len(frames)).abs()

    def loss() -> Tensor:
        inner = body(frames)
        odds = functional.log_softmax(acts(inner), -1)
        value = values(inner)[:, 0]
        gain = (earned - value).detach()
        ratio = torch.exp(odds.gather(1, action[:, None])[:, 0] - before)
        gained = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = -(odds.exp() * odds).sum(-1).mean()
        return 0.5 * functional.mse_loss(value, earned) - gained - 0.01 * entropy

    return Trainee(model, loss)


class Siamese(nn.Module):
    """A convnet with a head, and a copy of its weights that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (
            nn.Sequential(
                convolved(3, 64, 3, 2), nn.BatchNorm2d(64), nn.ReLU(), convolved(64, 128, 3, 2), nn.BatchNorm2d(128), nn.ReLU(),
                convolved(128, 256, 3, 2), nn.BatchNorm2d(256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 256),
            )
            for _ in range(2)
        )  # fmt: skip
        self.guess = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))

    def forward(self, one: Tensor, two: Tensor) -> Any:
        """How far the guess of one view is from the other view, and the other way round."""
        with torch.no_grad():
            targets = [self.target(view) for view in (two, one)]
        guesses = [self.guess(self.online(view)) for view in (one, two)]
        likes = [functional.cosine_similarity(guess, target, dim=-1) for guess, target in zip(guesses, targets, strict=True)]
        return 2 - torch.stack(likes).sum(0).mean()


@architecture(_KIN, "bf16", "sgd")
def self_supervised(at: Place) -> Trainee:
    """Two views of 1,024 images of 64 pixels, a target network without gradients."""
    model, one, two = Siamese(), at.images(1024, 64), at.images(1024, 64)
    return Trainee(model, lambda: model(one, two))
