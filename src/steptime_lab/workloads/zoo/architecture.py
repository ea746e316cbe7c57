"""`Architecture`: a training step of the zoo by its name, with the kin it belongs to and how it is trained.

A module of the zoo has the architectures of one group: functions that make a model and its loss, under `@architecture`.
Nothing but torch is needed, and nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

GROUPS = (
    "decoders", "encoders", "sequences and speech", "vision transformers", "residual convnets", "mobile convnets",
    "dense prediction", "recurrent", "recommenders", "graphs and others",
)  # fmt: skip
"""Kin: what one group has learnt from another of it says little about what nobody has seen."""

FIRST_VISIT, SECOND_VISIT = "first visit", "second visit"
"""When an architecture came in: those of the first showed what was wrong and were looked at since, the others were not."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "pure_bf16")
"""fp32: convolutions in TF32 as PyTorch defaults them, products not; tf32: these too; bf16 and fp16: autocast."""

CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels_last"
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SMALL_BATCH, _SMALL_LAYERS, _SMALL_TOKENS = 2, 1, 64
# So low that weights stay finite over the thousands of steps of a measurement.
_SGD_RATE, _ADAM_RATE = 1e-5, 1e-6


@dataclass(frozen=True, slots=True)
class Place:
    """Where and how an architecture is made: the device, the type and layout of its inputs, and whether it is a trial."""

    device: str = "cuda"
    small: bool = False
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    def batch(self, full: int) -> int:
        """Samples of a step."""
        return min(full, _SMALL_BATCH) if self.small else full

    def layers(self, full: int) -> int:
        """Equal layers in a row."""
        return min(full, _SMALL_LAYERS) if self.small else full

    def tokens(self, full: int) -> int:
        """Length of a text or a signal."""
        return min(full, _SMALL_TOKENS) if self.small else full

    def floats(self, *shape: int) -> Tensor:
        """Inputs."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Indices below a number."""
        return torch.randint(0, high, shape, device=self.device)

    def images(self, batch: int, size: int, channels: int = 3) -> Tensor:
        """Square images in the layout that is asked for."""
        images = self.floats(self.batch(batch), channels, size, size)
        return images.contiguous(memory_format=torch.channels_last) if self.channels_last else images


@dataclass(frozen=True, slots=True)
class Trainee:
    """A model and the loss of one step; or the whole step, where it is no forward, backward and update in turn."""

    model: nn.Module
    loss: Callable[[], Tensor] | None = None
    step: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class ZooStep:
    """A step ready to run, and the model whose weights it changes."""

    run: Callable[[], None]
    model: nn.Module

    def __call__(self) -> None:
        """Trains once."""
        self.run()

    def finite(self) -> bool:
        """Whether all weights are: others draw less power, and measure something else."""
        return all(bool(torch.isfinite(each).all()) for each in self.model.parameters())


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to make one and how it is trained."""

    name: str
    group: str
    precision: str
    layout: str
    optimizer: str
    make: Callable[[Place], Trainee]
    about: str
    visit: str = FIRST_VISIT

    def build(self, device: str = "cuda", *, small: bool = False) -> ZooStep:
        """Model, optimiser and inputs on a device, and the step; `small`: a trial that a CPU can run."""
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        pure = self.precision == "pure_bf16"
        last = self.layout == CHANNELS_LAST
        place = Place(device, small, torch.bfloat16 if pure else torch.float32, last)
        with torch.device(device):
            trainee = self.make(place)
        model = trainee.model.to(device, place.dtype)
        if last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if trainee.step is not None:
            return ZooStep(trainee.step, model)
        assert trainee.loss is not None
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        autocast = _AUTOCAST.get(self.precision)
        if self.precision == "fp16":
            return ZooStep(_scaled(device, trainee.loss, optimizer), model)
        return ZooStep(_plain(device, trainee.loss, optimizer, autocast), model)


def _plain(
    device: str, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, autocast: torch.dtype | None
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _scaled(device: str, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    scaler = torch.amp.GradScaler(device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.float16):
            value = loss()
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    return step


class Lamb(torch.optim.Optimizer):
    """Adam whose update of each tensor is scaled by the norms of its weights and of the update; one tensor at a time."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = _ADAM_RATE) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group["lr"])

    def _update(self, weight: nn.Parameter, rate: float) -> None:
        state = self.state[weight]
        if not state:
            state["first"], state["second"] = torch.zeros_like(weight), torch.zeros_like(weight)
        first, second = state["first"], state["second"]
        first.lerp_(weight.grad, 0.1)
        second.mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
        update = first / (second.sqrt() + 1e-6) + 0.01 * weight
        ratio = weight.norm() / (update.norm() + 1e-6)
        weight.sub_(rate * ratio * update)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=_SGD_RATE, momentum=0.9),
    "sgd_plain": partial(torch.optim.SGD, lr=_SGD_RATE),
    "adam": partial(torch.optim.Adam, lr=_ADAM_RATE),
    "adam_single": partial(torch.optim.Adam, lr=_ADAM_RATE, foreach=False),
    "adamw": partial(torch.optim.AdamW, lr=_ADAM_RATE),
    "adamw_fused": partial(torch.optim.AdamW, lr=_ADAM_RATE, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=_SGD_RATE),
    "rmsprop": partial(torch.optim.RMSprop, lr=_ADAM_RATE, momentum=0.9),
    "lamb": Lamb,
}


_FOUND: dict[str, Architecture] = {}


def architecture(
    group: str, precision: str = "fp32", optimizer: str = "adamw", *, layout: str = CONTIGUOUS, visit: str = FIRST_VISIT
) -> Callable[[Callable[[Place], Trainee]], Callable[[Place], Trainee]]:
    """Puts a function into the zoo, under its own name."""
    assert group in GROUPS
    assert precision in PRECISIONS
    assert optimizer in OPTIMIZERS

    def register(make: Callable[[Place], Trainee]) -> Callable[[Place], Trainee]:
        assert make.__name__ not in _FOUND
        about = (make.__doc__ or "").strip().partition("\n")[0]
        _FOUND[make.__name__] = Architecture(make.__name__, group, precision, layout, optimizer, make, about, visit)
        return make

    return register


def registered() -> dict[str, Architecture]:
    """What was put in so far, group by group."""
    return dict(sorted(_FOUND.items(), key=lambda item: GROUPS.index(item[1].group)))
