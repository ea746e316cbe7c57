"""What a process does once and takes seconds for, before the first pass begins."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
import torch.distributed as dist

from steptime._calibrate.host.bench import Bench
from steptime._calibrate.host.data_parallel import join
from steptime._calibrate.host.probe import Probe


def load(bench: Bench, probes: Iterable[Probe]) -> None:
    """The first optimiser of a process imports the compiler; the first collective loads its library and connects."""
    wanted = list(probes)
    if any(probe.kinds[0] in ("optimizer_step", "zero_grad", "ddp_forward") for probe in wanted):
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    if any(probe.together for probe in wanted):
        # Where there is no such library, the probes that need it will say so.
        with suppress(RuntimeError):
            join(bench)
            dist.all_reduce(torch.zeros(1, device=bench.group.device))
    bench.synchronize()
