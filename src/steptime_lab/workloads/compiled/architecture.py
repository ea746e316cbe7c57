"""`Network`: what one architecture of the compiled set is made of, and where it is made.

A module of this package has architectures of one kind: functions that make a model, its inputs and its loss as a script
would, under `@network`. Nothing but torch is needed, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_SMALL_BATCH, _SMALL_TOKENS = 2, 32


@dataclass(frozen=True, slots=True)
class Site:
    """Where and how large a model is made: the device, the type of its inputs, samples of a step, and whether it is a trial."""

    device: str = "cuda"
    dtype: torch.dtype = torch.float32
    times: float = 1.0  # so many times the samples that the architecture has by itself
    small: bool = False

    def batch(self, full: int) -> int:
        """Samples of a step."""
        return min(full, _SMALL_BATCH) if self.small else round(self.times * full)

    def tokens(self, full: int) -> int:
        """Length of a text or a signal."""
        return min(full, _SMALL_TOKENS) if self.small else full

    def rows(self, full: int) -> int:
        """Of a table."""
        return min(full, 64) if self.small else full

    def floats(self, *shape: int) -> Tensor:
        """Inputs and wanted values."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Indices below a number."""
        return torch.randint(0, high, shape, device=self.device)


@dataclass(frozen=True, slots=True)
class Network:
    """A model, what it is given in every step, and the loss of what it returns."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Tensor]
    layers: nn.ModuleList | None = None  # equal ones in a row, which can be compiled or recomputed one by one


Make = Callable[[Site], Network]
_FOUND: dict[str, Make] = {}


def network(make: Make) -> Make:
    """Puts a function into the set, under its own name."""
    assert make.__name__ not in _FOUND
    _FOUND[make.__name__] = make
    return make


def registered() -> dict[str, Make]:
    """What was put in so far."""
    return dict(_FOUND)


def next_words(words: Tensor) -> Callable[[Tensor], Tensor]:
    """Cross entropy of the scores of every word at every place."""
    return lambda scores: functional.cross_entropy(scores.flatten(0, -2), words.flatten())


def classes(labels: Tensor) -> Callable[[Tensor], Tensor]:
    """Cross entropy of the scores of every sample."""
    return lambda scores: functional.cross_entropy(scores, labels)


def near(wanted: Tensor) -> Callable[[Tensor], Tensor]:
    """Mean of squares."""
    return lambda values: functional.mse_loss(values, wanted)


def likely(labels: Tensor) -> Callable[[Tensor], Tensor]:
    """Binary cross entropy of one score per sample."""
    return lambda scores: functional.binary_cross_entropy_with_logits(scores.flatten(), labels)
