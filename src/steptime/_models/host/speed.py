"""How fast a host is: what stays on the CPU and what launches slow down by different factors.

The same host runs at two speeds and changes between them within seconds: in the slow state plain CPU work takes twice as long
and a launch a quarter longer (seen in every measured run). So a cost is two numbers, and so is a speed.
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


# How much a launch slows down when CPU work takes twice as long (seen in the measured rows: 4.5 us become 5.7).
LAUNCH_PER_CPU = 0.27


@dataclass(frozen=True, slots=True)
class Speed:
    """How many times as long each part takes as in bursts of one call on a fast host; the higher, the slower."""

    cpu: float = 1.0
    launch: float = 1.0

    @classmethod
    def of_cpu(cls, cpu: float) -> Speed:
        """The speed at which CPU work takes so many times as long; launches were never seen to slow down by themselves."""
        return cls(cpu, 1.0 + LAUNCH_PER_CPU * (cpu - 1.0))

    def time_ns(self, cost: HostCost) -> float:
        """What a cost takes at this speed."""
        return cost.cpu_ns * self.cpu + cost.launch_ns * self.launch


# A training step runs in the slow state: its main and backward threads take turns and wake from sleep every time. Ops in the
# shipped traces take 2.0 to 2.4 times as long as in bursts, a fixed loop beside steps 2.3 times in nine repeats of ten.
STEP = Speed.of_cpu(2.2)
