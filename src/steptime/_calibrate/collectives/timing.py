"""One repeat of one case on this rank: a call on buffers that all cases share; and what the readings of all ranks come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from steptime._calibrate.collectives.cases import ONE_WAY, CollectiveCase, calls_of, largest_buffer_bytes, rough_ns
from steptime._calibrate.harness.clock import Clock, align, clock_of
from steptime._calibrate.harness.group import Group
from steptime._units import MIB, NS_PER_US, dtype_bytes

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


# A launch through torch.distributed costs the host about half of this; a collective below the limit would wait for it.
LAUNCH_NS = 40 * NS_PER_US
_LAUNCH_BOUND_NS = 200 * NS_PER_US


class Reading(NamedTuple):
    """One repeat as one rank saw it. Its moments count from one that all ranks share, or from its own arrival."""

    begun_ns: float = math.nan
    ended_ns: float = math.nan
    beside_ns: float = math.nan
    alone_ns: float = math.nan


@dataclass
class CollectiveBench:
    """This rank with its buffers and its clock."""

    group: Group
    buffers: Buffers
    clock: Clock = field(init=False)
    _token: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.clock = clock_of(self.group)
        self._token = torch.zeros(1, device=self.group.device)

    def read(self, case: CollectiveCase) -> Reading:
        """One repeat, calls back to back on a stream; every rank calls it with the same case."""
        call = call_of(case, self.group, self.buffers)
        calls = calls_of(case, self.group.ranks)
        if case.collective in ONE_WAY:
            align(self.group)
        if rough_ns(case.collective, self.group.ranks, case.size_bytes) < _LAUNCH_BOUND_NS:
            self.clock.run_ahead((calls + 2) * LAUNCH_NS)
        first, last = self.back_to_back(case, call, calls)
        self.clock.wait(last)
        return Reading(0.0, self.clock.between_ns(first, last) / calls)

    def meet(self) -> None:
        """Device work that ends on no rank before it has begun on all."""
        dist.all_reduce(self._token)

    def back_to_back(self, case: CollectiveCase, call: Call, calls: int) -> tuple[Any, Any]:
        """A first one that everybody waits for, then the timed ones."""
        if case.size_bytes <= MIB:
            call()
        if case.size_bytes > MIB or case.collective in ONE_WAY:
            self.meet()
        first = self.clock.mark()
        for _ in range(calls):
            call()
        return first, self.clock.mark()


def result_of(case: CollectiveCase, readings: np.ndarray, reference_ns: np.ndarray | None = None) -> dict[str, Any] | None:
    """The measured columns of a row from readings of shape (ranks, repeats, 4); none where no repeat succeeded.

    `reference_ns` has one per repeat, NaN where nobody looked.
    """
    succeeded = ~np.isnan(readings[:, :, :2]).any(axis=(0, 2))
    whole = readings[:, succeeded]
    if not whole.shape[1]:
        return None
    begun, ended = whole[:, :, 0], whole[:, :, 1]
    apart = case.mode == "single" or case.skew_ns is not None
    return {
        # From the last rank's arrival to the last rank's end: nobody waits any more.
        "times_ns": (ended.max(axis=0) - begun.max(axis=0)).tolist(),
        "waiting_ns": float(np.median(begun.max(axis=0) - begun.min(axis=0))) if apart else None,
        "beside_ns": _middle(whole[:, :, 2]),
        "beside_alone_ns": _middle(whole[:, :, 3]),
        "reference_ns": None if reference_ns is None or np.isnan(reference_ns).all() else reference_ns[succeeded].tolist(),
    }


def _middle(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else None
