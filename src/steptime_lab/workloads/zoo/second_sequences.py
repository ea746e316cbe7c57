"""Sounds and recurrences of the second visit: written after the models were fitted, as other people write such nets."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import SECOND_VISIT, Place, Trainee, architecture
from steptime_lab.workloads.zoo.second_language import clipped

_arriving = partial(architecture, visit=SECOND_VISIT)


class TimeChannelBlock(nn.Module):
    """Depthwise over time, then over channels, with batch norm, several in a row beside a shortcut."""

    def __init__(self, first: int, second: int, kernel: int, repeat: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(repeat):
            width = first if index == 0 else second
            layers += [nn.ReLU(), nn.Dropout(0.1)] if index else []
            layers += [nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width, bias=False)]
            layers += [nn.Conv1d(width, second, 1, bias=False), nn.BatchNorm1d(second, eps=1e-3)]
        self.main = nn.Sequential(*layers)
        self.res = nn.Sequential(nn.Conv1d(first, second, 1, bias=False), nn.BatchNorm1d(second, eps=1e-3))

    def forward(self, x: Tensor) -> Any:
        """One block."""
        return functional.relu(self.main(x) + self.res(x))


@_arriving("sequences and speech", "fp32", "adamw")
def separable_speech(at: Place) -> Trainee:
    """Depthwise convolutions of 33 to 63 over time, widths 256 to 512, CTC over 29 letters, 40 sounds of 1,203 frames."""
    frames, batch = 203 if at.small else 1203, at.batch(40)
    plan = ((256, 256, 33, 3), (256, 256, 39, 3), (256, 512, 51, 3), (512, 512, 63, 3))
    stem = [nn.Conv1d(64, 256, 33, 2, 16, bias=False), nn.BatchNorm1d(256), nn.ReLU()]
    model = nn.Sequential(*stem, *(TimeChannelBlock(*each) for each in plan), nn.Conv1d(512, 30, 1))
    sounds, letters = at.floats(batch, 64, frames), at.integers(29, batch, 80) + 1
    lengths, said = torch.full((batch,), (frames + 1) // 2), torch.full((batch,), 80)

    def loss() -> Tensor:
        odds = functional.log_softmax(model(sounds).permute(2, 0, 1), -1)
        return functional.ctc_loss(odds, letters, lengths, said, zero_infinity=True)

    return Trainee(model, loss)


class GlobalNorm(nn.Module):
    """Over channels and time together, op by op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(1, width, 1)), nn.Parameter(torch.zeros(1, width, 1))

    def forward(self, x: Tensor) -> Any:
        """Of the same shape."""
        mean = x.mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        power = torch.pow(x - mean, 2).mean(dim=1, keepdim=True).mean(dim=2, keepdim=True)
        return self.gamma * (x - mean) / torch.pow(power + 1e-8, 0.5) + self.beta


