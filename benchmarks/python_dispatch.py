"""What Python spends around ops where DTensor and FSDP2 dispatch them, on a CPU: in calls of plain PyTorch.

    python benchmarks/python_dispatch.py

The host model (`_models/host/columns.py`) has these ratios. Tensors are tiny and collectives reach nobody, so that what is left
is Python: an op on a sharded tensor, beside the same on a plain one; each further tensor of a list; and the hooks of one module
under FSDP2, beside the forward pass of a linear layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

ROUNDS, CALLS, LAYERS = 30, 50, 16


def least_us(function: Callable[[], Any], count: int) -> float:
    """Of so many calls at once, the fastest round; microseconds a call."""
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - begun)
    return 1e6 * best / count


def ops() -> None:
    """One op on one tensor, and on lists of them."""
    mesh = init_device_mesh("cpu", (2,))
    plain = [torch.randn(4, 8) for _ in range(32)]
    sharded: list[Any] = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in plain]
    one = least_us(lambda: [plain[0].add_(1.0) for _ in range(CALLS)], CALLS)
    other = least_us(lambda: [sharded[0].add_(1.0) for _ in range(CALLS)], CALLS)
    print(f"add_: {one:.2f} us plain, {other:.1f} us sharded, {(other - one) / one:.1f} calls more")
    few, many = (least_us(lambda: torch._foreach_add_(sharded[:count], 1.0), 1) for count in (4, 32))  # noqa: B023
    print(f"_foreach_add_: {(many - few) / 28 / one:.2f} calls of add_ for each tensor")


def conversions() -> None:
    """A plain tensor made a DTensor and back, both ways."""
    mesh, layer = init_device_mesh("cpu", (2,)), nn.Linear(8, 8)
    x, gradient = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)

    def made() -> Any:
        return DTensor.from_local(x, mesh, [Shard(0)], run_check=False)

    calls: tuple[Callable[[], Any], ...] = (
        lambda: layer(x),
        made,
        lambda: made().to_local(),
        lambda: (x * 1).backward(gradient),
        lambda: made().to_local().backward(gradient),
    )
    linear, there, back, alone, both = (least_us(lambda: [call() for _ in range(CALLS)], CALLS) for call in calls)  # noqa: B023
    print(f"linear: {linear:.2f} us; from_local {there / linear:.1f} of it, to_local {(back - there) / linear:.1f}, ", end="")
    print(f"their backward together {(both - back - alone) / linear:.1f}")


def hooks() -> None:
    """Linear layers alone, and each a unit of FSDP2 that stays gathered and whose gradients are not reduced yet."""
    x, found = torch.randn(4, 8), []
    for shard in (False, True):
        model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(LAYERS)])
        if shard:
            for part in (*model, model):
                fully_shard(part, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
        for _ in range(2):
            model(x).sum().backward()
        forward = least_us(lambda: model(x), LAYERS)  # noqa: B023
        found.append((forward, least_us(lambda: model(x).sum().backward(), LAYERS) - forward))  # noqa: B023
    (forward, backward), (hooked, back) = found
    print(f"linear: {forward:.2f} us forward; FSDP2: {(hooked - forward) / forward:.1f} forward passes more forward, ", end="")
    print(f"{(back - backward) / forward:.1f} backward")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    ops()
    conversions()
    hooks()
