"""Images and clips of the second visit: written after the models were fitted, as other people write such nets."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import CHANNELS_LAST, SECOND_VISIT, Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import classifier

_arriving = partial(architecture, visit=SECOND_VISIT)


class Residual(nn.Module):
    """What came in is added."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.fn = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Any:
        """Of the same shape."""
        return self.fn(x) + x


@_arriving("mobile convnets", "fp16", "adamw", layout=CHANNELS_LAST)
def conv_mixer(at: Place) -> Trainee:
    """10 layers of width 388, depthwise 9 by 9 over 32 by 32 patches of 7 pixels, 60 images in channels_last, GradScaler."""
    dim, layers = 388, []
    for _ in range(at.layers(10)):
        mixed = Residual(nn.Conv2d(dim, dim, 9, groups=dim, padding="same"), nn.GELU(), nn.BatchNorm2d(dim))
        layers.append(nn.Sequential(mixed, nn.Conv2d(dim, dim, 1), nn.GELU(), nn.BatchNorm2d(dim)))
    stem = (nn.Conv2d(3, dim, 7, 7), nn.GELU(), nn.BatchNorm2d(dim))
    model = nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(dim, 1000))
    return classifier(at, model, at.images(60, 224))


def conv_bn_act(first: int, second: int, kernel: int, stride: int = 1, groups: int = 1, *, act: bool = True) -> nn.Sequential:
    """Convolution, batch norm, SiLU."""
    layers = [nn.Conv2d(first, second, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(second, 1e-3)]
    return nn.Sequential(*layers, nn.SiLU(inplace=True)) if act else nn.Sequential(*layers)


class SqueezeExcite(nn.Module):
    """Gates of channels from their means."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Any:
        """Of the same shape."""
        return x * torch.sigmoid(self.fc2(functional.silu(self.fc1(x.mean((2, 3), keepdim=True)))))


class FusedInverted(nn.Module):
    """An inverted block, the first stages' with one full convolution for widening and the depthwise one."""

    def __init__(self, first: int, second: int, stride: int, expand: int, *, fused: bool) -> None:
        super().__init__()
        inner = first * expand
        if fused:
            layers: list[nn.Module] = [conv_bn_act(first, inner, 3, stride), conv_bn_act(inner, second, 1, act=False)]
        else:
            deep = [conv_bn_act(inner, inner, 3, stride, inner), SqueezeExcite(inner, first // 4)]
            layers = [conv_bn_act(first, inner, 1), *deep, conv_bn_act(inner, second, 1, act=False)]
        self.layers, self.added = nn.Sequential(*layers), stride == 1 and first == second

    def forward(self, x: Tensor) -> Any:
        """One block; whole samples are dropped from it at random."""
        y = self.layers(x)
        if not self.added:
            return y
        keep = torch.rand(len(x), 1, 1, 1, device=x.device, dtype=x.dtype).add_(0.9).floor_()
        return x + y / 0.9 * keep


@_arriving("mobile convnets", "bf16", "sgd")
def fused_inverted(at: Place) -> Trainee:
    """Inverted blocks, the first of full convolutions, widths 22 to 210, smoothed labels, 100 images of 192 pixels."""
    layers: list[nn.Module] = [conv_bn_act(3, 22, 3, 2)]
    first = 22
    plan = ((22, 1, 1, 2, True), (44, 2, 4, 3, True), (58, 2, 4, 3, True), (116, 2, 4, 5, False), (210, 2, 6, 6, False))
    for width, stride, expand, count, fused in plan:
        for index in range(at.layers(count)):
            layers.append(FusedInverted(first, width, 1 if index else stride, expand, fused=fused))
            first = width
    head = (conv_bn_act(first, 1160, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1160, 345))
    model, images = nn.Sequential(*layers, *head), at.images(100, 192)
    labels = at.integers(345, len(images))
    return Trainee(model, lambda: functional.cross_entropy(model(images), labels, label_smoothing=0.1))


class StandardisedConv(nn.Conv2d):
    """Weights have no mean and a fixed spread, learnt per output."""

    def __init__(self, first: int, second: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(first, second, kernel, stride, kernel // 2, groups=groups)
        self.gain = nn.Parameter(torch.ones(second, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Convolved."""
        fan = math.prod(self.weight.shape[1:])
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        weight = self.gain * (self.weight - mean) * torch.rsqrt(torch.clamp(var * fan, min=1e-4))
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class NormFreeBlock(nn.Module):
    """A bottleneck with groups of 60 channels, squeezed, without a norm."""

    def __init__(self, first: int, second: int, stride: int) -> None:
        super().__init__()
        inner = second // 2
        convs = (StandardisedConv(first, inner, 1), StandardisedConv(inner, inner, 3, stride, inner // 60))
        self.convs = nn.ModuleList(
            (*convs, StandardisedConv(inner, inner, 3, 1, inner // 60), StandardisedConv(inner, second, 1))
        )
        self.se, self.skip_gain = SqueezeExcite(second, second // 4), nn.Parameter(torch.zeros(()))
        self.down = (
            nn.Sequential(nn.AvgPool2d(2, 2, ceil_mode=True), StandardisedConv(first, second, 1)) if stride > 1 else None
        )

    def forward(self, x: Tensor) -> Any:
        """One block."""
        out = functional.gelu(x) * 1.7015
        shortcut = x if self.down is None else self.down(out)
        for conv in self.convs:
            out = functional.gelu(conv(out)) * 1.7015
        return 0.2 * 2 * self.se(out) * self.skip_gain + shortcut


@_arriving("residual convnets", "fp32", "sgd")
def normalizer_free(at: Place) -> Trainee:
    """Standardised weights, groups of 60 channels, widths 240 to 960, gradients clipped by units, 236 images of 176 pixels."""
    layers: list[nn.Module] = [StandardisedConv(3, 30, 3, 2), nn.GELU(), StandardisedConv(30, 120, 3, 2)]
    first = 120
    for width, count in ((240, 1), (480, 2), (960, 3)):
        for index in range(at.layers(count)):
            layers.append(NormFreeBlock(first, width, 1 if index else 2))
            first = width
    model = nn.Sequential(*layers, nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(960, 500)).to(at.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9, nesterov=True)
    images = at.images(236, 176)
    labels = at.integers(500, len(images))

    def clip() -> None:
        for weight in model.parameters():
            if weight.dim() < 2 or weight.grad is None:
                continue
            units = (len(weight), *(1,) * (weight.dim() - 1))
            most = weight.detach().flatten(1).norm(dim=1).clamp_(min=1e-3).view(units) * 0.02
            norm = weight.grad.flatten(1).norm(dim=1).view(units)
            weight.grad.copy_(torch.where(norm > most, weight.grad * (most / norm.clamp(min=1e-6)), weight.grad))

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        clip()
        optimizer.step()

    return Trainee(model, step=step)


class SpaceThenTime(nn.Sequential):
    """A convolution over space and one over time for one over both, with as many weights."""

    def __init__(self, first: int, second: int, stride: int = 1) -> None:
        inner = first * second * 27 // (9 * first + 3 * second)
        super().__init__(
            nn.Conv3d(first, inner, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False), nn.BatchNorm3d(inner),
            nn.ReLU(inplace=True), nn.Conv3d(inner, second, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False),
        )  # fmt: skip


class ClipBlock(nn.Module):
    """Two of them, and what came in."""

    def __init__(self, first: int, second: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = SpaceThenTime(first, second, stride), SpaceThenTime(second, second)
        self.bn1, self.bn2 = nn.BatchNorm3d(second), nn.BatchNorm3d(second)
        side = (nn.Conv3d(first, second, 1, stride, bias=False), nn.BatchNorm3d(second))
        self.side = nn.Sequential(*side) if first != second else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        """One block."""
        y = functional.relu(self.bn1(self.one(x)), inplace=True)
        return functional.relu(self.bn2(self.two(y)) + self.side(x), inplace=True)


@_arriving("residual convnets", "bf16", "sgd")
def factorised_video(at: Place) -> Trainee:
    """Convolutions over space, then over time, of 45 to 576 channels, 22 clips of 8 frames of 112 pixels, autocast."""
    stem = (nn.Conv3d(3, 45, (1, 7, 7), (1, 2, 2), (0, 3, 3), bias=False), nn.BatchNorm3d(45), nn.ReLU(inplace=True))
    layers: list[nn.Module] = [
        *stem,
        nn.Conv3d(45, 64, (3, 1, 1), padding=(1, 0, 0), bias=False),
        nn.BatchNorm3d(64),
        nn.ReLU(),
    ]
    for first, second, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 400, 2)):
        layers.append(ClipBlock(first, second, stride))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(400, 174))
    return classifier(at, model, at.floats(at.batch(22), 3, 8, 112, 112), 174)


class CosineWindow(nn.Module):
    """Attention in windows by cosines, with biases that a small net makes of distances."""

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))
        self.bias = nn.Sequential(nn.Linear(2, 384), nn.ReLU(inplace=True), nn.Linear(384, heads, bias=False))
        near = torch.arange(1 - window, window).float() * 8 / (window - 1)
        table = torch.stack(torch.meshgrid(near, near, indexing="ij"), -1).flatten(0, 1)
        self.table = torch.sign(table) * torch.log2(table.abs() + 1.0) / 3.0
        row = torch.arange(window * window) // window
        column = torch.arange(window * window) % window
        self.index = (row[:, None] - row + window - 1) * (2 * window - 1) + column[:, None] - column + window - 1

    def forward(self, x: Tensor, mask: Tensor | None) -> Any:
        """(windows, places, dim)."""
        windows, places, dim = x.shape
        qkv = self.qkv(x).reshape(windows, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        scores = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(self.scale, max=4.6).exp()
        bias = self.bias(self.table)[self.index.view(-1)].view(places, places, -1).permute(2, 0, 1).contiguous()
        scores = scores + 16 * torch.sigmoid(bias).unsqueeze(0)
        if mask is not None:
            scores = scores.view(-1, len(mask), self.heads, places, places) + mask[None, :, None]
            scores = scores.view(-1, self.heads, places, places)
        return self.proj((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(windows, places, dim))


class ShiftedLayer(nn.Module):
    """Windows, every other time shifted by half of one, norms behind."""

    def __init__(self, dim: int, heads: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.size, self.window, self.shift = size, window, shift
        self.attn, self.norm1, self.norm2 = CosineWindow(dim, heads, window), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.mask = self._mask() if shift else None

    def _mask(self) -> Tensor:
        band = torch.zeros(self.size)
        band[-self.window : -self.shift], band[-self.shift :] = 1, 2
        regions = self._split((3 * band[:, None] + band)[None, :, :, None]).squeeze(-1)
        return (regions[:, None] - regions[:, :, None]).ne(0).float() * -100.0

    def _split(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, self.window * self.window, c)

    def forward(self, x: Tensor) -> Any:
        """(batch, height, width, dim)."""
        b, h, w, c = x.shape
        y = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        y = self.attn(self._split(y), self.mask)
        y = y.view(b, h // self.window, w // self.window, self.window, self.window, c)
        y = y.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, c)
        y = torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y
        x = x + self.norm1(y)
        return x + self.norm2(self.mlp(x))


class MergedPatches(nn.Module):
    """Four neighbours to one of twice the width."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * dim, 2 * dim, bias=False), nn.LayerNorm(2 * dim)

    def forward(self, x: Tensor) -> Any:
        """Half of the height and width."""
        parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
        return self.norm(self.reduction(torch.cat(parts, -1)))


class ToChannelsLast(nn.Module):
    """Channels behind height and width."""

    def forward(self, x: Tensor) -> Any:
        """Seen so."""
        return x.permute(0, 2, 3, 1)


@_arriving("vision transformers", "bf16", "adamw")
def cosine_windows(at: Place) -> Trainee:
    """Windows of 8 by cosines with biases made of distances, widths 84 to 336, heads of 28, 52 images of 256 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 84, 4, 4), ToChannelsLast(), nn.LayerNorm(84)]
    for stage, count in enumerate((2, 2, 4)):
        dim, size = 84 << stage, 64 >> stage
        layers += [MergedPatches(dim // 2)] if stage else []
        layers += [ShiftedLayer(dim, 3 << stage, size, 8, 4 * (index % 2)) for index in range(count)]
    pooled = (nn.LayerNorm(336), nn.Flatten(1, 2), nn.AdaptiveAvgPool2d((1, 336)), nn.Flatten())
    return classifier(at, nn.Sequential(*layers, *pooled, nn.Linear(336, 1000)), at.images(52, 256))


class TorchLayer(nn.TransformerEncoderLayer):
    """PyTorch's own, norms first."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, 4 * dim, 0.0, functional.gelu, batch_first=True, norm_first=True)


class MaskedPatches(nn.Module):
    """A quarter of the patches encoded, all of them decoded."""

    def __init__(self, dim: int, depth: int, narrow: int, patches: int) -> None:
        super().__init__()
        self.embed, self.cls = nn.Conv2d(3, dim, 14, 14), nn.Parameter(torch.zeros(1, 1, dim))
        self.places, self.later_places = (
            nn.Parameter(torch.zeros(1, patches, dim)),
            nn.Parameter(torch.zeros(1, patches + 1, narrow)),
        )
        self.encoder, self.norm = nn.Sequential(*(TorchLayer(dim, 11) for _ in range(depth))), nn.LayerNorm(dim)
        self.narrow, self.unseen = nn.Linear(dim, narrow), nn.Parameter(torch.zeros(1, 1, narrow))
        self.decoder = nn.Sequential(*(TorchLayer(narrow, 8) for _ in range(3)), nn.LayerNorm(narrow), nn.Linear(narrow, 588))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels of all patches, and which were not seen."""
        x = self.embed(images).flatten(2).transpose(1, 2) + self.places
        b, t, c = x.shape
        kept = t // 4
        shuffle = torch.rand(b, t, device=x.device).argsort(dim=1)
        restore = shuffle.argsort(dim=1)
        x = x.gather(1, shuffle[:, :kept, None].expand(-1, -1, c))
        x = self.norm(self.encoder(torch.cat((self.cls.expand(b, -1, -1), x), 1)))
        x = self.narrow(x)
        every = torch.cat((x[:, 1:], self.unseen.expand(b, t - kept, -1).to(x.dtype)), 1)
        every = every.gather(1, restore[..., None].expand(-1, -1, every.shape[-1]))
        x = self.decoder(torch.cat((x[:, :1], every), 1) + self.later_places)
        return x[:, 1:], (restore >= kept).float()


@_arriving("vision transformers", "fp16", "adamw")
def masked_patches(at: Place) -> Trainee:
    """A quarter of 256 patches through 9 layers of width 528, all through 3 of 320, normed pixels, 270 images, GradScaler."""
    model, images = MaskedPatches(528, at.layers(9), 320, 256), at.images(270, 224)

    def loss() -> Tensor:
        wanted = functional.unfold(images, 14, stride=14).transpose(1, 2)
        wanted = (wanted - wanted.mean(-1, keepdim=True)) / (wanted.var(-1, keepdim=True) + 1e-6).sqrt()
        made, unseen = model(images)
        each = (made - wanted).pow(2).mean(-1)
        value: Tensor = (each * unseen).sum() / unseen.sum()
        return value

    return Trainee(model, loss)