class DilatedBlock(nn.Module):
    """A dilated depthwise convolution between two of one place, PReLU and norms behind; one part goes on, one is summed."""

    def __init__(self, width: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(width, hidden, 1), nn.PReLU(), GlobalNorm(hidden),
            nn.Conv1d(hidden, hidden, 3, padding=dilation, dilation=dilation, groups=hidden), nn.PReLU(), GlobalNorm(hidden),
        )  # fmt: skip
        self.res, self.skip = nn.Conv1d(hidden, width, 1), nn.Conv1d(hidden, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What goes on, and what is summed."""
        y = self.body(x)
        return x + self.res(y), self.skip(y)


class Separator(nn.Module):
    """Samples to frames by a convolution, masks from dilated blocks, and back by the transposed one."""

    def __init__(self, filters: int, width: int, hidden: int, blocks: int) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, filters, 20, 10, bias=False)
        self.decode = nn.ConvTranspose1d(filters, 1, 20, 10, bias=False)
        self.norm, self.narrow = nn.GroupNorm(1, filters), nn.Conv1d(filters, width, 1)
        self.blocks = nn.ModuleList(DilatedBlock(width, hidden, 2 ** (index % 6)) for index in range(blocks))
        self.mask = nn.Sequential(nn.PReLU(), nn.Conv1d(width, 2 * filters, 1))

    def forward(self, mixed: Tensor) -> Any:
        """Two voices of every sound."""
        frames = functional.relu(self.encode(mixed[:, None]))
        x: Tensor = self.narrow(self.norm(frames))
        skips: Tensor | float = 0.0
        for block in self.blocks:
            x, skip = block(x)
            skips = skips + skip
        masks = torch.sigmoid(self.mask(skips)).view(len(mixed), 2, -1, frames.shape[-1])
        voices = (masks * frames[:, None]).flatten(0, 1)
        return self.decode(voices).view(len(mixed), 2, -1)


def _loudness(made: Tensor, wanted: Tensor) -> Tensor:
    """Decibels of the wanted voice over what is wrong of it."""
    made, wanted = made - made.mean(-1, keepdim=True), wanted - wanted.mean(-1, keepdim=True)
    scale = (made * wanted).sum(-1, keepdim=True) / (wanted.pow(2).sum(-1, keepdim=True) + 1e-8)
    noise = made - scale * wanted
    return 10 * torch.log10(((scale * wanted).pow(2).sum(-1) + 1e-8) / (noise.pow(2).sum(-1) + 1e-8))


@_arriving("sequences and speech", "tf32", "adam")
def source_separation(at: Place) -> Trainee:
    """12 dilated depthwise blocks of 480 over frames of 20 samples, the better of two orders of voices, 13 sounds of 24,010."""
    samples = 810 if at.small else 24_010
    model = Separator(320, 12 * 11, 480, at.layers(12))
    voices = at.floats(at.batch(13), 2, samples)
    mixed = voices.sum(1)

    def loss() -> Tensor:
        made = model(mixed)
        same, swapped = _loudness(made, voices).mean(-1), _loudness(made, voices.flip(1)).mean(-1)
        return -torch.maximum(same, swapped).mean()

    return Trainee(model, loss)


class LoopedStates(nn.Module):
    """A state space whose steps depend on the input, one place after another in a loop."""

    def __init__(self, dim: int, states: int, rank: int) -> None:
        super().__init__()
        inner = 2 * dim
        self.states, self.rank = states, rank
        self.norm, self.in_proj = nn.RMSNorm(dim), nn.Linear(dim, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * states, bias=False), nn.Linear(rank, inner)
        self.a_log = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(inner, 1))
        self.d, self.out_proj = nn.Parameter(torch.ones(inner)), nn.Linear(inner, dim, bias=False)

    def scan(self, u: Tensor) -> Tensor:
        """(batch, tokens, inner) to the same."""
        delta, b, c = self.x_proj(u).split([self.rank, self.states, self.states], -1)
        delta = functional.softplus(self.dt_proj(delta))
        decay = torch.exp(torch.einsum("bld,dn->bldn", delta, -torch.exp(self.a_log)))
        added = torch.einsum("bld,bln,bld->bldn", delta, b, u)
        state = torch.zeros_like(added[:, 0])
        ys = []
        for place in range(u.shape[1]):
            state = decay[:, place] * state + added[:, place]
            ys.append(torch.einsum("bdn,bn->bd", state, c[:, place]))
        return torch.stack(ys, 1) + u * self.d

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        u, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        u = functional.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        return x + self.out_proj(self.scan(u) * functional.silu(gate))


@_arriving("recurrent", "fp32", "adamw")
def selective_scan(at: Place) -> Trainee:
    """3 layers of width 448 with 16 states a channel, scanned place by place, 6 texts of 90 tokens: the host takes longest."""
    layers = [LoopedStates(448, 16, 28) for _ in range(at.layers(3))]
    model = nn.Sequential(nn.Embedding(6_000, 448), *layers, nn.RMSNorm(448), nn.Linear(448, 6_000, bias=False))
    ids = at.integers(6_000, at.batch(6), at.tokens(90) + 1)
    return Trainee(model, lambda: functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:]))


class LinearAttention(nn.Module):
    """Features of queries and keys, states of chunks summed over those before, a triangle within each."""

    def __init__(self, dim: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.qkv, self.gate, self.out = (
            nn.Linear(dim, 3 * dim, bias=False),
            nn.Linear(dim, dim),
            nn.Linear(dim, dim, bias=False),
        )
        self.norm = nn.GroupNorm(heads, dim)

    def forward(self, x: Tensor) -> Any:
        """Of tokens to those before."""
        b, t, c = x.shape
        chunk = min(self.chunk, t)
        q, k, v = self.qkv(x).view(b, t // chunk, chunk, 3, self.heads, -1).permute(3, 0, 4, 1, 2, 5)
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        states = torch.einsum("bhnck,bhncv->bhnkv", k, v)
        before = functional.pad(states.cumsum(2)[:, :, :-1], (0, 0, 0, 0, 1, 0)).type_as(q)
        within = torch.einsum("bhnqk,bhnck->bhnqc", q, k).tril()
        y = within @ v + q @ before
        y = self.norm(y.permute(0, 2, 3, 1, 4).reshape(b * t, c)).view(b, t, c)
        return self.out(y * functional.silu(self.gate(x)))


class LinearLayer(nn.Module):
    """Linear attention, and a perceptron of squared ReLU over this and the last token."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(dim), nn.LayerNorm(dim), LinearAttention(dim, heads, 64)
        self.mix = nn.Parameter(torch.rand(dim))
        self.key, self.value = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        x = x + self.attn(self.ln1(x))
        y = self.ln2(x)
        last = functional.pad(y, (0, 0, 1, -1))
        return x + self.value(torch.relu(self.key(y * self.mix + last * (1 - self.mix))) ** 2)


@_arriving("recurrent", "bf16", "adamw")
def linear_attention(at: Place) -> Trainee:
    """10 layers of width 720 with 12 heads of 60, states of chunks of 64, tokens shifted, clipped, 10 texts of 960."""
    layers = [LinearLayer(720, 12) for _ in range(at.layers(10))]
    model = nn.Sequential(nn.Embedding(14_000, 720), nn.LayerNorm(720), *layers, nn.LayerNorm(720), nn.Linear(720, 14_000))
    ids = at.integers(14_000, at.batch(10), at.tokens(960))

    def loss() -> Tensor:
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())

    return clipped(at, model, loss, dtype=torch.bfloat16, fused=False)
