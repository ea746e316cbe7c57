"""Vision transformers, mixers and others without a convolution but at their stem."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import CHANNELS_LAST, Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import (
    CrossAttention,
    Perceptron,
    PreNormBlock,
    SelfAttention,
    classifier,
    convolved,
    split_heads,
)
from steptime_lab.workloads.zoo.layers import joined_heads as joined

_KIN = "vision transformers"


class Patched(nn.Module):
    """Patches of an image as tokens, with a class token and learnt places, through layers."""

    def __init__(self, width: int, patch: int, size: int, layers: list[nn.Module], tokens: int = 1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.extra = nn.Parameter(torch.zeros(1, tokens, width))
        self.places = nn.Parameter(torch.randn(1, tokens + (size // patch) ** 2, width) * 0.02)
        self.layers, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Any:
        """Scores of every class."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.extra.expand(len(x), -1, -1).to(x.dtype), x), 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


@architecture(_KIN, "bf16", "adamw_fused")
def vit_base(at: Place) -> Trainee:
    """12 layers of width 768, patches of 16, 128 images."""
    layers: list[nn.Module] = [PreNormBlock(768, 12, 3072) for _ in range(at.layers(12))]
    return classifier(at, Patched(768, 16, 224, layers), at.images(128, 224))


@architecture(_KIN, "tf32", "adamw")
def deit_small(at: Place) -> Trainee:
    """12 layers of width 384 with two tokens more, products in TF32, 128 images."""
    layers: list[nn.Module] = [PreNormBlock(384, 6, 1536) for _ in range(at.layers(12))]
    return classifier(at, Patched(384, 16, 224, layers, tokens=2), at.images(128, 224))


@architecture(_KIN, "fp32", "adamw")
def vit_tiny(at: Place) -> Trainee:
    """6 layers of width 192, 4 images of 96 pixels: the host takes longest."""
    layers: list[nn.Module] = [PreNormBlock(192, 3, 768) for _ in range(at.layers(6))]
    return classifier(at, Patched(192, 16, 96, layers), at.images(4, 96))


