"""Collectives under circumstances: alone and waited for, with a late rank, beside compute, on busy hosts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import pairwise

from steptime._calibrate.collectives.calls import call_of
from steptime._calibrate.collectives.cases import CollectiveCase, calls_of
from steptime._calibrate.collectives.timing import LAUNCH_NS, CollectiveBench, Reading
from steptime._calibrate.harness.clock import align
from steptime._units import NS_PER_MS
from steptime_lab.measure.collectives.compute_beside import Lane, busy_host, kernel_of

# About 1,024 launches fit into the queue of a device; the collective's own need room as well.
_MOST_KERNELS = 850


@dataclass
class CircumstancesBench(CollectiveBench):
    """A bench that knows every circumstance, with what it runs beside collectives."""

    _lanes: dict[str, Lane] = field(default_factory=dict)
    _kernels: dict[CollectiveCase, int] = field(default_factory=dict)

    def read(self, case: CollectiveCase) -> Reading:
        """One repeat; every rank calls it with the same case."""
        if case.host_threads == "busy":
            with busy_host():
                return self._read(case)
        return self._read(case)

    def _read(self, case: CollectiveCase) -> Reading:
        if case.mode == "single":
            return self._single(case)
        if case.skew_ns is not None:
            return self._skewed(case, case.skew_ns)
        if case.beside != "none":
            return self._beside(case)
        return super().read(case)

    def _single(self, case: CollectiveCase) -> Reading:
        call = call_of(case, self.group, self.buffers)
        align(self.group)
        begun = time.perf_counter_ns()
        call()
        self.group.synchronize()
        return Reading(float(begun), float(time.perf_counter_ns()))

    def _skewed(self, case: CollectiveCase, skew_ns: float) -> Reading:
        call = call_of(case, self.group, self.buffers)
        align(self.group)
        self.clock.run_ahead(4 * LAUNCH_NS)
        self.meet()
        together = self.clock.mark()
        if self.group.rank == case.late_rank:
            self.clock.pause(skew_ns)
        first = self.clock.mark()
        call()
        last = self.clock.mark()
        self.clock.wait(last)
        return Reading(self.clock.between_ns(together, first), self.clock.between_ns(together, last))

    def _beside(self, case: CollectiveCase) -> Reading:
        lane = self._lane(case.beside)
        call, calls = call_of(case, self.group, self.buffers), calls_of(case, self.group.ranks)
        align(self.group)
        alone = lane.alone_ns()
        kernels = self._kernels_beside(case, calls, alone)
        every = max(1, kernels // 100)
        align(self.group)
        origin = self.clock.mark()
        marks = lane.start(kernels, every)
        first, last = self.back_to_back(case, call, calls)
        self.clock.wait(last)
        lane.wait(marks)
        begun, ended = self.clock.between_ns(origin, first), self.clock.between_ns(origin, last)
        moments = [self.clock.between_ns(origin, mark) for mark in marks]
        if moments[-1] < ended:
            # Part of it had the device for itself; the next repeat gets more company.
            self._kernels[case] = min(_MOST_KERNELS, 2 * kernels)
            return Reading()
        return Reading(0.0, (ended - begun) / calls, mean_inside(moments, begun, ended) / every, alone)

    def _kernels_beside(self, case: CollectiveCase, calls: int, alone_ns: float) -> int:
        """Enough to outlast the collectives, even if each waits for a kernel to end and takes twice as long."""
        if case not in self._kernels:
            lasting = 2 * (calls + 1) * (super().read(case).ended_ns + alone_ns) + NS_PER_MS
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
