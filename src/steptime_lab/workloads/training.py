"""`ModelStep`: a training step of a data-parallel model: forward, backward, optimiser."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steptime_lab.workloads.case import Case, GroupLike
from steptime_lab.workloads.shared_buffers import shared_buffers

if TYPE_CHECKING:
    from steptime._lookups.statistics import Statistics

Inputs = Mapping[str, torch.Tensor]
Loss = Callable[[nn.Module, Inputs], torch.Tensor]

BATCHES = 4
"""Different input batches of a case. More would only cost memory: dense work does not depend on values."""


def data_parallel(model: nn.Module, group: GroupLike, device: torch.device) -> nn.Module:
    """The model as every rank of a job runs it, with PyTorch's defaults; itself where there is one rank."""
    if group.ranks == 1:
        return model
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


_AUTOCAST = {"bf16": torch.bfloat16, "bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}


def precision(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """What the forward pass runs under."""
    return torch.autocast(device.type, _AUTOCAST[name]) if name in _AUTOCAST else nullcontext()


class Tf32(AbstractContextManager[None]):
    """Products of float32 in TF32 while it lasts: the switch is the process's, and cases take turns."""

    def __enter__(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False


def random_source(group: GroupLike, device: torch.device) -> torch.Generator:
    """Where random inputs come from: the same for the same rank, another for every rank."""
    return torch.Generator(device).manual_seed(1 + group.rank)


class ModelStep:
    """One rank's step of a model that is whole on every rank."""

    def __init__(
        self,
        case: Case,
        group: GroupLike,
        device: torch.device,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        inputs: Sequence[Inputs],
        loss: Loss,
    ) -> None:
        self.model = data_parallel(model, group, device)
        self.optimizer = optimizer
        self.batches = len(inputs)
        self._inputs = list(inputs)
        self._loss = loss
        self._precision = precision(case.precision, device)
        self._device = device
        self._iteration = 0

    @property
    def spare_bytes(self) -> int:
        """All that cases with tables left in buffers for later ones of them."""
        return shared_buffers(self._device).nbytes()

    def __call__(self) -> None:
        """Queues the next step."""
        inputs = self._inputs[self._iteration % self.batches]
        self._iteration += 1
        self.optimizer.zero_grad()
        with self._precision:
            loss = self._loss(self.model, inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def lookups(self, iteration: int) -> list[Statistics]:
        """No tables, no lookups."""
        del iteration
        return []

    def close(self) -> None:
        """Frees the model. Reducers and their hooks hold each other, so the collector has to run."""
        del self.model, self.optimizer, self._loss
        self._inputs.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
