"""What the Hugging Face Transformers share: random weights made on the device, AdamW, a batch of random tokens.

Nothing here is downloaded, and nothing in a step waits for the device: where the library would look into a mask or a padding
token to decide how to attend, it is given what it would have decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from steptime.errors import InputError
from steptime_lab.workloads.case import Case, GroupLike
from steptime_lab.workloads.training import Inputs, ModelStep

LEARNING_RATE = 5e-5
"""Of AdamW, as published for the three models."""


def pretrained_class(module: str, name: str) -> Any:
    """A class of the library, read from its own module: the library's front door reads hundreds of files."""
    try:
        return getattr(import_module(f"transformers.models.{module}"), name)
    except ImportError as error:
        raise InputError(
            f"{name} needs the package transformers, which cannot be imported ({error}); install transformers"
        ) from error


def transformer_step(
    case: Case, group: GroupLike, device: torch.device, make: Callable[[], nn.Module], inputs: Sequence[Inputs]
) -> ModelStep:
    """A training step of the model that `make` makes, on inputs that include its labels."""
    with device:
        # Some weights are made by constructors that do not look at the default device.
        model = make().to(device).train()
    optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=LEARNING_RATE)
    return ModelStep(case, group, device, model, optimizer, inputs, _loss)


def tokens(shape: tuple[int, ...], vocabulary: int, device: torch.device, source: torch.Generator) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(vocabulary, shape, device=device, generator=source)


def _loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    loss: torch.Tensor = model(**inputs).loss
    return loss
