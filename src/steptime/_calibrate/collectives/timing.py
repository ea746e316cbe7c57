"""One repeat of one case on this rank, and what the readings of all ranks come to."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from steptime._calibrate.collectives.calls import Buffers, Call, call_of
from steptime._calibrate.collectives.cases import ONE_WAY, Case, calls_of, rough_ns
from steptime._calibrate.collectives.clock import Clock, align, clock_of
from steptime._calibrate.collectives.company import Lane, busy_host, kernel_of
from steptime._calibrate.harness.group import Group
from steptime._units import MIB, NS_PER_MS, NS_PER_US

# A launch through torch.distributed costs the host about half of this; a collective below the limit would wait for it.
_LAUNCH_NS = 40 * NS_PER_US
_LAUNCH_BOUND_NS = 200 * NS_PER_US
# About 1,024 launches fit into the queue of a device; the collective's own need room as well.
_MOST_KERNELS = 850


class Reading(NamedTuple):
    """One repeat as one rank saw it. Its moments count from one that all ranks share, or from its own arrival."""

    begun_ns: float = math.nan
    ended_ns: float = math.nan
    beside_ns: float = math.nan
    alone_ns: float = math.nan


@dataclass
class Bench:
    """This rank with its buffers, its clock and its company."""

    group: Group
    buffers: Buffers
    clock: Clock = field(init=False)
    _token: torch.Tensor = field(init=False)
    _lanes: dict[str, Lane] = field(default_factory=dict)
    _kernels: dict[Case, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = clock_of(self.group)
        self._token = torch.zeros(1, device=self.group.device)

    def read(self, case: Case) -> Reading:
        """One repeat; every rank calls it with the same case."""
        if case.host_threads == "busy":
            with busy_host():
                return self._read(case)
        return self._read(case)

    def meet(self) -> None:
        """Device work that ends on no rank before it has begun on all."""
        dist.all_reduce(self._token)

    def _read(self, case: Case) -> Reading:
        if case.mode == "single":
            return self._single(case)
        if case.skew_ns is not None:
            return self._skewed(case, case.skew_ns)
        if case.beside != "none":
            return self._beside(case)
        return self._stream(case)

    def _stream(self, case: Case) -> Reading:
        call = call_of(case, self.group, self.buffers)
        calls = calls_of(case, self.group.ranks)
        if case.collective in ONE_WAY:
            align(self.group)
        if rough_ns(case.collective, self.group.ranks, case.size_bytes) < _LAUNCH_BOUND_NS:
            self.clock.run_ahead((calls + 2) * _LAUNCH_NS)
        first, last = self._back_to_back(case, call, calls)
        self.clock.wait(last)
        return Reading(0.0, self.clock.between_ns(first, last) / calls)

    def _back_to_back(self, case: Case, call: Call, calls: int) -> tuple[Any, Any]:
        """A first one that everybody waits for, then the timed ones."""
        if case.size_bytes <= MIB:
            call()
        if case.size_bytes > MIB or case.collective in ONE_WAY:
            self.meet()
        first = self.clock.mark()
        for _ in range(calls):
            call()
        return first, self.clock.mark()

    def _single(self, case: Case) -> Reading:
        call = call_of(case, self.group, self.buffers)
        align(self.group)
        begun = time.perf_counter_ns()
        call()
        self.group.synchronize()
        return Reading(float(begun), float(time.perf_counter_ns()))

    def _skewed(self, case: Case, skew_ns: float) -> Reading:
        call = call_of(case, self.group, self.buffers)
        align(self.group)
        self.clock.run_ahead(4 * _LAUNCH_NS)
        self.meet()
        together = self.clock.mark()
        if self.group.rank == case.late_rank:
            self.clock.pause(skew_ns)
        first = self.clock.mark()
        call()
        last = self.clock.mark()
        self.clock.wait(last)
        return Reading(self.clock.between_ns(together, first), self.clock.between_ns(together, last))

    def _beside(self, case: Case) -> Reading:
        lane = self._lane(case.beside)
        call, calls = call_of(case, self.group, self.buffers), calls_of(case, self.group.ranks)
        align(self.group)
        alone = lane.alone_ns()
        kernels = self._kernels_beside(case, calls, alone)
        every = max(1, kernels // 100)
        align(self.group)
        origin = self.clock.mark()
        marks = lane.start(kernels, every)
        first, last = self._back_to_back(case, call, calls)
        self.clock.wait(last)
        lane.wait(marks)
        begun, ended = self.clock.between_ns(origin, first), self.clock.between_ns(origin, last)
        moments = [self.clock.between_ns(origin, mark) for mark in marks]
        if moments[-1] < ended:
            # Part of it had the device for itself; the next repeat gets more company.
            self._kernels[case] = min(_MOST_KERNELS, 2 * kernels)
            return Reading()
        return Reading(0.0, (ended - begun) / calls, mean_inside(moments, begun, ended) / every, alone)

    def _kernels_beside(self, case: Case, calls: int, alone_ns: float) -> int:
        """Enough to outlast the collectives, even if each waits for a kernel to end and takes twice as long."""
        if case not in self._kernels:
            lasting = 2 * (calls + 1) * (self._stream(case).ended_ns + alone_ns) + NS_PER_MS
            self._kernels[case] = min(_MOST_KERNELS, max(8, math.ceil(lasting / alone_ns)))
        return self._kernels[case]

    def _lane(self, name: str) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = Lane(self.group, self.clock, kernel_of(name, self.group))
            self._lanes[name].alone_ns()
        return self._lanes[name]


def mean_inside(moments: list[float], begun: float, ended: float) -> float:
    """The mean distance of neighbouring moments that both lie in the interval; NaN where there are none."""
    inside = [after - before for before, after in pairwise(moments) if before >= begun and after <= ended]
    return sum(inside) / len(inside) if inside else math.nan


def result_of(case: Case, readings: np.ndarray, reference_ns: np.ndarray | None = None) -> dict[str, Any] | None:
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
