"""Residual and other plain convnets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from steptime_lab.workloads.zoo.architecture import CHANNELS_LAST, Place, Trainee, architecture
from steptime_lab.workloads.zoo.layers import classifier, convolved

_KIN = "residual convnets"


class Bottleneck(nn.Module):
    """Narrow, convolve in groups, widen, and add what came in."""

    def __init__(self, first: int, inner: int, out: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        self.narrow, self.middle, self.wide = (
            nn.Sequential(convolved(first, inner, 1), nn.BatchNorm2d(inner)),
            nn.Sequential(convolved(inner, inner, 3, stride, groups=groups), nn.BatchNorm2d(inner)),
            nn.Sequential(convolved(inner, out, 1), nn.BatchNorm2d(out)),
        )
        self.side = nn.Sequential(convolved(first, out, 1, stride), nn.BatchNorm2d(out)) if first != out or stride > 1 else None

    def forward(self, x: Tensor) -> Any:
        """One block."""
        inner = functional.relu(self.middle(functional.relu(self.narrow(x), inplace=True)), inplace=True)
        return functional.relu(self.wide(inner) + (x if self.side is None else self.side(x)), inplace=True)


def _bottlenecks(counts: tuple[int, ...], *, inner: int = 64, groups: int = 1) -> nn.Sequential:
    stages: list[nn.Module] = [convolved(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    first = 64
    for stage, count in enumerate(counts):
        for index in range(count):
            stages.append(Bottleneck(first, inner << stage, 256 << stage, 2 if stage and not index else 1, groups))
            first = 256 << stage
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(first, 1000))


@architecture(_KIN, "fp32", "sgd")
def resnet50(at: Place) -> Trainee:
    """64 images, contiguous, convolutions in TF32."""
    return classifier(at, _bottlenecks((3, 4, 6, 3)), at.images(64, 224))


@architecture(_KIN, "bf16", "sgd", layout=CHANNELS_LAST)
def resnet50_channels_last(at: Place) -> Trainee:
    """The same with 128 images in channels_last, autocast."""
    return classifier(at, _bottlenecks((3, 4, 6, 3)), at.images(128, 224))


@architecture(_KIN, "bf16", "sgd")
def resnext50(at: Place) -> Trainee:
    """Bottlenecks convolved in 32 groups, 96 images, contiguous, autocast."""
    return classifier(at, _bottlenecks((3, 4, 6, 3), inner=128, groups=32), at.images(96, 224))


@architecture(_KIN, "fp16", "sgd", layout=CHANNELS_LAST)
def wide_resnet50(at: Place) -> Trainee:
    """Bottlenecks of twice the width, 96 images in channels_last, GradScaler."""
    return classifier(at, _bottlenecks((3, 4, 6, 3), inner=128), at.images(96, 224))


class BasicBlock(nn.Module):
    """Two convolutions, each behind norm and activation, and what came in."""

    def __init__(self, first: int, second: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList((norm(first), norm(second)))
        self.one, self.two = convolved(first, second, 3, stride), convolved(second, second, 3)
        self.side = convolved(first, second, 1, stride) if first != second or stride > 1 else None

    def forward(self, x: Tensor) -> Any:
        """One block."""
        inner = functional.relu(self.norms[0](x))
        side = x if self.side is None else self.side(inner)
        return self.two(functional.relu(self.norms[1](self.one(inner)))) + side


def _basic(widths: tuple[int, ...], count: int, norm: Callable[[int], nn.Module], classes: int) -> nn.Sequential:
    stages: list[nn.Module] = [convolved(3, 16, 3)]
    first = 16
    for stage, width in enumerate(widths):
        for index in range(count):
            stages.append(BasicBlock(first, width, 2 if stage and not index else 1, norm))
            first = width
    last = [norm(first), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(first, classes)]
    return nn.Sequential(*stages, *last)


@architecture(_KIN, "tf32", "sgd")
def wide_resnet28(at: Place) -> Trainee:
    """Four blocks a stage of ten times the usual width, 128 images of 32 pixels, TF32."""
    return classifier(at, _basic((160, 320, 640), 4, nn.BatchNorm2d, 100), at.images(128, 32), 100)


@architecture(_KIN, "fp32", "sgd")
def resnet20(at: Place) -> Trainee:
    """Widths 16 to 64, 32 images of 32 pixels: the host takes longest."""
    return classifier(at, _basic((16, 32, 64), 3, nn.BatchNorm2d, 10), at.images(32, 32), 10)


@architecture(_KIN, "bf16", "adamw")
def group_norm_resnet(at: Place) -> Trainee:
    """Basic blocks with norms of 16 groups, 256 images of 64 pixels, autocast."""
    model = _basic((64, 128, 256, 512), 2, lambda width: nn.GroupNorm(16, width), 200)
    return classifier(at, model, at.images(256, 64), 200)


class DenseLayer(nn.Module):
    """Adds some channels to all that were there before."""

    def __init__(self, first: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(first), nn.ReLU(), convolved(first, 4 * growth, 1),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), convolved(4 * growth, growth, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Any:
        """With the new ones behind."""
        return torch.cat((x, self.layers(x)), 1)


@architecture(_KIN, "fp32", "sgd")
def densenet121(at: Place) -> Trainee:
    """Four stages that grow by 32 channels a layer, 96 images."""
    stages: list[nn.Module] = [convolved(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for stage, count in enumerate((6, 12, 24, 16)):
        if stage:
            stages += [nn.BatchNorm2d(width), nn.ReLU(), convolved(width, width // 2, 1), nn.AvgPool2d(2)]
            width //= 2
        for _ in range(count):
            stages.append(DenseLayer(width, 32))
            width += 32
    last = [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)]
    return classifier(at, nn.Sequential(*stages, *last), at.images(96, 224))


@architecture(_KIN, "bf16", "sgd", layout=CHANNELS_LAST)
def vgg16(at: Place) -> Trainee:
    """Thirteen convolutions and three products with dropout, 96 images in channels_last."""
    layers: list[nn.Module] = []
    first = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(first, width, 3, padding=1), nn.ReLU(inplace=True)]
            first = width
        layers.append(nn.MaxPool2d(2))
    last = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
    return classifier(at, nn.Sequential(*layers, nn.Flatten(), *last, nn.Linear(4096, 1000)), at.images(96, 224))
