"""Calls: a case as a function without arguments, on buffers that all cases share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from steptime._calibrate.collectives.cases import CollectiveCase, largest_buffer_bytes
from steptime._calibrate.harness.group import Group
from steptime._units import dtype_bytes

Call = Callable[[], None]

# Newer torch has these under new names and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Buffers:
    """One send and one receive buffer per dtype, as large as the largest case needs; cases use their beginnings."""

    def __init__(self, group: Group, cases: Iterable[CollectiveCase]) -> None:
        # Whatever the dtype of a case, its collective is tried out in fp32.
        largest = {"float32": 4}
        for case in cases:
            needed = largest_buffer_bytes(case.splits, group.ranks) if case.splits else case.size_bytes
            for dtype in (case.dtype, "float32"):
                largest[dtype] = max(largest.get(dtype, 4), needed)
        self._pairs = {
            dtype: tuple(
                torch.empty(-(-size // dtype_bytes(dtype)), dtype=getattr(torch, dtype), device=group.device) for _ in range(2)
            )
            for dtype, size in largest.items()
        }
        self.refill()

    def refill(self) -> None:
        """Fresh values: sums of sums would be infinite before long."""
        for pair in self._pairs.values():
            for buffer in pair:
                buffer.normal_()

    def of(self, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What to send from and what to receive into."""
        send, receive = self._pairs[dtype]
        return send, receive


def call_of(case: CollectiveCase, group: Group, buffers: Buffers) -> Call:
    """The collective of a case as this rank calls it; the current stream waits for it."""
    if case.collective == "barrier":
        return dist.barrier
    send, receive = buffers.of(case.dtype)
    count = case.size_bytes // dtype_bytes(case.dtype)
    if case.splits is not None:
        return _uneven(case, group, send, receive)
    if case.collective in ("send_recv", "send_recv_ring"):
        return _exchange(case.collective, group, send[:count], receive[:count])
    return _even(case.collective, group.ranks, send[:count], receive[:count])


def _even(collective: str, ranks: int, send: torch.Tensor, receive: torch.Tensor) -> Call:
    part = len(send) // ranks
    calls: dict[str, Call] = {
        "all_reduce": lambda: _done(dist.all_reduce(receive)),
        "all_to_all": lambda: _done(dist.all_to_all_single(receive, send)),
        "all_gather": lambda: _done(_all_gather(receive, mine)),
        "reduce_scatter": lambda: _done(_reduce_scatter(scattered, send)),
        "broadcast": lambda: _done(dist.broadcast(receive, 0)),
        "reduce": lambda: _done(dist.reduce(receive, 0)),
    }
    mine, scattered = send[:part], receive[:part]
    return calls[collective]


def _done(_: object) -> None:
    """Calls that are not asynchronous give nothing back."""


def _uneven(case: CollectiveCase, group: Group, send: torch.Tensor, receive: torch.Tensor) -> Call:
    assert case.splits is not None
    item, ranks = dtype_bytes(case.dtype), group.ranks
    sent = [size // item for size in case.splits[group.rank * ranks : (group.rank + 1) * ranks]]
    received = [size // item for size in case.splits[group.rank :: ranks]]
    source, target = send[: sum(sent)], receive[: sum(received)]
    return lambda: _done(dist.all_to_all_single(target, source, received, sent))


def _exchange(collective: str, group: Group, send: torch.Tensor, receive: torch.Tensor) -> Call:
    if collective == "send_recv_ring":
        to, source = (group.rank + 1) % group.ranks, (group.rank - 1) % group.ranks
    elif group.rank < 2:
        to = source = 1 - group.rank
    else:
        return lambda: None
    pair = [dist.P2POp(dist.isend, send, to), dist.P2POp(dist.irecv, receive, source)]

    def exchange() -> None:
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return exchange