def windows(x: Tensor, size: int) -> Tensor:
    """(batch, height, width, channels) to (batch x windows, size x size, channels)."""
    batch, height, width, channels = x.shape
    x = x.view(batch, height // size, size, width // size, size, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, channels)


def unwindowed(x: Tensor, size: int, height: int, width: int) -> Tensor:
    """And back."""
    x = x.view(-1, height // size, width // size, size, size, x.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, height, width, x.shape[-1])


class WindowBlock(nn.Module):
    """Attention within windows, every other time of an image rolled by half a window, with a bias by places."""

    def __init__(self, width: int, heads: int, size: int, shift: int) -> None:
        super().__init__()
        self.heads, self.size, self.shift = heads, size, shift
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros((2 * size - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None, :] + size - 1
        self.index = apart[0] * (2 * size - 1) + apart[1]
        self.perceptron = Perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        height, width = x.shape[1:3]
        inner = self.first(x)
        if self.shift:
            inner = torch.roll(inner, (-self.shift, -self.shift), (1, 2))
        parts = windows(inner, self.size)
        query, key, value = (split_heads(part, self.heads) for part in self.mixed(parts).chunk(3, -1))
        bias = self.bias[self.index].permute(2, 0, 1)[None]
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
        attended = self.out(joined(torch.softmax(scores, -1).to(value.dtype) @ value))
        inner = unwindowed(attended, self.size, height, width)
        if self.shift:
            inner = torch.roll(inner, (self.shift, self.shift), (1, 2))
        x = x + inner
        return x + self.perceptron(self.second(x))


class Merging(nn.Module):
    """Four neighbours become one of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.narrow = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Any:
        """Half as high and wide."""
        parts = (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2])
        return self.narrow(self.norm(torch.cat(parts, -1)))


class Windowed(nn.Module):
    """Stages of window attention."""

    def __init__(self, depths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        stages: list[nn.Module] = []
        now = width
        for stage, depth in enumerate(depths):
            now = width << stage
            stages += [Merging(now // 2)] if stage else []
            stages += [WindowBlock(now, now // 32, 7, 3 * (index % 2)) for index in range(depth)]
        self.stages, self.last, self.head = nn.Sequential(*stages), nn.LayerNorm(now), nn.Linear(now, 1000)

    def forward(self, images: Tensor) -> Any:
        """Scores of every class."""
        x = self.norm(self.patches(images).permute(0, 2, 3, 1))
        return self.head(self.last(self.stages(x)).mean((1, 2)))


@architecture(_KIN, "bf16", "adamw")
def swin_tiny(at: Place) -> Trainee:
    """Windows of 7, rolled every other time, widths 96 to 768, 128 images."""
    return classifier(at, Windowed((2, 2, 6, 2), 96), at.images(128, 224))


class BlockGrid(nn.Module):
    """A depthwise convolution block, then attention within blocks and over a grid."""

    def __init__(self, first: int, width: int, stride: int, size: int = 7) -> None:
        super().__init__()
        self.size = size
        self.convolution = nn.Sequential(
            nn.BatchNorm2d(first), convolved(first, 4 * width, 1), nn.BatchNorm2d(4 * width), nn.GELU(),
            convolved(4 * width, 4 * width, 3, stride, groups=4 * width), nn.BatchNorm2d(4 * width), nn.GELU(),
            nn.Conv2d(4 * width, width, 1),
        )  # fmt: skip
        self.side = nn.Sequential(nn.AvgPool2d(stride), nn.Conv2d(first, width, 1)) if stride > 1 else nn.Identity()
        self.block, self.grid = (PreNormBlock(width, width // 32, 4 * width) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        """One block, channels first."""
        x = self.convolution(x) + self.side(x)
        height, width = x.shape[2:]
        x = unwindowed(self.block(windows(x.permute(0, 2, 3, 1), self.size)), self.size, height, width)
        rows, columns = height // self.size, width // self.size
        # A grid of as many cells as a window has, each with a token of every window.
        grid = x.view(-1, self.size, rows, self.size, columns, x.shape[-1]).permute(0, 2, 4, 1, 3, 5)
        grid = self.grid(grid.reshape(-1, self.size * self.size, x.shape[-1]))
        grid = grid.view(-1, rows, columns, self.size, self.size, x.shape[-1]).permute(0, 5, 3, 1, 4, 2)
        return grid.reshape(-1, x.shape[-1], height, width)


@architecture(_KIN, "bf16", "adamw")
def maxvit_tiny(at: Place) -> Trainee:
    """Five blocks of convolution, block and grid attention, widths 64 to 512, 64 images."""
    sizes = ((64, 64, 2), (64, 128, 2), (128, 256, 2), (256, 256, 1), (256, 512, 2))
    stem = [convolved(3, 64, 3, 2), nn.BatchNorm2d(64), nn.GELU(), convolved(64, 64, 3)]
    model = nn.Sequential(
        *stem, *(BlockGrid(*size) for size in sizes), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)
    )
    return classifier(at, model, at.images(64, 224))


class MixerBlock(nn.Module):
    """A perceptron over tokens, then one over channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = Perceptron(tokens, tokens * 2), Perceptron(width, width * 4)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x))


@architecture(_KIN, "fp16", "adamw")
def mlp_mixer(at: Place) -> Trainee:
    """12 layers of width 768 over 196 patches, 128 images, GradScaler."""
    layers: list[nn.Module] = [MixerBlock(197, 768) for _ in range(at.layers(12))]
    return classifier(at, Patched(768, 16, 224, layers), at.images(128, 224))


class ClassAttention(nn.Module):
    """Layers with a learnt scale each; then the class token alone looks at the others."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, width, 16, 16), nn.Parameter(torch.zeros(1, 1, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.attention = nn.ModuleList(SelfAttention(width, heads) for _ in range(layers))
        self.perceptrons = nn.ModuleList(Perceptron(width, 4 * width) for _ in range(layers))
        self.scales = nn.Parameter(torch.full((2 * layers, width), 1e-4))
        self.looks = nn.ModuleList(CrossAttention(width, heads) for _ in range(2))
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Any:
        """Scores of every class."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        for index, (attention, perceptron) in enumerate(zip(self.attention, self.perceptrons, strict=True)):
            x = x + self.scales[2 * index] * attention(self.norms[2 * index](x))
            x = x + self.scales[2 * index + 1] * perceptron(self.norms[2 * index + 1](x))
        token = self.token.expand(len(x), -1, -1).to(x.dtype)
        for look in self.looks:
            token = token + look(token, torch.cat((token, x), 1))
        return self.head(token[:, 0])


@architecture(_KIN, "bf16", "adamw")
def cait(at: Place) -> Trainee:
    """18 layers of width 384 with learnt scales, then class attention, 160 images."""
    return classifier(at, ClassAttention(384, 8, at.layers(18)), at.images(160, 224))


class CovarianceBlock(nn.Module):
    """Attention between channels instead of tokens, on normalised queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.mixed, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heat = nn.Parameter(torch.ones(heads, 1, 1))
        self.first, self.second, self.perceptron = nn.LayerNorm(width), nn.LayerNorm(width), Perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        query, key, value = (split_heads(part, self.heads).mT for part in self.mixed(self.first(x)).chunk(3, -1))
        scores = functional.normalize(query, dim=-1) @ functional.normalize(key, dim=-1).mT * self.heat
        x = x + self.out((torch.softmax(scores, -1).to(value.dtype) @ value).permute(0, 3, 1, 2).flatten(2))
        return x + self.perceptron(self.second(x))


@architecture(_KIN, "fp32", "adamw")
def xcit(at: Place) -> Trainee:
    """12 layers of width 384 with attention between channels in fp32, 48 images."""
    layers: list[nn.Module] = [CovarianceBlock(384, 8) for _ in range(at.layers(12))]
    return classifier(at, Patched(384, 16, 224, layers), at.images(48, 224))


class PoolBlock(nn.Module):
    """Pooling instead of attention, norms over channels and places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(1, width), nn.GroupNorm(1, width)
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.perceptron = nn.Sequential(nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1))

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        inner = self.first(x)
        x = x + self.pool(inner) - inner
        return x + self.perceptron(self.second(x))


@architecture(_KIN, "bf16", "adamw", layout=CHANNELS_LAST)
def poolformer(at: Place) -> Trainee:
    """Four stages with pooling for attention, widths 64 to 512, 96 images in channels_last."""
    stages: list[nn.Module] = [nn.Conv2d(3, 64, 7, 4, 3)]
    for stage, depth in enumerate((2, 2, 6, 2)):
        width = 64 << stage
        stages += [nn.Conv2d(width // 2, width, 3, 2, 1)] if stage else []
        stages += [PoolBlock(width) for _ in range(depth)]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    return classifier(at, model, at.images(96, 224))
