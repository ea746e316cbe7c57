"""What Python spends around ops where DTensor and FSDP2 dispatch them, on a CPU: in calls of plain PyTorch.

    python benchmarks/python_dispatch.py

The host model (`_models/host/columns.py`) has these ratios. Tensors are tiny and collectives reach nobody, so that what is left
is Python, and all of it is told in calls of `add_` on a plain tensor: an op on a sharded tensor; each further tensor of a list;
what makes DTensors and plain tensors of each other; a redistribution; the hooks of one module under FSDP2, and what each of its
parameters adds where they gather and where they reduce; a checkpoint and each tensor that its block keeps. CPU time is counted,
so that a busy machine tells the same.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

ROUNDS, CALLS, LAYERS = 30, 50, 16
PARAMETERS = (1, 16)


def least_us(function: Callable[[], Any], count: int) -> float:
    """Of so many calls at once, the fastest round; microseconds of CPU a call."""
    best = float("inf")
    function()
    for _ in range(ROUNDS):
        begun = time.process_time()
        function()
        best = min(best, time.process_time() - begun)
    return 1e6 * best / count


def repeated(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    return least_us(lambda: [call() for _ in range(CALLS)], CALLS)


def ops() -> float:
    """One op on one tensor, and on lists of them; the microseconds of the plain op, in which all else is told."""
    mesh = init_device_mesh("cpu", (2,))
    plain = [torch.randn(4, 8) for _ in range(32)]
    sharded: list[Any] = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in plain]
    one, other = repeated(lambda: plain[0].add_(1.0)), repeated(lambda: sharded[0].add_(1.0))
    print(f"add_: {one:.2f} us plain, {other:.1f} us sharded, {(other - one) / one:.1f} calls more")
    few, many = (least_us(lambda: torch._foreach_add_(sharded[:count], 1.0), 1) for count in (4, 32))  # noqa: B023
    print(f"_foreach_add_: {(many - few) / 28 / one:.2f} calls of add_ for each tensor")
    return one


def conversions(add_us: float) -> None:
    """A plain tensor made a DTensor and back, and a DTensor redistributed, both ways."""
    mesh = init_device_mesh("cpu", (2,))
    x, gradient = torch.randn(4, 8, 8, requires_grad=True), torch.randn(4, 8, 8)
    shard, whole = [Shard(1)], [Replicate()]

    def made() -> Any:
        return DTensor.from_local(x, mesh, shard, run_check=False)

    kept = made()
    there, back = repeated(made), repeated(kept.to_local)
    alone, both = repeated(lambda: (x * 1).backward(gradient)), repeated(lambda: made().to_local().backward(gradient))
    print(f"from_local {there / add_us:.0f} calls of add_, to_local {back / add_us:.0f}, ", end="")
    print(f"their backward together {(both - there - back - alone) / add_us:.0f}")
    gathered = repeated(lambda: kept.redistribute(mesh, whole))
    of_whole = DTensor.from_local(torch.randn(4, 16, 8), mesh, whole, run_check=False)
    forth = repeated(lambda: torch.autograd.grad(kept.redistribute(mesh, whole), kept, of_whole))
    partial = DTensor.from_local(torch.randn(4, 16, 8, requires_grad=True), mesh, [Partial()], run_check=False)
    summed = repeated(lambda: partial.redistribute(mesh, shard))
    of_shard = DTensor.from_local(gradient, mesh, shard, run_check=False)
    forth_too = repeated(lambda: torch.autograd.grad(partial.redistribute(mesh, shard), partial, of_shard))
    print(
        f"redistribute: {gathered / add_us:.0f} calls where it gathers, {summed / add_us:.0f} where it scatters a sum; ", end=""
    )
    print(f"backward {(forth - gathered) / add_us:.0f} and {(forth_too - summed) / add_us:.0f}")


def hooks(add_us: float) -> None:
    """Modules of few and many parameters alone, and each a unit of FSDP2: with and without gathers."""
    print("FSDP2, forward and backward, calls of add_ for a unit of so many parameters:")
    for reduces, reshards in ((False, False), (True, False), (True, True)):
        told = []
        for count in PARAMETERS:
            (forward, backward), (hooked, back) = (_passes_us(count, shard, reduces, reshards) for shard in (False, True))
            told.append(f"{count}: {(hooked - forward) / add_us:.0f} {(back - backward) / add_us:.0f}")
        print(f"  reduces {reduces}, gathers again {reshards}: {', '.join(told)}")


def _passes_us(parameters: int, shard: bool, reduces: bool, reshards: bool) -> tuple[float, float]:
    """Microseconds that a unit takes forward and backward."""
    x = torch.randn(4, 8)
    units = [nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(parameters)]) for _ in range(LAYERS)]
    model: Any = nn.Sequential(*units)
    if shard:
        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=reshards)
        if not reduces:
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
    for _ in range(2):
        model(x).sum().backward()
    forward, whole = least_us(lambda: model(x), LAYERS), least_us(lambda: model(x).sum().backward(), LAYERS)
    return forward, whole - forward


class _Sigmoids(nn.Module):
    """Ops that each keep one tensor for their backward pass."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for _ in range(self.count):
            x = torch.sigmoid(x)
        return x


def checkpoints(add_us: float) -> None:
    """What a checkpoint takes besides its block run twice: once, and for each tensor that its block keeps."""
    x = torch.randn(2, 2, requires_grad=True)
    print("checkpoints, calls of add_ for a block that keeps so many tensors:")
    for reentrant in (False, True):
        told = []
        for count in PARAMETERS:
            block = _Sigmoids(count)
            forward, whole = repeated(lambda: block(x)), repeated(lambda: block(x).sum().backward())  # noqa: B023
            both = repeated(lambda: checkpoint(block, x, use_reentrant=reentrant).sum().backward())  # noqa: B023
            told.append(f"{count}: {(both - whole - forward) / add_us:.0f}")
        print(f"  reentrant {reentrant}: {', '.join(told)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    add = ops()
    conversions(add)
    hooks(add)
    checkpoints(add)
