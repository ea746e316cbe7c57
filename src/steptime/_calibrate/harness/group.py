"""`Group`: the ranks that measure together, as one of them sees it; the garbage collector stays out of what they time."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def no_collector() -> Iterator[None]:
    """The collector stays out; what lives now (whole libraries) is not looked at again by later collections."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class Group:
    """This rank, its device, and a way to agree with the others that does not touch the device."""

    rank: int
    ranks: int
    device_name: str  # cuda:0 | cpu
    share: int  # how many ranks share one GPU; 1: a GPU each
    _side: Any = None  # a gloo group, so that agreeing leaves no kernels behind

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        import torch

        return torch.device(self.device_name)

    def decide(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        if self.ranks == 1:
            return value
        import torch
        import torch.distributed as dist

        text = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(text, 0, group=self._side)
        return int(text)

    def all_agree(self, ok: bool) -> bool:
        """Whether every rank says so."""
        return self.gather(int(ok)).count(0) == 0

    def gather(self, value: float) -> list[float]:
        """Every rank's value, on every rank."""
        return [row[0] for row in self.gather_rows([value])]

    def gather_rows(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, on every rank; each rank gives equally many."""
        if self.ranks == 1:
            return [list(values)]
        import torch
        import torch.distributed as dist

        mine = torch.tensor(values, dtype=torch.float64)
        every = [torch.zeros_like(mine) for _ in range(self.ranks)]
        dist.all_gather(every, mine, group=self._side)
        return [item.tolist() for item in every]

    def gather_text(self, text: str) -> list[str]:
        """Every rank's text, on every rank."""
        if self.ranks == 1:
            return [text]
        import torch
        import torch.distributed as dist

        data = text.encode()
        sizes = [int(size) for size in self.gather(len(data))]
        longest = max(*sizes, 1)
        mine = torch.tensor(list(data.ljust(longest, b" ")), dtype=torch.uint8)
        every = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(every, mine, group=self._side)
        return [bytes(part[:size].tolist()).decode() for part, size in zip(every, sizes, strict=True)]

    def barrier(self) -> None:
        """Waits until every rank is here and its device has nothing left to do."""
        self.synchronize()
        if self.ranks > 1:
            self.gather(0.0)

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device_name.startswith("cuda"):
            import torch

            torch.cuda.synchronize()


def join() -> Group:
    """The group this process was started for by `ranks.run_ranks`, from its environment."""
    import torch
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = os.environ["STEPTIME_DEVICE"]
    share = int(os.environ["STEPTIME_SHARE"])
    cuda = name.startswith("cuda")
    if cuda:
        torch.cuda.set_device(torch.device(name))
    if ranks == 1:
        return Group(rank, ranks, name, share)
    if cuda:
        dist.init_process_group("nccl", device_id=torch.device(name))
        side = dist.new_group(backend="gloo")
    else:
        dist.init_process_group("gloo")
        side = dist.group.WORLD
    return Group(rank, ranks, name, share, side)


def leave() -> None:
    """Ends the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
