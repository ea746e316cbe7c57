"""How fast a host is: what stays on the CPU and what launches slow down by different factors.

The same host runs at speeds that lie up to a factor of two apart and changes between them within seconds: plain CPU work then
takes twice as long, a launch a quarter longer (seen in every measured run). So a cost is two numbers, and so is a speed; the
backward pass runs in a thread of its own, on a core of its own, with a speed of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostCost:
    """Nanoseconds at speed 1: what stays on the CPU, and what launching takes."""

    cpu_ns: float = 0.0
    launch_ns: float = 0.0

    def __add__(self, other: HostCost) -> HostCost:
        return HostCost(self.cpu_ns + other.cpu_ns, self.launch_ns + other.launch_ns)

    def times(self, count: float) -> HostCost:
        """So many of it."""
        return HostCost(self.cpu_ns * count, self.launch_ns * count)


@dataclass(frozen=True, slots=True)
class Speed:
    """How many times as long each part takes as in the shipped costs; the higher, the slower."""

    cpu: float = 1.0
    launch: float = 1.0
    backward_cpu: float = 1.0  # CPU work of the autograd engine's thread

    def time_ns(self, cost: HostCost, *, backward: bool = False) -> float:
        """What a cost takes at this speed."""
        return cost.cpu_ns * (self.backward_cpu if backward else self.cpu) + cost.launch_ns * self.launch


SHIPPED = Speed()
