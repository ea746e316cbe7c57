"""Residual and other plain convnets."""

from __future__ import annotations

from typing import Any

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
