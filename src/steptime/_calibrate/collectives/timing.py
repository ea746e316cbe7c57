"""One repeat of one case on this rank, and what the readings of all ranks come to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from steptime._calibrate.collectives.calls import Buffers, Call, call_of
from steptime._calibrate.collectives.cases import ONE_WAY, CollectiveCase, calls_of, rough_ns
from steptime._calibrate.harness.clock import Clock, align, clock_of
from steptime._calibrate.harness.group import Group
from steptime._units import MIB, NS_PER_US

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
