"""`GroupEmitter`: an `Emitter` whose collectives run in named groups of ranks, and that can be told to write nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from steptime._build.emit.ops import GROUP, GROUP_DESCRIPTION, OBJECT, Emitter
from steptime._program.collectives import WAIT
from steptime._program.execution import COMM_NODE, Comm, ExecutionTrace, Group
from steptime._program.program import Tensor, Value
from steptime._units import dtype_bytes

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
_NO_TIMEOUT = -1


class GroupEmitter(Emitter):
    """Writes the step of rank 0 of a job whose groups are known by name; a group of all ranks has PyTorch's own name."""

    def __init__(self, groups: Mapping[str, tuple[int, ...]], *, world_size: int, source: str = "") -> None:
        self.muted = False  # nothing is written; what recomputation leaves out
        super().__init__(rank=0, world_size=world_size, source=source)
        self._groups = {
            name: Group(GROUP, GROUP_DESCRIPTION, ranks, len(ranks))
            if len(ranks) == world_size
            else Group(name, name, ranks, len(ranks))
            for name, ranks in groups.items()
        }

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

    def size(self, group: str) -> int:
        """How many ranks a group has; 1 where there is none."""
        return self._groups[group].size if group in self._groups else 1

    def all_reduce(self, tensors: tuple[Tensor, ...], *, asynchronous: bool = True) -> int:
        """Sums tensors over the ranks that hold the same parameters, in place."""
        return self.reduced(tensors, DATA, asynchronous=asynchronous)

    def reduced(self, tensors: tuple[Tensor, ...], group: str, *, asynchronous: bool = False) -> int:
        """Sums tensors over a group, in place; gives what `await_in` takes."""
        called = (tensors, OBJECT, OBJECT, None, asynchronous, _NO_TIMEOUT)
        with self.around("c10d::allreduce_", called, (tensors, OBJECT)):
            return self._in_group(group, "allreduce", "all_reduce", "nccl:all_reduce", (tensors,), (tensors,))

    def broadcast(self, tensor: Tensor, group: str) -> int:
        """Gives every rank of a group what its first has."""
        called = ((tensor,), OBJECT, 0, 0, True, _NO_TIMEOUT)
        with self.around("c10d::broadcast_", called, ((tensor,), OBJECT)):
            return self._in_group(group, "broadcast", "broadcast", "nccl:broadcast", ((tensor,),), ((tensor,),))

    def gathered(self, whole: Tensor, part: Tensor, group: str) -> int:
        """Gathers every rank's part into the whole."""
        called = (whole, part, OBJECT, True, _NO_TIMEOUT)
        with self.around("c10d::_allgather_base_", called, (whole, OBJECT)):
            return self._in_group(group, "_allgather_base", "all_gather", "nccl:_all_gather_base", (part,), (whole,))

    def scattered(self, part: Tensor, whole: Tensor, group: str) -> int:
        """Sums the whole over the group and leaves every rank its part."""
        called = (part, whole, OBJECT, OBJECT, True, _NO_TIMEOUT)
        with self.around("c10d::_reduce_scatter_base_", called, (part, OBJECT)):
            return self._in_group(
                group, "_reduce_scatter_base", "reduce_scatter", "nccl:_reduce_scatter_base", (whole,), (part,)
            )

    def await_in(self, number: int, group: str) -> None:
        """Makes the stream that computes wait for a collective of a group."""
        found = self._groups[group]
        said = ((number, False), (found.name, found.description), self.rank, WAIT, (), (), -1, -1, 1)
        self.op(COMM_NODE, said, comm=Comm(WAIT, WAIT, found.name, self.rank, number, dtype="uint8"))

    def _in_group(
        self, group: str, name: str, kind: str, inner: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...]
    ) -> int:
        self._collectives += 1
        number, found = self._collectives, self._groups[group]
        sent, received = _flat(inputs), _flat(outputs)
        comm = Comm(
            name, kind, found.name, self.rank, number, (), (), sent, received, _bytes(sent), _bytes(received), sent[0].dtype
        )
        said = ((number, False), (found.name, found.description), self.rank, name, (), (), 0, 1, found.size)
        with self.around(COMM_NODE, (*inputs, *said), outputs, comm=comm):
            self.op(inner, (sent[0],))
        return number

    def trace(self) -> ExecutionTrace:
        """What was written, as an execution trace."""
        return replace(super().trace(), groups={group.name: group for group in self._groups.values()})


def compact_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of an elementwise result: its dimensions lie in the order of the argument's, without gaps."""
    assert x.strides is not None
    strides, found, step = x.strides, [0] * len(x.shape), 1
    for place in sorted(range(len(x.shape)), key=lambda at: (strides[at], -at)):
        found[place] = step
        step *= x.shape[place]
    return tuple(found)


def _flat(values: tuple[Value, ...]) -> tuple[Tensor, ...]:
    lists = (value if isinstance(value, tuple) else (value,) for value in values)
    return tuple(tensor for some in lists for tensor in some if isinstance(tensor, Tensor))


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel * dtype_bytes(tensor.dtype) for tensor in tensors)
