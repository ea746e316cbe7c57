"""Training steps so small that the host decides how long they take: plain PyTorch, written for measuring hosts alone.

Each function sets a step up and returns it, as `steptime predict FILE:FUNCTION` wants it. No model was fitted to any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

Step = Callable[[], None]
Loss = Callable[[], torch.Tensor]


def _step(loss: Loss, *optimizers: Optimizer) -> Step:
    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss().backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def deep_mlp(batch: int = 64, device: str = "cuda") -> Step:
    """Sixteen linear layers, Adam."""
    model = _mlp(*[256] * 17).to(device)
    x, y = (torch.randn(batch, 256, device=device) for _ in range(2))
    return _step(lambda: functional.mse_loss(model(x), y), torch.optim.Adam(model.parameters()))


class _Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(2))
        self.short = nn.Conv2d(width, out, 1, stride, bias=False) if stride > 1 or width != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(inner)) + self.short(x))


def residual_net(batch: int = 2, device: str = "cuda") -> Step:
    """Sixteen residual blocks on small images, SGD with momentum."""
    widths = [32] * 4 + [64] * 4 + [128] * 4 + [256] * 4
    blocks = [_Residual(before, after, 1 + (before != after)) for before, after in zip([32, *widths], widths, strict=False)]
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    model.to(device)
    x, y = torch.randn(batch, 3, 64, 64, device=device), torch.zeros(batch, dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return _step(lambda: functional.cross_entropy(model(x), y), optimizer)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.into(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = _Attention(width, heads, causal=causal)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        out: torch.Tensor = x + self.inner(self.norms[1](x))
        return out


class _Decoder(nn.Module):
    def __init__(self, words: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(_Block(width, width // 64, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def small_decoder(batch: int = 2, device: str = "cuda") -> Step:
    """A language model of eight layers, AdamW and clipping."""
    model = _Decoder(1000, 256, 8, 64).to(device)
    tokens = torch.zeros(batch, 64, dtype=torch.long, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens).view(-1, 1000), tokens.view(-1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def autocast_decoder(batch: int = 2, device: str = "cuda") -> Step:
    """The same under bf16 autocast, without clipping."""
    model = _Decoder(1000, 256, 8, 64).to(device)
    tokens = torch.zeros(batch, 64, dtype=torch.long, device=device)

    def loss() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return functional.cross_entropy(model(tokens).view(-1, 1000), tokens.view(-1))

    return _step(loss, torch.optim.AdamW(model.parameters(), lr=1e-4))


class _Recommender(nn.Module):
    def __init__(self, tables: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(10_000, 32, mode="sum") for _ in range(tables))
        self.bottom, self.top = _mlp(13, 128, 64, 32), _mlp(32 * (tables + 1), 256, 128, 1)

    def forward(self, dense: torch.Tensor, indices: list[torch.Tensor], offsets: torch.Tensor) -> torch.Tensor:
        parts = [self.bottom(dense), *(table(each, offsets) for table, each in zip(self.tables, indices, strict=True))]
        out: torch.Tensor = self.top(torch.cat(parts, 1))
        return out


def recommender(batch: int = 256, device: str = "cuda") -> Step:
    """Sixteen tables looked up one by one, SGD."""
    model = _Recommender(16).to(device)
    dense, clicked = torch.randn(batch, 13, device=device), torch.zeros(batch, 1, device=device)
    indices = [torch.zeros(8 * batch, dtype=torch.long, device=device) for _ in range(16)]
    offsets = torch.arange(0, 8 * batch, 8, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return _step(lambda: functional.binary_cross_entropy_with_logits(model(dense, indices, offsets), clicked), optimizer)


class _GraphLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        collected = torch.zeros_like(x).index_add(0, target, self.others(x)[source])
        return functional.relu(self.own(x) + collected)


def graph_net(batch: int = 512, device: str = "cuda") -> Step:
    """Eight layers that pass messages along edges, Adam."""
    layers = nn.ModuleList(_GraphLayer(64) for _ in range(8)).to(device)
    head = nn.Linear(64, 7).to(device)
    x, y = torch.randn(batch, 64, device=device), torch.zeros(batch, dtype=torch.long, device=device)
    source, target = (torch.zeros(4 * batch, dtype=torch.long, device=device) for _ in range(2))

    def loss() -> torch.Tensor:
        inner = x
        for layer in layers:
            inner = layer(inner, source, target)
        return functional.cross_entropy(head(inner), y)

    return _step(loss, torch.optim.Adam([*layers.parameters(), *head.parameters()]))


def _separable(width: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU6(),
        nn.Conv2d(width, out, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU6(),
    )


def separable_net(batch: int = 4, device: str = "cuda") -> Step:
    """Thirteen depthwise-separable blocks, RMSprop."""
    widths = [32, 64, 64, 64, 128, 128, 128, 128, 128, 128, 256, 256, 256, 256]
    blocks = [_separable(before, after, 1 + (before != after)) for before, after in pairwise(widths)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), *blocks, *head).to(device)
    x, y = torch.randn(batch, 3, 64, 64, device=device), torch.zeros(batch, dtype=torch.long, device=device)
    return _step(lambda: functional.cross_entropy(model(x), y), torch.optim.RMSprop(model.parameters(), lr=1e-3))


class _Adapted(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(x) + 0.5 * self.up(self.down(x))
        return out


def adapters(batch: int = 32, device: str = "cuda") -> Step:
    """Low-rank adapters beside twenty frozen layers, AdamW over the adapters alone."""
    layers: Iterable[nn.Module] = (layer for _ in range(20) for layer in (_Adapted(256, 8), nn.Tanh()))
    model = nn.Sequential(*layers).to(device)
    x, y = (torch.randn(batch, 256, device=device) for _ in range(2))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _step(lambda: functional.mse_loss(model(x), y), torch.optim.AdamW(trained))


class _Timed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(2))
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(2))
        self.time = nn.Linear(128, width)

    def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        inner = self.layers[0](functional.silu(self.norms[0](x))) + self.time(functional.silu(when))[:, :, None, None]
        out: torch.Tensor = x + self.layers[1](functional.silu(self.norms[1](inner)))
        return out


def denoiser(batch: int = 4, device: str = "cuda") -> Step:
    """Ten residual blocks that are told the time, as diffusion models have them, Adam."""
    blocks = nn.ModuleList(_Timed(64) for _ in range(10)).to(device)
    x, noise = (torch.randn(batch, 64, 16, 16, device=device) for _ in range(2))
    times, rates = torch.rand(batch, 1, device=device), torch.rand(64, device=device)

    def loss() -> torch.Tensor:
        angles = times * rates
        when = torch.cat((angles.sin(), angles.cos()), -1)
        inner = x + noise
        for block in blocks:
            inner = block(inner, when)
        return functional.mse_loss(inner, noise)

    return _step(loss, torch.optim.Adam(blocks.parameters()))


SCRIPTS: dict[str, Callable[..., Step]] = {
    made.__name__: made
    for made in (
        deep_mlp, residual_net, small_decoder, autocast_decoder, recommender, graph_net, separable_net, adapters, denoiser,
    )
}  # fmt: skip
