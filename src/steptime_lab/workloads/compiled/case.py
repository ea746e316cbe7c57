"""`CompiledCase`: one architecture, how it is trained and what of it is compiled; eager and compiled from the same parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from steptime_lab.workloads.compiled.architecture import Make, Network, Site

DEFAULT, GRAPHS = "default", "reduce-overhead"
MODES = (DEFAULT, GRAPHS)
"""Of `torch.compile`; the second replays CUDA graphs."""

MODEL, LOSS, STEP, OPTIMIZER, LAYERS, INSIDE = "model", "loss", "step", "optimizer", "layers", "inside"
WHAT = (MODEL, LOSS, STEP, OPTIMIZER, LAYERS, INSIDE)
"""What is compiled: the model; it and the loss as one function; the whole step; the model, and the optimiser's step by itself;
every layer by itself; the model inside `DistributedDataParallel`, which otherwise is compiled around it."""

PLAIN, CHECKPOINTED, WATCHED = "plain", "checkpointed", "watched"
LAYER_KINDS = (PLAIN, CHECKPOINTED, WATCHED)
"""Layers as they are, recomputed in the backward pass, or one of them watched by code that Dynamo may not trace."""

PRECISIONS = ("fp32", "tf32", "bf16", "pure_bf16")
"""fp32: convolutions in TF32 as PyTorch defaults them, products not; tf32: these too; bf16: autocast."""

# So low that weights stay finite over the thousands of steps of a measurement.
_RATE = 1e-6
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=_RATE),
    "adamw_fused": partial(torch.optim.AdamW, lr=_RATE, fused=True),
    "adamw_capturable": partial(torch.optim.AdamW, lr=_RATE, capturable=True),
    "sgd": partial(torch.optim.SGD, lr=_RATE, momentum=0.9),
}


@dataclass(frozen=True, slots=True)
class CompiledCase:
    """What is trained and how; `eager` and `compiled` make the step as `steptime.capture` and a training script call it."""

    name: str
    make: Make
    precision: str
    optimizer: str
    mode: str
    what: str
    layers: str = PLAIN
    times: float = 1.0  # so many times the architecture's own samples
    ranks: int = 1
    profiled: bool = True  # whether its kernels are of interest

    @property
    def architecture(self) -> str:
        """Its name."""
        return self.make.__name__

    def eager(self, device: str = "cuda", rank: int = 0, ranks: int = 1) -> Callable[[], None]:
        """The step without `torch.compile`."""
        return self.build(device, rank, ranks, compiled=False)

    def compiled(self, device: str = "cuda", rank: int = 0, ranks: int = 1) -> Callable[[], None]:
        """The step with it."""
        return self.build(device, rank, ranks, compiled=True)

    def build(
        self, device: str, rank: int = 0, ranks: int = 1, *, compiled: bool, small: bool = False, backend: str = "inductor"
    ) -> Callable[[], None]:
        """Model, optimiser and inputs on a device, and the step; `small`: a trial that a CPU can run."""
        torch.manual_seed(rank)
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        dtype = torch.bfloat16 if self.precision == "pure_bf16" else torch.float32
        with torch.device(device):
            net = self.make(Site(device, dtype, self.times, small))
        model = net.model.to(device, dtype)
        _prepare(net, self.layers)
        wrap = partial(torch.compile, backend=backend, **({} if backend != "inductor" else {"mode": self.mode}))
        if compiled and self.what == LAYERS:
            assert net.layers is not None
            for layer in net.layers:
                layer.compile(backend=backend, **({} if backend != "inductor" else {"mode": self.mode}))
        if compiled and self.what == INSIDE:
            model.compile(backend=backend)
        trained: Any = _parallel(model, device) if ranks > 1 else model
        optimizer = OPTIMIZERS[self.optimizer]([each for each in model.parameters() if each.requires_grad])
        if compiled and self.what in (MODEL, OPTIMIZER):
            trained = wrap(trained)
        return self._step(net, trained, optimizer, device, wrap if compiled else None)

    def _step(
        self, net: Network, trained: Any, optimizer: torch.optim.Optimizer, device: str, wrap: Callable[[Any], Any] | None
    ) -> Callable[[], None]:
        """Forward, backward and update, compiled where asked."""

        def loss() -> Tensor:
            return net.loss(trained(*net.inputs))

        forward = wrap(loss) if wrap is not None and self.what == LOSS else loss
        update = wrap(optimizer.step) if wrap is not None and self.what == OPTIMIZER else optimizer.step
        autocast = partial(torch.autocast, torch.device(device).type, torch.bfloat16, enabled=self.precision == "bf16")

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with autocast():
                value = forward()
            value.backward()
            update()

        return wrap(step) if wrap is not None and self.what == STEP else step


def _parallel(model: nn.Module, device: str) -> nn.Module:
    """As every rank of a job runs it, with PyTorch's defaults, in the group that a launcher's variables say."""
    cuda = torch.device(device).type == "cuda"
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else None
    return DistributedDataParallel(model, device_ids=None if place is None else [place])


class Checkpointed(nn.Module):
    """A layer that keeps what it was given, and computes the rest again in the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        """The layer's."""
        return checkpoint(self.layer, *inputs, use_reentrant=False)


class Watched(nn.Module):
    """A layer whose output is watched by code that Dynamo leaves alone: a running mean of its size."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("size", torch.zeros(()), persistent=False)

    def forward(self, *inputs: Tensor) -> Any:
        """The layer's."""
        result = self.layer(*inputs)
        self.note(result)
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self, x: Tensor) -> None:
        """What a logger would show."""
        size = self.get_buffer("size")
        with torch.no_grad():
            size.lerp_(x.detach().float().square().mean().sqrt().to(size.dtype), 0.01)


def _prepare(net: Network, kind: str) -> None:
    """Wraps layers of the model as asked."""
    if kind == PLAIN:
        return
    layers = net.layers
    assert layers is not None
    if kind == WATCHED:
        middle = len(layers) // 2
        layers[middle] = Watched(layers[middle]).to(next(layers[middle].parameters()).device)
        return
    for at, layer in enumerate(layers):
        layers[at] = Checkpointed(layer)
