"""`AnalyticTier`: collectives over links of which only a data sheet is known: latency by steps, and bytes over bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np

from steptime._models.collectives.message import Messages
from steptime._models.collectives.tier import CollectiveTimes, groups, moved_share

# From the fitted curves of A100, H100, H200 and GB200 nodes (no test rows), 1 KiB to 512 MiB: of a link's bandwidth on paper,
# what the largest messages come to; between latency and bandwidth the two add up to more than their sum, by their geometric
# mean; an all_reduce takes a latency per doubling of the ranks, the others less. The curves are then .85 to 1.45 times this for
# nine of ten messages, 1.08 in the middle. Links of other kinds were not tried, and the interval is wider for it.
_REACHED, _TRANSITION = 0.75, 1.0
_STEP = 0.3
_FACTOR = 2.0


@dataclass(frozen=True)
class AnalyticTier:
    """Latency by steps, and every rank's bytes over its own links."""

    bandwidth_bytes_per_s: float
    latency_ns: float

    def times(self, messages: Messages) -> CollectiveTimes:
        """How long each takes by itself; nothing was measured, and the interval says so."""
        ns = np.zeros(len(messages))
        for kind, ranks, places in groups(messages):
            if ranks > 1:
                moved = 0.0 if kind == "barrier" else moved_share(kind, ranks)
                moving_ns = messages.load[places] * (1e9 * moved / (_REACHED * self.bandwidth_bytes_per_s))
                latency_ns = self.latency_ns * _steps(kind, ranks)
                ns[places] = latency_ns + moving_ns + _TRANSITION * np.sqrt(latency_ns * moving_ns)
        return CollectiveTimes(ns, ns / _FACTOR, ns * _FACTOR, messages.ranks <= 1)


def _steps(kind: str, ranks: int) -> float:
    """Latencies of two ranks that a collective of many takes."""
    if kind == "send_recv":
        return 1.0
    return log2(ranks) if kind in ("all_reduce", "barrier") else 1.0 + _STEP * log2(ranks / 2)
