"""Inception-v3 on pictures of 299 x 299, with its second classifier."""

from __future__ import annotations

import torch

from steptime_lab.workloads.case import Case, GroupLike, Step, Workload
from steptime_lab.workloads.convnets import convnet_step

FULL = {"image": 299, "classes": 1000}
SMALL = {"image": 75, "classes": 10}  # the smallest pictures that leave its last convolutions anything


def build(case: Case, group: GroupLike, device: torch.device) -> Step:
    """The step of `group.rank`."""
    # torchvision draws its initial weights on the CPU from truncated normals, one by one, unless told not to: half a minute.
    return convnet_step(
        case, group, device, "inception_v3", aux_logits=case.config["image"] >= FULL["image"], init_weights=False
    )


def small_cases(ranks: int) -> tuple[Case, ...]:
    """Small pictures, for which the second classifier is left out."""
    return (Case("inception_v3", f"inception-v3-small-r{ranks}", dict(SMALL), "fp32", 2 * ranks, ranks),)


WORKLOAD = Workload("inception_v3", build, small_cases)
