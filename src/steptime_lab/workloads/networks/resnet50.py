"""ResNet-50 on pictures of 224 x 224."""

from __future__ import annotations

import torch

from steptime_lab.workloads.case import Case, GroupLike, Step, Workload
from steptime_lab.workloads.convnets import convnet_step

FULL = {"image": 224, "classes": 1000}
SMALL = {"image": 33, "classes": 10}


def build(case: Case, group: GroupLike, device: torch.device) -> Step:
    """The step of `group.rank`."""
    return convnet_step(case, group, device, "resnet50")


def small_cases(ranks: int) -> tuple[Case, ...]:
    """Small pictures."""
    return (Case("resnet50", f"resnet50-small-r{ranks}", dict(SMALL), "fp32", 2 * ranks, ranks),)


WORKLOAD = Workload("resnet50", build, small_cases)
