"""What runs beside a collective: compute kernels on another stream, a thread that keeps a core busy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from steptime._calibrate.harness.clock import Clock
from steptime._calibrate.harness.group import Group
from steptime._units import MIB

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
