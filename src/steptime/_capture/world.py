"""A job of many ranks in one process, seen from one of them. Collectives reach nobody and are over at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from steptime._capture.collectives import Collectives, Pending, exchanged
from steptime._capture.log import CommLog, Streams
from steptime._capture.record import Recorder
from steptime._capture.sharded import IN_PYTHON, SENDS_TABLE
from steptime._capture.tensors import is_dense, is_wrapper, tensors_of
from steptime._capture.traits import OpTraits, traits_of
from steptime._program.execution import ProcessGroup
from steptime.errors import InputError

# Methods of a process group that give work to wait for (torch/csrc/distributed/c10d/init.cpp).
_METHODS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "send", "recv", "recv_anysource", "barrier",
)  # fmt: skip
_WAIT: Any = torch.ops._c10d_functional.wait_tensor.default
_ASIDE = ("prim", "profiler")  # no work of a step


@dataclass
class Partitions:
    """Process groups that were made side by side: the ranks of the job divided into groups that do the same.

    A rank knows its own group of each kind; `torch.distributed.new_group` is called for the others too, in one order.
    """

    world: tuple[int, ...]
    _blocks: list[tuple[str, list[tuple[int, ...]]]] = field(default_factory=list)
    _named: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # group -> block, members

    def made(self, ranks: Sequence[int] | None, description: str, name: str | None) -> None:
        """`new_group` was called; `own` is the group's name where this rank is in it."""
        members = tuple(sorted(ranks)) if ranks else self.world
        last = next((at for at in reversed(range(len(self._blocks))) if self._blocks[at][0] == description), -1)
        fits = last >= 0 and all(len(each) == len(members) and not set(each) & set(members) for each in self._blocks[last][1])
        if not fits:
            last = len(self._blocks)
            self._blocks.append((description, []))
        self._blocks[last][1].append(members)
        if name is not None:
            self._named[name] = (last, members)

    def common_name(self, group: str) -> str:
        """What all groups of a partition are called, the same on every rank."""
        if group not in self._named:
            return group
        block = self._named[group][0]
        description = self._blocks[block][0]
        alike = [at for at, (other, _) in enumerate(self._blocks) if other == description]
        plain = description if description not in ("", "undefined") else "group"
        return plain if len(alike) == 1 else f"{plain}_{alike.index(block)}"

    def described(self, group: str, description: str) -> ProcessGroup:
        """The group as a trace has it, under its common name."""
        members = self._named[group][1] if group in self._named else self.world
        return ProcessGroup(self.common_name(group), description, members, len(members))

    def sides(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """By common name, the sets of ranks that meet under it; those of everybody left out."""
        result = {self.common_name(group): tuple(sorted(self._blocks[block][1])) for group, (block, _) in self._named.items()}
        return {name: sides for name, sides in result.items() if sides != (self.world,)}


@dataclass(frozen=True)
class World:
    """What one captured rank knows of the others."""

    rank: int
    ranks: int
    log: CommLog
    collectives: Collectives
    partitions: Partitions

    def groups(self) -> dict[str, ProcessGroup]:
        """The process groups of this rank, by PyTorch's name."""
        known = distributed_c10d._world.pg_names
        return {str(name): self.partitions.described(str(name), group.group_desc) for group, name in known.items()}

    def join(self) -> None:
        """Joins the process group of the whole job."""
        if not dist.is_initialized():
            _init("fake", store=FakeStore(), rank=self.rank, world_size=self.ranks)
            self.collectives.joined()


_init = dist.init_process_group


@contextmanager
def world(rank: int, ranks: int, streams: Streams, *, joined: bool = True) -> Iterator[World]:
    """While it lasts, this process is one rank of a job, as a launcher starts it.

    A function finds that it has `joined` the process group; a script does so itself.
    """
    if dist.is_initialized():
        raise InputError("a process group exists already; capture ranks before torch.distributed.init_process_group is called")
    distributed_c10d._world.group_count = 0  # one that could not be joined has counted; names are the same on every rank
    environment = {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    }  # fmt: skip
    with patch.dict(os.environ, environment), ExitStack() as stack:
        log, partitions = streams.log, Partitions(tuple(range(ranks)))
        collectives = Collectives(log, streams)
        around = World(rank, ranks, log, collectives, partitions)
        if joined:
            around.join()
        destroy = dist.destroy_process_group
        stack.callback(lambda: destroy() if dist.is_initialized() else None)
        for name in _METHODS:
            if hasattr(dist.ProcessGroup, name):
                method = _waitable(getattr(dist.ProcessGroup, name), log, collectives)
                stack.enter_context(patch.object(dist.ProcessGroup, name, method))
        for owner, name, stand_in in (
            *((owner, "init_process_group", lambda *_, **__: around.join()) for owner in (dist, distributed_c10d, device_mesh)),
            (dist, "destroy_process_group", lambda *_, **__: None),
            (distributed_c10d, "_new_group_with_tag", _noted(distributed_c10d._new_group_with_tag, partitions)),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield around


def _waitable(method: Callable[..., Any], log: CommLog, collectives: Collectives) -> Callable[..., Any]:
    """Of a collective called in order NCCL gives nothing to wait for; of another, what knows which one it is."""

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        before = log.last
        work = method(group, *args, **kwargs)
        if log.last is before or log.last is None:
            return work
        in_order = any(getattr(each, "asyncOp", True) is False for each in (*args, *kwargs.values()))
        return None if in_order else Pending(work, log.last, collectives)

    return call


def _noted(new_group: Callable[..., Any], partitions: Partitions) -> Callable[..., Any]:
    def call(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Backends of a real job (nccl, gloo), their options and their devices have no peers here.
        timeout, kwargs = args[:1], {**kwargs, "backend": None, "device_id": None}
        result = new_group(ranks, *timeout, **kwargs)
        name = result.group_name if isinstance(result, dist.ProcessGroup) else None
        partitions.made(ranks, kwargs.get("group_desc") or "", name)
        return result

    return call


Called = tuple[str, tuple[Any, ...], tuple[Any, ...]]
"""An op with the shapes and dtypes of its tensors, and of a collective how much goes to each rank."""


def called(op: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called:
    """A call as far as it tells one rank from another. Views are not listed: what is done with them is.

    Numbers among arguments do not: a rank of a tensor-parallel group looks for other rows of a table than the next one, in
    the same time. Nor do groups and roots; who sends to another rank than the next one does is told from it.
    """
    with torch._C.DisableTorchFunction():
        shapes = tuple([(tensor.shape, tensor.dtype) for tensor in tensors_of(args, kwargs)])
    splits = tuple(tuple(each) for each in args if _is_integers(each)) if op.namespace == "c10d" else ()
    if op.name in _TO_ONE:
        splits = (*splits, tuple(each for each in args if isinstance(each, int)))
    return op.name, shapes, splits


_TO_ONE = ("c10d::send", "c10d::recv_")


def _is_integers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, int) for each in value)


class GroupRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Answers what one rank of a job calls."""

    def __init__(self, collectives: Collectives, log: CommLog) -> None:
        super().__init__()
        self._collectives, self._log = collectives, log
        self._listing = False
        self.calls: list[Called] = []  # by which ranks are compared
        self._known: dict[Called, Called] = {}  # equal ones are one

    def begin(self) -> None:
        """Notes from here on, collectives too."""
        super().begin()
        self._log.begin()

    def end(self) -> None:
        """Notes no longer."""
        super().end()
        self._log.recording = False

    def kept(self) -> tuple[CommLog, Sequence[Called]]:
        """The collectives of what was noted, and the calls that were listed."""
        log = self._log
        return replace(log, calls=list(log.calls), waits=list(log.waits)), tuple(self.calls)

    def list_calls(self) -> None:
        """Lists calls from here on."""
        self._listing = True
        self.calls.clear()

    def end_calls(self) -> None:
        """Lists no more."""
        self._listing = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Any op below autograd."""
        op = traits_of(func)
        if not types and not self._noting and op.views and is_dense(args[0]):
            return self._viewed(func, args, kwargs or {})
        kwargs = kwargs or {}
        if op.namespace in _ASIDE or (types and any(issubclass(kind, FakeTensor) for kind in types)):
            # With tensors that are PyTorch's own fakes, DTensor finds out how results are sharded: once, in the first step.
            return func(*args, **kwargs)
        if self._listing and not op.views:
            call = called(op, args, kwargs)
            self.calls.append(self._known.setdefault(call, call))
        if types and any(map(is_wrapper, types)):
            return super().__torch_dispatch__(func, types, args, kwargs)
        name = op.name
        if op.namespace == "c10d":
            self.digest(func, tensors_of(args, kwargs))
            result = self._called(self._collectives.answer, func, args, kwargs)
            for sent, received, made in exchanged(func, args, kwargs):
                self.known.arrive(sent, received, made)
            return result
        if func is _WAIT:
            self._collectives.waited(args[0])
            return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if name in IN_PYTHON:
            return self._called(IN_PYTHON[name], *args, **kwargs)
        if "out" in kwargs and name in SENDS_TABLE:
            self._called(SENDS_TABLE[name], *args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)
