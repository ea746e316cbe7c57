"""`world`: a job of many ranks in one process, seen from one of them. Collectives reach nobody and are over at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from steptime._capture.collectives.collectives import Collectives, Pending
from steptime._capture.collectives.log import CommLog, Partitions
from steptime._capture.collectives.streams import Streams
from steptime._program.execution import ProcessGroup
from steptime.errors import InputError

# Methods of a process group that give work to wait for (torch/csrc/distributed/c10d/init.cpp).
_METHODS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "send", "recv", "recv_anysource", "barrier",
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """What one captured rank knows of the others."""

    rank: int
    ranks: int
    log: CommLog
    streams: Streams
    collectives: Collectives
    partitions: Partitions

    def groups(self) -> dict[str, ProcessGroup]:
        """The process groups of this rank, by PyTorch's name."""
        known = distributed_c10d._world.pg_names
        return {str(name): self.partitions.described(str(name), group.group_desc) for group, name in known.items()}


@contextmanager
def world(rank: int, ranks: int) -> Iterator[World]:
    """While it lasts, this process is one rank of a job. Scripts that join a process group themselves find that they have."""
    if dist.is_initialized():
        raise InputError("a process group exists already; capture ranks before torch.distributed.init_process_group is called")
    environment = {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
    }  # fmt: skip
    with patch.dict(os.environ, environment), ExitStack() as stack:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        stack.callback(dist.destroy_process_group)
        log, partitions = CommLog(), Partitions(tuple(range(ranks)))
        streams = Streams(log)
        collectives = Collectives(log, streams)
        for name in _METHODS:
            if hasattr(dist.ProcessGroup, name):
                method = _waitable(getattr(dist.ProcessGroup, name), log, collectives)
                stack.enter_context(patch.object(dist.ProcessGroup, name, method))
        for owner, name, stand_in in (
            (dist, "init_process_group", lambda *_, **__: None),
            (dist, "destroy_process_group", lambda *_, **__: None),
            (distributed_c10d, "_new_group_with_tag", _noted(distributed_c10d._new_group_with_tag, partitions)),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield World(rank, ranks, log, streams, collectives, partitions)


@contextmanager
def streams_of(found: World) -> Iterator[None]:
    """While it lasts, `torch.cuda` has the streams of this rank."""
    with ExitStack() as stack:
        for name, answer in found.streams.answers().items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        yield


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
        own = result.group_name if isinstance(result, dist.ProcessGroup) else None
        partitions.made(ranks, kwargs.get("group_desc") or "", own)
        return result

    return call
