"""The state of the machine beside a repeat, in a number each: how fast the host is right now, and the wire between the ranks.

Hosts have two speeds, up to a factor of two apart, and change between them within seconds, rank by rank.
"""

from __future__ import annotations

import time

from steptime._calibrate.harness.group import Group
from steptime._units import MIB

# About a millisecond of calls that go through Python and the dispatcher and launch nothing.
_VIEWS = 1000
# The sentinel of the collectives: four of them take 2-4 ms on loopback.
_WIRE_BYTES = MIB
_WIRE_CALLS = 3


def host_ns(group: Group) -> float:
    """Nanoseconds of a fixed loop of `view` on the CPU, of the slowest rank; every rank calls it."""
    import torch

    vector = torch.zeros(8)
    begun = time.perf_counter_ns()
    for _ in range(_VIEWS):
        vector.view(2, 4)
    return max(group.gather(time.perf_counter_ns() - begun))


def wire_ns(group: Group) -> float | None:
    """Nanoseconds of an all_reduce of 1 MiB, mean of a few behind one another, of the slowest rank; None for one rank."""
    if group.ranks == 1:
        return None
    import torch
    import torch.distributed as dist

    # Made anew each time: a buffer that stays would count in the memory of every case.
    data = torch.randn(_WIRE_BYTES // 4, device=group.device)
    dist.all_reduce(data)
    group.barrier()
    begun = time.perf_counter_ns()
    for _ in range(_WIRE_CALLS):
        dist.all_reduce(data)
    group.synchronize()
    return max(group.gather((time.perf_counter_ns() - begun) / _WIRE_CALLS))
