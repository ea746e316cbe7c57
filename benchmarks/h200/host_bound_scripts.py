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
    source, target = (torch.arange(4 * batch, device=device) % batch for _ in range(2))

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


def small_vision_transformer(batch: int = 4, device: str = "cuda") -> Step:
    """Patches, six blocks and a mean over tokens, AdamW."""
    patches = nn.Conv2d(3, 192, 16, 16).to(device)
    blocks = nn.Sequential(*(_Block(192, 3, causal=False) for _ in range(6)), nn.LayerNorm(192), nn.Linear(192, 100)).to(device)
    x, y = torch.randn(batch, 3, 96, 96, device=device), torch.zeros(batch, dtype=torch.long, device=device)
    optimizer = torch.optim.AdamW([*patches.parameters(), *blocks.parameters()], lr=1e-3)
    return _step(lambda: functional.cross_entropy(blocks(patches(x).flatten(2).transpose(1, 2)).mean(1), y), optimizer)


class _Mixer(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.across, self.within = _mlp(tokens, 2 * tokens, tokens), _mlp(width, 2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = x + self.within(self.norms[1](x))
        return out


def mixer(batch: int = 8, device: str = "cuda") -> Step:
    """Ten mixer layers, Adam."""
    model = nn.Sequential(*(_Mixer(49, 128) for _ in range(10)), nn.Flatten(), nn.Linear(49 * 128, 10)).to(device)
    x, y = torch.randn(batch, 49, 128, device=device), torch.zeros(batch, dtype=torch.long, device=device)
    return _step(lambda: functional.cross_entropy(model(x), y), torch.optim.Adam(model.parameters()))


def encoder(batch: int = 4, device: str = "cuda") -> Step:
    """`nn.TransformerEncoder` as it comes, five layers, Adam."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 5).to(device)
    head = nn.Linear(128, 32).to(device)
    x, y = torch.randn(batch, 48, 128, device=device), torch.zeros(48 * batch, dtype=torch.long, device=device)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    return _step(lambda: functional.cross_entropy(head(model(x)).view(-1, 32), y), optimizer)


def _twice(width: int, out: int) -> nn.Sequential:
    layers = (nn.Conv2d(width, out, 3, 1, 1), nn.BatchNorm2d(out), nn.ReLU(), nn.Conv2d(out, out, 3, 1, 1), nn.ReLU())
    return nn.Sequential(*layers)


def segmenter(batch: int = 2, device: str = "cuda") -> Step:
    """Down, up and across, as U-nets do, with nearest-neighbour upsampling, Adam."""
    widths = (16, 32, 64, 128)
    down = nn.ModuleList(_twice(before, after) for before, after in pairwise((3, *widths))).to(device)
    up = nn.ModuleList(_twice(before + after, after) for before, after in pairwise(widths[::-1])).to(device)
    head = nn.Conv2d(16, 4, 1).to(device)
    x, y = torch.randn(batch, 3, 64, 64, device=device), torch.zeros(batch, 64, 64, dtype=torch.long, device=device)

    def loss() -> torch.Tensor:
        kept, inner = [], x
        for number, part in enumerate(down):
            inner = part(functional.max_pool2d(inner, 2) if number else inner)
            kept.append(inner)
        for part, beside in zip(up, kept[-2::-1], strict=True):
            inner = part(torch.cat((functional.interpolate(inner, scale_factor=2), beside), 1))
        return functional.cross_entropy(head(inner), y)

    return _step(loss, torch.optim.Adam([*down.parameters(), *up.parameters(), *head.parameters()]))


def dense_net(batch: int = 4, device: str = "cuda") -> Step:
    """Twelve layers that each see all before them, SGD with Nesterov momentum."""
    layers = nn.ModuleList(
        nn.Sequential(nn.BatchNorm2d(16 + 8 * number), nn.ReLU(), nn.Conv2d(16 + 8 * number, 8, 3, 1, 1))
        for number in range(12)
    ).to(device)
    head = nn.Linear(16 + 8 * 12, 10).to(device)
    x, y = torch.randn(batch, 16, 16, 16, device=device), torch.zeros(batch, dtype=torch.long, device=device)

    def loss() -> torch.Tensor:
        seen = x
        for layer in layers:
            seen = torch.cat((seen, layer(seen)), 1)
        return functional.cross_entropy(head(seen.mean((2, 3))), y)

    optimizer = torch.optim.SGD([*layers.parameters(), *head.parameters()], lr=0.01, momentum=0.9, nesterov=True)
    return _step(loss, optimizer)


def contrast(batch: int = 128, device: str = "cuda") -> Step:
    """Two encoders whose outputs are compared all with all, AdamW."""
    left, right = (_mlp(256, 256, 256, 256, 128).to(device) for _ in range(2))
    first, second = (torch.randn(batch, 256, device=device) for _ in range(2))
    scale, which = nn.Parameter(torch.tensor(2.0, device=device)), torch.arange(batch, device=device)

    def loss() -> torch.Tensor:
        seen, read = functional.normalize(left(first), dim=1), functional.normalize(right(second), dim=1)
        alike = scale.exp() * seen @ read.t()
        return functional.cross_entropy(alike, which) + functional.cross_entropy(alike.t(), which)

    return _step(loss, torch.optim.AdamW([*left.parameters(), *right.parameters(), scale]))


class _Gated(nn.Module):
    def __init__(self, width: int, apart: int) -> None:
        super().__init__()
        self.value, self.gate = (nn.Conv1d(width, width, 3, padding=apart, dilation=apart) for _ in range(2))
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.out(torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x)))
        return out


def waves(batch: int = 4, device: str = "cuda") -> Step:
    """Ten gated convolutions over time, ever further apart, Adam."""
    model = nn.Sequential(*(_Gated(32, 2 ** (number % 5)) for number in range(10)), nn.Conv1d(32, 16, 1)).to(device)
    x, y = torch.randn(batch, 32, 256, device=device), torch.zeros(batch, 256, dtype=torch.long, device=device)
    return _step(lambda: functional.cross_entropy(model(x), y), torch.optim.Adam(model.parameters()))


def rivals(batch: int = 64, device: str = "cuda") -> Step:
    """A generator and a discriminator, each with its Adam, trained in turns."""
    maker, judge = _mlp(32, 128, 128, 128, 64).to(device), _mlp(64, 128, 128, 128, 1).to(device)
    noise, real = torch.randn(batch, 32, device=device), torch.randn(batch, 64, device=device)
    yes, no = torch.ones(batch, 1, device=device), torch.zeros(batch, 1, device=device)
    making, judging = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    judged = functional.binary_cross_entropy_with_logits

    def step() -> None:
        made = maker(noise)
        judging.zero_grad()
        (judged(judge(real), yes) + judged(judge(made.detach()), no)).backward()
        judging.step()
        making.zero_grad()
        judged(judge(made), yes).backward()
        making.step()

    return step


def factorised(batch: int = 512, device: str = "cuda") -> Step:
    """Twelve embeddings, their products in pairs and a few layers above, Adagrad."""
    tables = nn.ModuleList(nn.Embedding(5_000, 16) for _ in range(12)).to(device)
    top = _mlp(12 * 16 + 12 * 12, 128, 64, 1).to(device)
    asked = [torch.arange(batch, device=device) for _ in range(12)]
    clicked = torch.zeros(batch, 1, device=device)

    def loss() -> torch.Tensor:
        rows = torch.stack([table(each) for table, each in zip(tables, asked, strict=True)], 1)
        pairs = torch.bmm(rows, rows.transpose(1, 2))
        seen = torch.cat((rows.flatten(1), pairs.flatten(1)), 1)
        return functional.binary_cross_entropy_with_logits(top(seen), clicked)

    return _step(loss, torch.optim.Adagrad([*tables.parameters(), *top.parameters()], lr=0.01))


# The first nine were timed in the visit that showed what a calibration has to measure (host_calibration.py); the others by
# host_bound_visit.py alone.
EXPLORED: dict[str, Callable[..., Step]] = {
    made.__name__: made
    for made in (
        deep_mlp, residual_net, small_decoder, autocast_decoder, recommender, graph_net, separable_net, adapters, denoiser,
    )
}  # fmt: skip
SCRIPTS: dict[str, Callable[..., Step]] = {
    **EXPLORED,
    **{
        made.__name__: made
        for made in (
            small_vision_transformer, mixer, encoder, segmenter, dense_net, contrast, waves, rivals, factorised,
        )
    },
}  # fmt: skip
