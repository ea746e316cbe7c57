"""Marks in the order of device work and the time between them; moments at which every rank begins."""

from __future__ import annotations

import time
from typing import Any

import torch

from steptime._calibrate.harness.group import Group
from steptime._units import NS_PER_MS, NS_PER_US

# By then every rank has heard from all others and is back in Python.
_LEAD_NS = 200 * NS_PER_US


class DeviceClock:
    """CUDA events and a spinning kernel."""

    def __init__(self) -> None:
        self._cycles_per_ns = 1.0
        for _ in range(3):
            # The clock rises with load: the last of the three counts.
            first = self.mark()
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            last = self.mark()
            self.wait(last)
            self._cycles_per_ns = 2_000_000 / self.between_ns(first, last)

    def mark(self) -> Any:
        """A moment on the current stream."""
        # Blocking: a host that waits sleeps and leaves its core to the threads that move the data.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between_ns(self, first: Any, second: Any) -> float:
        """From one mark to another; both have passed."""
        return float(first.elapsed_time(second)) * NS_PER_MS

    def wait(self, mark: Any) -> None:
        """Until a mark has passed."""
        mark.synchronize()

    def pause(self, duration_ns: float) -> None:
        """The current stream does nothing for so long."""
        torch.cuda._sleep(int(duration_ns * self._cycles_per_ns))  # type: ignore[no-untyped-call]

    def run_ahead(self, duration_ns: float) -> None:
        """Holds the device back for so long, so that the host has queued its work before it begins."""
        self.pause(duration_ns)


class HostClock:
    """The CPU as a device: work is done when the call returns."""

    def mark(self) -> Any:
        """A moment on the current stream."""
        return time.perf_counter_ns()

    def between_ns(self, first: Any, second: Any) -> float:
        """From one mark to another; both have passed."""
        return float(second - first)

    def wait(self, mark: Any) -> None:
        """Until a mark has passed."""

    def pause(self, duration_ns: float) -> None:
        """The current stream does nothing for so long."""
        time.sleep(duration_ns / 1e9)

    def run_ahead(self, duration_ns: float) -> None:
        """Holds the device back for so long, so that the host has queued its work before it begins."""


Clock = DeviceClock | HostClock


def clock_of(group: Group) -> Clock:
    """The clock of this rank's device."""
    return DeviceClock() if group.device_name.startswith("cuda") else HostClock()


def align(group: Group) -> None:
    """Returns on every rank at the same moment: processes of one machine share the monotonic clock."""
    begin = max(group.gather(float(time.perf_counter_ns()))) + _LEAD_NS
    while time.perf_counter_ns() < begin:
        pass
