"""Collectives on tensors without data: what c10d and NCCL record around them, and what NCCL's process group copies itself.

Names and nesting are those of torch 2.11 with NCCL 2.28 (execution traces of every call here, on four ranks); see
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from steptime._capture.collectives.log import COMM, CommLog, Launch
from steptime._capture.collectives.ranges import Range
from steptime._capture.collectives.streams import Streams
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Kind:
    """One op of c10d: what is recorded for it, and the places of what it sends and receives among its arguments."""

    name: str  # of the collective, in record_param_comms
    range: str  # of NCCL's range
    sent: int = 0
    received: int = 0
    root: str = ""  # the argument that names the root or the peer
    splits: bool = False  # whether parts of different size are sent to each rank


KINDS = {
    "allreduce_": Kind("allreduce", "nccl:all_reduce"),
    "allreduce_coalesced_": Kind("allreduce_coalesced", "nccl:all_reduce_coalesced"),
    "broadcast_": Kind("broadcast", "nccl:broadcast", root="root_rank"),
    "reduce_": Kind("reduce", "nccl:reduce", root="root_rank"),
    "_allgather_base_": Kind("_allgather_base", "nccl:_all_gather_base", sent=1),
    "allgather_": Kind("all_gather", "nccl:all_gather", sent=1),
    "allgather_into_tensor_coalesced_": Kind(
        "allgather_into_tensor_coalesced", "nccl:all_gather_into_tensor_coalesced", sent=1
    ),
    "_reduce_scatter_base_": Kind("_reduce_scatter_base", "nccl:_reduce_scatter_base", sent=1),
    "reduce_scatter_": Kind("reduce_scatter", "nccl:reduce_scatter", sent=1),
    "reduce_scatter_tensor_coalesced_": Kind("reduce_scatter_tensor_coalesced", "nccl:reduce_scatter_tensor_coalesced", sent=1),
    "alltoall_base_": Kind("all_to_allv", "nccl:all_to_all", sent=1, splits=True),
    "alltoall_": Kind("all_to_all", "nccl:all_to_all", sent=1, splits=True),
    "gather_": Kind("gather", "nccl:gather", sent=1, root="root_rank"),
    "scatter_": Kind("scatter", "nccl:scatter", sent=1, root="root_rank"),
    "send": Kind("send", "nccl:send", root="dst"),
    "recv_": Kind("recv", "nccl:recv", root="src"),
    "barrier": Kind("barrier", "nccl:all_reduce_barrier"),
}


def plain_name(op: str) -> str:
    """`allreduce_` of `c10d::allreduce_`."""
    return op.rsplit("::", 1)[-1].partition(".")[0]


class Collectives:
    """Answers c10d's ops of one captured rank."""

    def __init__(self, log: CommLog, streams: Streams) -> None:
        self._log, self._streams = log, streams
        self._by_storage: dict[int, Launch] = {}
        self.results: list[torch.Tensor] = []  # of the last one
        # Every collective is over at once, so that one piece of work stands for all.
        self._work = dist.broadcast(torch.zeros(1, device="cpu"), 0, async_op=True).boxed()

    def answer(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the op gives, with the ranges and copies that NCCL's process group makes around it."""
        given = _by_name(func, args, kwargs)
        kind = KINDS.get(plain_name(func._schema.name))
        if kind is None:
            raise InputError(f"{func._schema.name} cannot be captured; collectives that can are {', '.join(KINDS)}")
        launch = self._launch(kind, given)
        with Range(COMM):
            _within(kind, list(given.values()))
        self.results = _flat(list(given.values())[kind.received])
        for tensor in self.results:
            self._by_storage[tensor.untyped_storage()._cdata] = launch
        if given.get("asyncOp", given.get("async_op", True)) is False:
            self._streams.launched_in_order(launch)
        return (args[0], self._work) if len(func._schema.returns) > 1 else self._work

    def waited(self, tensor: torch.Tensor) -> None:
        """`wait_tensor` was called on what a collective gave."""
        launch = self._by_storage.pop(tensor.untyped_storage()._cdata, None)
        if launch is not None:
            self.wait(launch)

    def wait(self, launch: Launch) -> None:
        """The current stream waits for a collective."""
        if self._streams.current is self._streams.default:
            self._log.waited(launch)
        self._streams.current.behind[launch.number] = launch

    def _launch(self, kind: Kind, given: dict[str, Any]) -> Launch:
        group = dist.ProcessGroup.unbox(given["process_group"])
        named = int(given[kind.root]) if kind.root else group.rank()
        return self._log.launched(group.group_name, named, point_to_point=kind.name in ("send", "recv"))


class Pending:
    """What `async_op=True` gives: PyTorch's work, and the collective that its `wait` is for."""

    def __init__(self, work: Any, launch: Launch, collectives: Collectives) -> None:
        self._work, self._launch, self._collectives = work, launch, collectives
        self._results = collectives.results

    def wait(self, *_: Any, **__: Any) -> bool:
        """The current stream waits; the host goes on."""
        self._collectives.wait(self._launch)
        return True

    synchronize = block_current_stream = wait

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """What the collective gives, at once."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def is_completed(self) -> bool:
        """Every collective is over at once."""
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _within(kind: Kind, values: Sequence[Any]) -> None:
    """NCCL's range, and the copies that lists of tensors need because NCCL sends one piece of memory."""
    before = _BEFORE.get(kind.name)
    flat = before(values) if before else None
    with Range(kind.range):
        after = _INSIDE.get(kind.name)
        if after:
            after(values, flat)


def _barrier(_: Sequence[Any]) -> None:
    torch.zeros(1, device="cuda:0")


def _one_piece(values: Sequence[Any]) -> torch.Tensor | None:
    parts = values[0][0] if isinstance(values[0][0], list | tuple) else values[1][0]
    for part in parts:
        torch.is_same_size(parts[0], part)
    return torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype, device="cuda:0")


def _copy_out(values: Sequence[Any], flat: Any) -> None:
    for index, part in enumerate(values[0][0]):
        part.copy_(flat[index], non_blocking=True)


def _copy_in(values: Sequence[Any], flat: Any) -> None:
    for index, part in enumerate(values[1][0]):
        flat[index].copy_(part, non_blocking=True)


_BEFORE: dict[str, Callable[[Sequence[Any]], Any]] = {
    "all_gather": _one_piece,
    "reduce_scatter": _one_piece,
    "barrier": _barrier,
}
_INSIDE: dict[str, Callable[[Sequence[Any], Any], None]] = {"all_gather": _copy_out, "reduce_scatter": _copy_in}


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in _flat(each)] if isinstance(value, list | tuple) else []
