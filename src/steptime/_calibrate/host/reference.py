"""`Reference`: two fixed bursts between probes that tell how fast the host was just then.

A host has speeds between which it changes within seconds: what stays on the CPU takes up to twice as long in the slow one,
a launch a fifth longer. A cost means little without them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from steptime._calibrate.host.bench import HostBench, burst_ns

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
