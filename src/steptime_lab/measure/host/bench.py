"""How host time is taken: bursts of calls from a drained device, too short to fill the launch queue; and how fast the host was.

A host has speeds between which it changes within seconds: what stays on the CPU takes up to twice as long in the slow one,
a launch a fifth longer. A cost means little without them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from steptime._calibrate.harness.group import Group
    from steptime._calibrate.harness.session import Session

Action = Callable[[], object]

# A launch blocks behind 1,021 that have not started, 825 where arguments are large (docs/decisions/0004); this stays below.
MOST_LAUNCHES = 800
# What one burst may take, the device included: slow kernels get fewer calls, never fewer than this many.
BURST_NS = 20e6
FEWEST_CALLS = 4
# Calls before the first burst: they load what is loaded once, and tell how long a call takes.
FIRST_CALLS = 5


def burst_ns(action: Action, calls: int) -> float:
    """Mean time of one call in an unbroken row of them."""
    row = repeat(None, calls)
    begun = time.perf_counter_ns()
    for _ in row:
        action()
    return (time.perf_counter_ns() - begun) / calls


def net(times_ns: Sequence[float], baseline_ns: float) -> list[float]:
    """Times without what the loop itself costs, never below 0."""
    return [max(0.0, value - baseline_ns) for value in times_ns]


def line(small: int, small_ns: Sequence[float], large: int, large_ns: Sequence[float]) -> tuple[list[float], list[float]]:
    """Slope and intercept of each pair of times at two sizes, taken one after the other."""
    slopes = [(high - low) / (large - small) for low, high in zip(small_ns, large_ns, strict=True)]
    fixed = [low - slope * small for low, slope in zip(small_ns, slopes, strict=True)]
    return slopes, fixed


def less(times_ns: Sequence[float], other_ns: Sequence[float]) -> list[float]:
    """Each time without the median of the others."""
    return [value - float(np.median(other_ns)) for value in times_ns]


def _nothing(*_args: object, **_kwargs: object) -> None:
    """What a call costs before it does anything."""


@dataclass
class HostBench:
    """One rank's bench; `calls_made` are the calls of its last loop."""

    group: Group
    session: Session
    bursts: int = 5
    calls: int = 200
    calls_made: int = 0

    @property
    def cuda(self) -> bool:
        """Whether there is a device whose queue matters."""
        return self.group.device_name.startswith("cuda")

    def synchronize(self) -> None:
        """Waits until the device has nothing left to do."""
        self.group.synchronize()

    def per_call(self, action: Action, most_calls: int = MOST_LAUNCHES) -> list[float]:
        """Host time of a call: one value per burst. The first calls are not counted; slow calls get shorter bursts."""
        calls = min(self.calls, most_calls, self._calls_in_a_burst(action))
        times = []
        for _ in range(self.bursts):
            self.synchronize()
            times.append(burst_ns(action, calls))
        self.synchronize()
        self.calls_made = FIRST_CALLS + calls * self.bursts
        return times

    def _calls_in_a_burst(self, action: Action) -> int:
        for _ in range(2):
            action()
        self.synchronize()
        begun = time.perf_counter_ns()
        for _ in range(FIRST_CALLS - 2):
            action()
        self.synchronize()
        each_ns = (time.perf_counter_ns() - begun) / (FIRST_CALLS - 2)
        return max(FEWEST_CALLS, int(BURST_NS / max(each_ns, 1.0)))

    def per_op(
        self, function: Callable[..., object], *args: Any, most_calls: int = MOST_LAUNCHES, **kwargs: Any
    ) -> list[float]:
        """Host time of one function call with these arguments, less that of calling nothing with them."""
        calls = min(self.calls, most_calls)
        baseline = min(burst_ns(partial(_nothing, *args, **kwargs), calls) for _ in range(3))
        return net(self.per_call(partial(function, *args, **kwargs), most_calls), baseline)

    def at_two_sizes(
        self, make: Callable[[int], Action], small: int, large: int, times: int | None = None
    ) -> tuple[list[float], list[float]]:
        """Slope per unit and intercept of an action that `make` sets up anew for each time, at two sizes in turn."""
        for size in (small, large):
            make(size)()
        low, high = [], []
        for _ in range(times or 2 * self.bursts):
            low.append(self._once(make(small)))
            high.append(self._once(make(large)))
        return line(small, low, large, high)

    def _once(self, action: Action) -> float:
        self.synchronize()
        taken = burst_ns(action, 1)
        self.synchronize()
        return taken


# One list of times per kind of the probe.
Times = Sequence[list[float]]


@dataclass(frozen=True)
class Probe:
    """What is measured, and how. One measurement may answer for several kinds (a slope and its intercept).

    `otherwise` is asked where this one cannot be run; `together`: all ranks have to run it at the same time.
    """

    kinds: tuple[str, ...]
    op: str
    measure: Callable[[HostBench], Times]
    phase: str = "other"
    call: str = ""
    source: str = "sweep"
    otherwise: Probe | None = None
    together: bool = False

    @property
    def name(self) -> str:
        """One line, for messages and for the list of probes that ended a process."""
        return f"{self.kinds[0]} {self.op} {self.call}".rstrip()

    def ways(self) -> list[Probe]:
        """This probe, then what is asked where it cannot be run."""
        return [self, *(self.otherwise.ways() if self.otherwise else ())]


# A view takes about 1 us and a launch 5, so that both bursts together take about a millisecond.
VIEWS_PER_LAUNCH = 3


class HostSpeed(NamedTuple):
    """What one call of each kind took, in ns."""

    cpu_ns: float
    launch_ns: float


def between(before: HostSpeed, after: HostSpeed) -> HostSpeed:
    """The speed meanwhile: half way, which lies at neither where the host changed."""
    return HostSpeed((before.cpu_ns + after.cpu_ns) / 2, (before.launch_ns + after.launch_ns) / 2)


class Reference:
    """A view of a tensor, which stays on the CPU, and the smallest op that launches."""

    def __init__(self, bench: HostBench) -> None:
        self._bench = bench
        square, row = (torch.randn(shape, device=bench.group.device) for shape in ((32, 32), (256,)))
        self._view = partial(square.view, 1024)
        self._launch = partial(torch.neg, row, out=torch.empty_like(row))
        self.read()

    def read(self) -> HostSpeed:
        """Both bursts, from a drained device."""
        self._bench.synchronize()
        cpu_ns = burst_ns(self._view, VIEWS_PER_LAUNCH * self._bench.calls)
        launch_ns = burst_ns(self._launch, self._bench.calls)
        self._bench.synchronize()
        return HostSpeed(cpu_ns, launch_ns)
