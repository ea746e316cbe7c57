"""What the convolutional networks share: torchvision's models with random weights, SGD with momentum, random images."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from steptime.errors import InputError
from steptime_lab.workloads.case import Case, GroupLike
from steptime_lab.workloads.training import BATCHES, Inputs, ModelStep, random_source

LEARNING_RATE = 0.01
MOMENTUM = 0.9

AUXILIARY_WEIGHT = 0.4
"""Of the second classifier's loss, as Inception-v3 was published (Szegedy et al. 2016) and as torchvision trains it."""


def convnet_step(case: Case, group: GroupLike, device: torch.device, name: str, **options: Any) -> ModelStep:
    """A training step of a torchvision model on `image` x `image` pictures."""
    models = _torchvision_models(name)
    config, source = case.config, random_source(group, device)
    with device:
        model: nn.Module = getattr(models, name)(weights=None, num_classes=config["classes"], **options).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    shape = (case.local_batch, 3, config["image"], config["image"])
    inputs: list[Inputs] = [
        {
            "images": torch.randn(shape, device=device, generator=source),
            "labels": torch.randint(config["classes"], shape[:1], device=device, generator=source),
        }
        for _ in range(BATCHES)
    ]
    return ModelStep(case, group, device, model, optimizer, inputs, _loss)


def _torchvision_models(name: str) -> Any:
    try:
        return import_module("torchvision.models")
    except ImportError as error:
        raise InputError(
            f"{name} needs the package torchvision, which cannot be imported ({error}); install torchvision"
        ) from error


def _loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    text = model(inputs["images"])
    if isinstance(text, torch.Tensor):
        return functional.cross_entropy(text, inputs["labels"])
    main, auxiliary = text
    return functional.cross_entropy(main, inputs["labels"]) + AUXILIARY_WEIGHT * functional.cross_entropy(
        auxiliary, inputs["labels"]
    )
