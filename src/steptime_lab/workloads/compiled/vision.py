"""Images: Transformers and convolutional networks of few layers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.compiled.architecture import Network, Site, classes, near, network
from steptime_lab.workloads.compiled.language import HeadsAttention


def _perceptron(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class ScaledLayer(nn.Module):
    """A Transformer's layer whose branches are scaled by learned numbers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention, self.perceptron = HeadsAttention(width, heads, causal=False, bias=True), _perceptron(width, 4 * width)
        self.scales = nn.Parameter(torch.full((2, width), 0.1))

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        x = x + self.scales[0] * self.attention(self.first(x))
        return x + self.scales[1] * self.perceptron(self.second(x))


class Registers(nn.Module):
    """Patches with a class token and four registers."""

    def __init__(self, width: int, heads: int, layers: int, size: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.extra = nn.Parameter(torch.randn(1, 5, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (size // 16) ** 2, width))
        self.layers = nn.ModuleList(ScaledLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Any:
        """Scores of classes."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        x = torch.cat((self.extra.expand(x.shape[0], -1, -1), x), 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


@network
def vit_registers(at: Site) -> Network:
    """Patches of 16, registers, scaled branches: 6 layers of 384."""
    size = 64 if at.small else 208
    model, batch = Registers(384, 6, 6, size), at.batch(48)
    return Network(model, (at.floats(batch, 3, size, size),), classes(at.integers(1000, batch)), model.layers)


class WindowAttention(nn.Module):
    """Attention within windows of an image, shifted or not, with a bias by place."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))

    def forward(self, x: Tensor) -> Any:
        """(batch, height, width, channels), the same out."""
        batch, height, width, channels = x.shape
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        side = self.window
        x = x.view(batch, height // side, side, width // side, side, channels).transpose(2, 3).reshape(-1, side**2, channels)
        mixed = self.mixed(x).view(-1, side**2, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = mixed[0], mixed[1], mixed[2]
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + self.bias
        x = self.out((scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(2))
        x = x.view(batch, height // side, width // side, side, side, channels).transpose(2, 3)
        x = x.reshape(batch, height, width, channels)
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x


class WindowLayer(nn.Module):
    """Norm first."""

    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.perceptron = WindowAttention(width, heads, 8, shift), _perceptron(width, 4 * width)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        x = x + self.attention(self.first(x))
        return x + self.perceptron(self.second(x))


class Windows(nn.Module):
    """Two stages of two layers; patches are merged between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.layers = nn.ModuleList(WindowLayer(width * (1 + at // 2), 4 * (1 + at // 2), 4 * (at % 2)) for at in range(4))
        self.merge, self.merged = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 200)

    def forward(self, images: Tensor) -> Any:
        """Scores of classes."""
        x = self.patches(images).permute(0, 2, 3, 1)
        for at, layer in enumerate(self.layers):
            if at == 2:
                x = torch.cat((x[:, ::2, ::2], x[:, 1::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2]), -1)
                x = self.merged(self.merge(x))
            x = layer(x)
        return self.head(self.norm(x).mean((1, 2)))


@network
def shifted_windows(at: Site) -> Network:
    """Windows of 8 by 8 with bias, every other one shifted: 4 layers of 128 and 256."""
    size = 64 if at.small else 256
    model, batch = Windows(128), at.batch(16)
    return Network(model, (at.floats(batch, 3, size, size),), classes(at.integers(200, batch)), model.layers)


class MixerLayer(nn.Module):
    """A perceptron over places, one over channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_places, self.over_channels = _perceptron(places, 2 * places), _perceptron(width, 3 * width)

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        x = x + self.over_places(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.second(x))


class Mixer(nn.Module):
    """Patches, layers, mean."""

    def __init__(self, places: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 14**2, width)
        self.layers = nn.ModuleList(MixerLayer(places, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Any:
        """Scores of classes."""
        x = self.patches(functional.pixel_unshuffle(images, 14).flatten(2).transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


@network
def patch_mixer(at: Site) -> Network:
    """Perceptrons over 144 patches and over channels: 5 layers of 320."""
    model, batch = Mixer(144, 320, 5), at.batch(64)
    return Network(model, (at.floats(batch, 3, 168, 168),), classes(at.integers(100, batch)), model.layers)


class DepthwiseLayer(nn.Module):
    """A wide depthwise convolution, a norm of channels and a perceptron of each place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm, self.perceptron = nn.LayerNorm(width), _perceptron(width, 4 * width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        y = self.perceptron(self.norm(self.near(x).permute(0, 2, 3, 1)))
        return x + (self.scale * y).permute(0, 3, 1, 2)


class Depthwise(nn.Module):
    """Three stages."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, widths[0], 4, 4)
        self.layers = nn.ModuleList(DepthwiseLayer(width) for width in widths for _ in range(2))
        self.down = nn.ModuleList(nn.Conv2d(a, b, 2, 2) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, images: Tensor) -> Any:
        """Scores of classes."""
        x = self.first(images)
        for at, layer in enumerate(self.layers):
            x = layer(self.down[at // 2 - 1](x) if at and at % 2 == 0 else x)
        return self.head(x.mean((2, 3)))


@network
def depthwise_net(at: Site) -> Network:
    """Depthwise convolutions of 5 and perceptrons: 6 layers of 80 to 320 channels."""
    size = 64 if at.small else 192
    model, batch = Depthwise((80, 160, 320)), at.batch(32)
    return Network(model, (at.floats(batch, 3, size, size),), classes(at.integers(1000, batch)), model.layers)


class BasicLayer(nn.Module):
    """Two convolutions with batch norms, and what came in added."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.past = nn.Conv2d(before, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.past(x))


@network
def basic_residual(at: Site) -> Network:
    """Basic blocks with batch norms: 6 of 48 to 192 channels."""
    widths = (48, 96, 192)
    blocks = [
        BasicLayer(48 if not at else widths[at // 2 - (at % 2 == 0)], widths[at // 2], 1 + (at in (2, 4))) for at in range(6)
    ]
    layers = nn.ModuleList(blocks)
    stem = nn.Sequential(nn.Conv2d(3, 48, 7, 2, 3, bias=False), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    model = nn.Sequential(stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 365))
    size, batch = 64 if at.small else 176, at.batch(64)
    return Network(model, (at.floats(batch, 3, size, size),), classes(at.integers(365, batch)))


def _convolved(first: int, second: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(first, second, 3, padding=1), nn.GroupNorm(8, second), nn.SiLU())


class SkippingNet(nn.Module):
    """Down and up again, each level joined with what it was on the way down."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        ends = (3, *widths)
        self.down = nn.ModuleList(_convolved(a, b) for a, b in itertools.pairwise(ends))
        self.up = nn.ModuleList(_convolved(a + b, b) for a, b in zip(widths[::-1], widths[-2::-1], strict=False))
        self.last = nn.Conv2d(widths[0], 3, 1)

    def forward(self, images: Tensor) -> Any:
        """Images of the same size."""
        x, kept = images, []
        for at, layer in enumerate(self.down):
            x = layer(functional.avg_pool2d(x, 2) if at else x)
            kept.append(x)
        for layer, past in zip(self.up, kept[-2::-1], strict=True):
            x = layer(torch.cat((functional.interpolate(x, scale_factor=2.0, mode="nearest"), past), 1))
        return self.last(x)


@network
def skipping_net(at: Site) -> Network:
    """A U-Net with group norms: 4 levels of 32 to 256 channels."""
    size, batch = 32 if at.small else 128, at.batch(16)
    images = at.floats(batch, 3, size, size)
    return Network(SkippingNet((32, 64, 128, 256)), (images,), near(at.floats(batch, 3, size, size)))


class Excited(nn.Module):
    """An inverted bottleneck whose channels are weighed by what all of the image says."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        inner = 4 * width
        self.wide = nn.Sequential(nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.SiLU())
        deep = nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False)
        self.deep = nn.Sequential(deep, nn.BatchNorm2d(inner), nn.SiLU())
        self.squeeze, self.excite = nn.Conv2d(inner, width // 4, 1), nn.Conv2d(width // 4, inner, 1)
        self.narrow = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))
        self.same = stride == 1

    def forward(self, x: Tensor) -> Any:
        """One layer."""
        y = self.deep(self.wide(x))
        y = y * self.excite(functional.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        y = self.narrow(y)
        return x + y if self.same else y


@network
def squeeze_excite(at: Site) -> Network:
    """Inverted bottlenecks with squeeze and excitation: 5 of 64 channels."""
    layers = [Excited(64, 1 + at % 2) for at in range(5)]
    model = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 100))
    size, batch = 64 if at.small else 160, at.batch(48)
    return Network(model, (at.floats(batch, 3, size, size),), classes(at.integers(100, batch)))


class Variational(nn.Module):
    """Convolutions to a mean and a variance, and back from a draw."""

    def __init__(self, width: int, latent: int, size: int) -> None:
        super().__init__()
        self.side = size // 8
        flat = 4 * width * self.side**2
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(flat, 2 * latent),
        )  # fmt: skip
        self.back = nn.Linear(latent, flat)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2), nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.LeakyReLU(0.2), nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Any:
        """Images again, means and logarithms of variances."""
        mean, spread = self.encoder(images).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decoder(self.back(drawn).unflatten(-1, (-1, self.side, self.side))), mean, spread


@network
def variational(at: Site) -> Network:
    """A variational autoencoder of images: 3 and 3 convolutions from 64 channels on."""
    size, batch = 32 if at.small else 64, at.batch(96)
    images = at.floats(batch, 3, size, size).sigmoid()

    def loss(parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        again, mean, spread = parts
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
        return functional.mse_loss(again, images, reduction="sum") / images.shape[0] + divergence

    return Network(Variational(64, 128, size), (images,), loss)


class ModulatedLayer(nn.Module):
    """A layer whose norms are shifted, scaled and gated by a condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attention, self.perceptron = HeadsAttention(width, heads, causal=False, bias=True), _perceptron(width, 4 * width)
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Any:
        """One layer."""
        parts = self.modulate(condition)[:, None].chunk(6, -1)
        x = x + parts[2] * self.attention(self.first(x) * (1 + parts[1]) + parts[0])
        return x + parts[5] * self.perceptron(self.second(x) * (1 + parts[4]) + parts[3])


class Denoiser(nn.Module):
    """Noisy latents and a time in, noise out."""

    def __init__(self, width: int, layers: int, places: int) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(16, width), nn.Linear(width, 16)
        self.places = nn.Parameter(0.02 * torch.randn(1, places, width))
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.labels = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(ModulatedLayer(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, latents: Tensor, times: Tensor, labels: Tensor) -> Any:
        """Of every patch."""
        rates = torch.exp(-math.log(10_000) * torch.arange(128, device=times.device) / 128)
        turns = times[:, None].float() * rates
        condition = self.time(torch.cat((turns.cos(), turns.sin()), -1).to(latents.dtype)) + self.labels(labels)
        x = self.inputs(latents) + self.places
        for layer in self.layers:
            x = layer(x, condition)
        return self.outputs(self.norm(x))


@network
def modulated_denoiser(at: Site) -> Network:
    """A diffusion Transformer with modulated norms: 4 layers of 512."""
    batch, places = at.batch(24), at.tokens(256)
    model = Denoiser(512, 4, places)
    inputs = (at.floats(batch, places, 16), at.integers(1000, batch), at.integers(1000, batch))
    return Network(model, inputs, near(at.floats(batch, places, 16)), model.layers)


class PixelPyramid(nn.Module):
    """Features of three sizes, added from the coarsest on, and a class of every place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (3, 64, 128, 256)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        )
        self.side = nn.ModuleList(nn.Conv2d(each, width, 1) for each in widths[1:])
        self.smooth, self.head = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 21, 1)

    def forward(self, images: Tensor) -> Any:
        """Scores of 21 classes at every pixel."""
        x, levels = images, []
        for down, side in zip(self.down, self.side, strict=True):
            x = down(x)
            levels.append(side(x))
        y = levels[-1]
        for level in levels[-2::-1]:
            y = level + functional.interpolate(y, scale_factor=2.0, mode="nearest")
        scores = self.head(functional.relu(self.smooth(y)))
        return functional.interpolate(scores, scale_factor=2.0, mode="bilinear", align_corners=False)


@network
def pixel_classes(at: Site) -> Network:
    """A feature pyramid that names every pixel's class: 3 levels of 96 channels."""
    size, batch = 32 if at.small else 256, at.batch(8)
    labels = at.integers(21, batch, size, size)
    return Network(PixelPyramid(96), (at.floats(batch, 3, size, size),), classes(labels))
