"""`AnalyticTier`: collectives over links of which only a data sheet is known: latency by steps, and bytes over bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np

from steptime.models.collectives.message import Messages
from steptime.models.collectives.tier import CollectiveTimes, groups, moved_share

# Of a link's bandwidth on paper, what large messages reach; and by what factor estimates lie off either way.
_REACHED = 0.8
_FACTOR = 2.0


@dataclass(frozen=True)
class AnalyticTier:
    """A latency per doubling of the ranks, and every rank's bytes over its own links."""

    bandwidth_bytes_per_s: float
    latency_ns: float

    def times(self, messages: Messages) -> CollectiveTimes:
        """How long each takes by itself; nothing was measured, and the interval says so."""
        ns = np.zeros(len(messages))
        for kind, ranks, places in groups(messages):
            if ranks > 1:
                moved = 0.0 if kind == "barrier" else moved_share(kind, ranks)
                steps = 1.0 if kind == "send_recv" else log2(ranks)
                byte_ns = 1e9 * moved / (_REACHED * self.bandwidth_bytes_per_s)
                ns[places] = self.latency_ns * steps + messages.load[places] * byte_ns
        return CollectiveTimes(ns, ns / _FACTOR, ns * _FACTOR, messages.ranks <= 1)
