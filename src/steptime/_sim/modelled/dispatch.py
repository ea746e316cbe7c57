"""What lies between launches and kernels on a device: how soon work starts after its launch, its neighbour or a wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Nanoseconds; the same for all works."""

    latency_ns: int  # from the end of a launch to the start of its work on an idle stream
    spacing_ns: int  # from the end of a work to the start of the next one of its stream that was launched long before
    release_ns: int  # from the end of work that a stream was told to await to the start of what waits
    return_ns: int  # from the end of what a synchronisation waits for to its return


# Seen in the profiled steps of an H200 that ship (`step_kernels`): means of the gaps between kernels of one stream of which the
# second was launched 20 us before the first ended, 1.2 to 1.7 us on the whole GPU (Transformers, convnets), 2.6 to 3.1 on
# halves, 4.4 to 5.2 on quarters, 8.6 on eighths: ranks share the front end that hands out blocks. From the beginning of a
# launch to its kernel on an idle stream 10 us go by, half of them within the launch.
_SPACING_NS: Mapping[int, int] = {1: 1_400, 2: 2_900, 4: 5_000, 8: 8_600}
_LATENCY_NS, _RELEASE_NS, _RETURN_NS = 5_000, 1_500, 5_000


def dispatch_of(share: int) -> Dispatch:
    """Of a device of which each rank has one of so many parts."""
    nearest = min(_SPACING_NS, key=lambda parts: abs(parts - share))
    return Dispatch(_LATENCY_NS, _SPACING_NS[nearest], _RELEASE_NS, _RETURN_NS)
