"""Reference steps: small training steps that a calibration times, because nothing else shows how fast a host trains.

Bursts of one call do not: the thread that issues them never sleeps, where the threads of a step take turns, and on a host whose
cores have two speeds (a busy neighbour's) the two come out by up to half apart, minutes and seconds from each other. Steps are
timed in slots of a fraction of a second, in rounds over all of them, each slot from an empty device to an empty device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from steptime._calibrate.harness.group import no_collector
from steptime._measurements.sets import HOST
from steptime._models.host.model import REFERENCE_STEP

if TYPE_CHECKING:
    from steptime._calibrate.harness.group import Group
    from steptime._calibrate.harness.session import Session

Step = Callable[[], None]

SLOT_S = 0.25
# Calls before the first slot: they load what is loaded once.
WARM_UP = 10


def _step(loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss())
        optimizer.step()

    return step


def _layers(*widths: int) -> nn.Sequential:
    layers = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def perceptron(device: str = "cuda") -> Step:
    """Eight linear layers, Adam."""
    model = _layers(*[128] * 9).to(device)
    x, y = (torch.randn(32, 128, device=device) for _ in range(2))
    return _step(lambda: functional.mse_loss(model(x), y), torch.optim.Adam(model.parameters()))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.into(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: torch.Tensor = x + self.inner(self.norms[1](x))
        return result


def transformer(device: str = "cuda") -> Step:
    """Three blocks with attention, AdamW."""
    model = nn.Sequential(*(_Block(128, 2) for _ in range(3)), nn.Linear(128, 16)).to(device)
    x, y = torch.randn(2, 32, 128, device=device), torch.zeros(64, dtype=torch.long, device=device)
    return _step(lambda: functional.cross_entropy(model(x).view(64, 16), y), torch.optim.AdamW(model.parameters()))


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norms[0](self.layers[0](x)))
        return functional.relu(self.norms[1](self.layers[1](inner)) + x)


def convolutions(device: str = "cuda") -> Step:
    """Four residual blocks, SGD with momentum."""
    blocks = (_Residual(32) for _ in range(4))
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model.to(device)
    x, y = torch.randn(2, 3, 32, 32, device=device), torch.zeros(2, dtype=torch.long, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return _step(lambda: functional.cross_entropy(model(x), y), optimizer)


def towers(device: str = "cuda") -> Step:
    """Two towers over embeddings, gates between element-wise ops, SGD."""
    tables = nn.ModuleList(nn.Embedding(1000, 32) for _ in range(4)).to(device)
    left, right = (_layers(64, 64, 32).to(device) for _ in range(2))
    asked = [torch.arange(64, device=device) for _ in range(4)]
    clicked = torch.zeros(64, device=device)

    def loss() -> torch.Tensor:
        looked_up = [table(each) for table, each in zip(tables, asked, strict=True)]
        first, second = left(torch.cat(looked_up[:2], 1)), right(torch.cat(looked_up[2:], 1))
        gated = torch.sigmoid(first) * second + torch.tanh(second) * first
        return functional.binary_cross_entropy_with_logits(gated.sum(1), clicked)

    trained = [*tables.parameters(), *left.parameters(), *right.parameters()]
    return _step(loss, torch.optim.SGD(trained, lr=0.01))


REFERENCE_STEPS: Mapping[str, Callable[[str], Step]] = {
    made.__name__: made for made in (perceptron, transformer, convolutions, towers)
}


def time_reference_steps(group: Group, session: Session, seconds: float, source: str) -> None:
    """Rounds over all reference steps until time is up, two at least; a row for each."""
    steps = {}
    for name, make in REFERENCE_STEPS.items():
        try:
            steps[name] = _warm(make(group.device.type))
        except RuntimeError as error:  # a GPU that lacks memory or an op: the others tell as much
            session.warn(f"reference step {name} cannot be run ({type(error).__name__})")
    times: dict[str, list[float]] = {name: [] for name in steps}
    counts = {name: _steps_of_a_slot(step, group, seconds) for name, step in steps.items()}
    group.barrier()
    ends_at, rounds = time.monotonic() + seconds, 0
    with no_collector():
        while rounds < 2 or time.monotonic() < ends_at:
            for name, step in steps.items():
                times[name].append(_slot_ns(step, counts[name], group))
            rounds += 1
    cores = len(os.sched_getaffinity(0))
    alike = {"phase": "other", "profiler": "off", "launches": None, "cores": cores, "share": group.share}
    for name, taken in times.items():
        session.store.add(HOST, {"kind": REFERENCE_STEP, "op": name, "call": "", "source": source, **alike, "times_ns": taken})
    session.store.flush()


def _warm(step: Step) -> Step:
    for _ in range(WARM_UP):
        step()
    return step


def _steps_of_a_slot(step: Step, group: Group, seconds: float) -> int:
    """So many that every step gets at least two slots."""
    once_ns = _slot_ns(step, 2, group)
    return max(2, int(min(SLOT_S, seconds / (2 * len(REFERENCE_STEPS))) * 1e9 / max(once_ns, 1.0)))


def _slot_ns(step: Step, count: int, group: Group) -> float:
    group.synchronize()
    begun = time.perf_counter_ns()
    for _ in range(count):
        step()
    group.synchronize()
    return (time.perf_counter_ns() - begun) / count
