"""`GroupEmitter`: an `Emitter` whose collectives run in named groups of ranks, and that can be told to write nothing."""

from __future__ import annotations

from collections.abc import Mapping

from steptime._build.emit.ops import Emitter
from steptime._program.execution import Comm
from steptime._program.program import Tensor, Value

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"


class GroupEmitter(Emitter):
    """Writes the step of rank 0 of a job whose groups are known by name; gradients are reduced over `DATA`."""

    def __init__(self, groups: Mapping[str, tuple[int, ...]], *, world_size: int, source: str = "") -> None:
        self.muted = False  # nothing is written; what recomputation leaves out
        super().__init__(rank=0, world_size=world_size, source=source, groups=groups)

    def op(
        self,
        name: str,
        inputs: tuple[Value, ...] = (),
        outputs: tuple[Value, ...] = (),
        *,
        sequence: int = -1,
        comm: Comm | None = None,
        forward_thread: int = 0,
    ) -> int:
        """Writes an op with nothing inside it, unless muted; gives its row."""
        if self.muted:
            return -1
        return super().op(name, inputs, outputs, sequence=sequence, comm=comm, forward_thread=forward_thread)

    def all_reduce(self, tensors: tuple[Tensor, ...], group: str = DATA, *, asynchronous: bool = True) -> int:
        """Sums tensors over the ranks that hold the same parameters, in place."""
        return super().all_reduce(tensors, group, asynchronous=asynchronous)


def compact_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of an elementwise result: its dimensions lie in the order of the argument's, without gaps."""
    assert x.strides is not None
    strides, result, step = x.strides, [0] * len(x.shape), 1
    for index in sorted(range(len(x.shape)), key=lambda at: (strides[at], -at)):
        result[index] = step
        step *= x.shape[index]
    return tuple(result)
