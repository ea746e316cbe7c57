"""Convnets made of cheap convolutions: depthwise, grouped, squeezed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import CHANNELS_LAST, Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import classifier, convolved

_KIN = "mobile convnets"


class Squeeze(nn.Module):
    """Channels scaled by what a pooled image says."""

    def __init__(self, width: int, inner: int, activation: Callable[[], nn.Module], gate: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.gates = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, inner, 1), activation(), nn.Conv2d(inner, width, 1), gate()
        )

    def forward(self, x: Tensor) -> Any:
        """Of the same shape."""
        return x * self.gates(x)


class Inverted(nn.Module):
    """Widen, convolve every channel by itself, squeeze, narrow; added where the shape stays."""

    def __init__(
        self, first: int, second: int, kernel: int, stride: int, expand: int, activation: Callable[[], nn.Module],
        gate: Callable[[], nn.Module] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        inner = first * expand
        layers: list[nn.Module] = [convolved(first, inner, 1), nn.BatchNorm2d(inner), activation()] if expand > 1 else []
        layers += [convolved(inner, inner, kernel, stride, groups=inner), nn.BatchNorm2d(inner), activation()]
        layers += [Squeeze(inner, max(8, first // 4), activation, gate)] if gate is not None else []
        self.layers = nn.Sequential(*layers, convolved(inner, second, 1), nn.BatchNorm2d(second))
        self.added = first == second and stride == 1

    def forward(self, x: Tensor) -> Any:
        """One block."""
        return x + self.layers(x) if self.added else self.layers(x)


Stage = tuple[int, int, int, int, int]  # width, kernel, stride, expansion, blocks


def _inverted(
    stages: tuple[Stage, ...], last: int, activation: Callable[[], nn.Module], gate: Callable[[], nn.Module] | None = None
) -> nn.Sequential:
    layers: list[nn.Module] = [convolved(3, 32, 3, 2), nn.BatchNorm2d(32), activation()]
    first = 32
    for width, kernel, stride, expand, count in stages:
        for index in range(count):
            layers.append(Inverted(first, width, kernel, stride if not index else 1, expand, activation, gate))
            first = width
    head = [convolved(first, last, 1), nn.BatchNorm2d(last), activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Dropout(0.2), nn.Linear(last, 1000))


_V2 = (
    (16, 3, 1, 1, 1),
    (24, 3, 2, 6, 2),
    (32, 3, 2, 6, 3),
    (64, 3, 2, 6, 4),
    (96, 3, 1, 6, 3),
    (160, 3, 2, 6, 3),
    (320, 3, 1, 6, 1),
)
_V3 = ((16, 3, 1, 1, 1), (24, 3, 2, 4, 2), (40, 5, 2, 3, 3), (80, 3, 2, 6, 4), (112, 3, 1, 6, 2), (160, 5, 2, 6, 3))
_B0 = (
    (16, 3, 1, 1, 1),
    (24, 3, 2, 6, 2),
    (40, 5, 2, 6, 2),
    (80, 3, 2, 6, 3),
    (112, 5, 1, 6, 3),
    (192, 5, 2, 6, 4),
    (320, 3, 1, 6, 1),
)


@architecture(_KIN, "fp32", "sgd")
def mobilenet_v2(at: Place) -> Trainee:
    """Inverted blocks with ReLU6, 96 images, contiguous."""
    return classifier(at, _inverted(_V2, 1280, nn.ReLU6), at.images(96, 224))


@architecture(_KIN, "bf16", "rmsprop", layout=CHANNELS_LAST)
def mobilenet_v3(at: Place) -> Trainee:
    """Squeezed blocks with hard swish, 128 images in channels_last."""
    return classifier(at, _inverted(_V3, 960, nn.Hardswish, nn.Hardsigmoid), at.images(128, 224))


@architecture(_KIN, "bf16", "rmsprop", layout=CHANNELS_LAST)
def efficientnet_b0(at: Place) -> Trainee:
    """Squeezed blocks with SiLU, 128 images in channels_last."""
    return classifier(at, _inverted(_B0, 1280, nn.SiLU, nn.Sigmoid), at.images(128, 224))


@architecture(_KIN, "fp16", "sgd")
def efficientnet_contiguous(at: Place) -> Trainee:
    """The same of 128 images, contiguous, GradScaler."""
    return classifier(at, _inverted(_B0, 1280, nn.SiLU, nn.Sigmoid), at.images(128, 224))


@architecture(_KIN, "fp32", "sgd")
def mobilenet_few(at: Place) -> Trainee:
    """Inverted blocks, 2 images of 128 pixels: the host takes longest."""
    return classifier(at, _inverted(_V2, 1280, nn.ReLU6), at.images(2, 128))


class Shuffled(nn.Module):
    """Half of the channels go through convolutions, then halves are interleaved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.layers = nn.Sequential(
            convolved(half, half, 1), nn.BatchNorm2d(half), nn.ReLU(), convolved(half, half, 3, groups=half),
            nn.BatchNorm2d(half), convolved(half, half, 1), nn.BatchNorm2d(half), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Any:
        """One block."""
        kept, changed = x.chunk(2, 1)
        x = torch.cat((kept, self.layers(changed)), 1)
        return x.view(len(x), 2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


@architecture(_KIN, "fp32", "sgd")
def shufflenet(at: Place) -> Trainee:
    """Channels shuffled between halves, widths 128 to 512, 192 images."""
    layers: list[nn.Module] = [convolved(3, 24, 3, 2), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    first = 24
    for width, count in ((128, 3), (256, 7), (512, 3)):
        layers += [convolved(first, width, 3, 2), nn.BatchNorm2d(width), nn.ReLU(), *(Shuffled(width) for _ in range(count))]
        first = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))
    return classifier(at, model, at.images(192, 224))


class LargeKernel(nn.Module):
    """A depthwise convolution of 7, a norm over channels and a perceptron, channels last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Any:
        """One block, channels first."""
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(functional.gelu(self.up(inner)))).permute(0, 3, 1, 2)


@architecture(_KIN, "bf16", "adamw_fused")
def convnext_tiny(at: Place) -> Trainee:
    """Depthwise convolutions of 7, widths 96 to 768, 64 images, contiguous, autocast."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4)]
    for stage, count in enumerate((3, 3, 9, 3)):
        width = 96 << stage
        layers += [nn.GroupNorm(1, width // 2), nn.Conv2d(width // 2, width, 2, 2)] if stage else []
        layers += [LargeKernel(width) for _ in range(count)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(768), nn.Linear(768, 1000))
    return classifier(at, model, at.images(64, 224))


class GroupedBlock(nn.Module):
    """A bottleneck that is not narrow, convolved in groups of a fixed width and squeezed."""

    def __init__(self, first: int, width: int, stride: int, group: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            convolved(first, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            convolved(width, width, 3, stride, groups=width // group), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            Squeeze(width, first // 4, nn.ReLU, nn.Sigmoid), convolved(width, width, 1), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.side = (
            nn.Sequential(convolved(first, width, 1, stride), nn.BatchNorm2d(width)) if first != width else nn.Identity()
        )

    def forward(self, x: Tensor) -> Any:
        """One block."""
        return functional.relu(self.layers(x) + self.side(x), inplace=True)


@architecture(_KIN, "bf16", "sgd", layout=CHANNELS_LAST)
def regnet(at: Place) -> Trainee:
    """Groups of 24 channels, widths 72 to 576, 128 images in channels_last."""
    layers: list[nn.Module] = [convolved(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU()]
    first = 32
    for width, count in ((72, 2), (216, 5), (576, 8)):
        for index in range(count):
            layers.append(GroupedBlock(first, width, 2 if not index else 1, 24))
            first = width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(first, 1000))
    return classifier(at, model, at.images(128, 224))
