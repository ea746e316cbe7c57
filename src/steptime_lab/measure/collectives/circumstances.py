"""Collectives under circumstances: alone and waited for, with a late rank, beside compute, on busy hosts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from steptime._calibrate.collectives.cases import CollectiveCase, calls_of
from steptime._calibrate.collectives.timing import LAUNCH_NS, CollectiveBench, Reading, call_of
from steptime._calibrate.harness.clock import Clock, align
from steptime._calibrate.harness.group import Group
from steptime._units import MIB, NS_PER_MS

Kernel = Callable[[], object]


class Lane:
    """A stream of one kernel over and over, with marks between, beside the current one."""

    def __init__(self, group: Group, clock: Clock, kernel: Kernel) -> None:
        self._clock = clock
        self._kernel = kernel
        self._cuda = group.device_name.startswith("cuda")
        self._stream: Any = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def alone_ns(self, count: int = 8) -> float:
        """The mean time of the kernel with nothing beside it on this rank."""
        marks = self.start(count + 1, 1)
        self.wait(marks)
        return self._clock.between_ns(marks[1], marks[-1]) / (len(marks) - 2)

    def start(self, count: int, every: int) -> list[Any]:
        """Begins `count` kernels; the list gets a mark before the first and after each `every`.

        On the CPU a thread is the stream; it goes on until somebody waits for it.
        """
        marks: list[Any] = []
        if self._cuda:
            self._stop.set()
            with torch.cuda.stream(self._stream):
                self._play(count, every, marks)
        else:
            self._stop.clear()
            self._thread = threading.Thread(target=self._play, args=(count, every, marks))
            self._thread.start()
        return marks

    def _play(self, count: int, every: int, marks: list[Any]) -> None:
        marks.append(self._clock.mark())
        while count > 0 or not self._stop.is_set():
            for _ in range(every):
                self._kernel()
            count -= every
            marks.append(self._clock.mark())

    def wait(self, marks: Sequence[Any]) -> None:
        """Until all of them have run."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._clock.wait(marks[-1])


def kernel_of(name: str, group: Group) -> Kernel:
    """gemm: bf16, 2048 x 4096 x 2048, about 0.2 ms on a quarter of an H200. copy: 256 MiB on the device."""
    if group.device_name.startswith("cuda"):
        rows, inner, columns, dtype, copied = 2048, 4096, 2048, torch.bfloat16, 256 * MIB
    else:
        rows, inner, columns, dtype, copied = 192, 192, 192, torch.float32, MIB
    if name == "copy":
        source = torch.empty(copied // 4, device=group.device).normal_()
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    left = torch.randn(rows, inner, device=group.device, dtype=dtype)
    right = torch.randn(inner, columns, device=group.device, dtype=dtype)
    product = torch.empty(rows, columns, device=group.device, dtype=dtype)
    return lambda: torch.mm(left, right, out=product)


@contextmanager
def busy_host() -> Iterator[None]:
    """A thread of this rank computes on the rank's own cores; it holds the interpreter only between products."""
    stop = threading.Event()
    ready = threading.Event()

    def burn() -> None:
        square = torch.randn(256, 256)
        product = torch.empty_like(square)
        while not stop.is_set():
            torch.mm(square, square, out=product)
            ready.set()

    thread = threading.Thread(target=burn)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


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
