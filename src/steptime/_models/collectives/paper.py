"""`AnalyticTier`: collectives over links of which only a data sheet is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._hardware.fabric import NETWORK
from steptime._hardware.nccl import read_nccl
from steptime._models.collectives.curve import moved_share
from steptime._models.collectives.message import KINDS, Floats, Messages
from steptime._models.collectives.steps import best_ns, ring_steps
from steptime._models.collectives.tier import CollectiveTimes, groups

# Within nodes, from the fitted curves of A100, H100, H200, B200 and GB200 (1 KiB to 512 MiB): of a link's bandwidth on paper,
# what the largest messages come to; between latency and bandwidth the two add up to more than their sum, by their geometric
# mean; a further step of a ring takes .11 (A100), .15 (B200) and .16 (H100) of what the smallest message of two ranks does. The
# curves are then .89 to 1.5 times this for nine of ten messages, 1.08 in the middle.
_REACHED, _TRANSITION = 0.75, 1.0
_STEP = 0.14
FACTOR = 2.0
"""Nobody measured these links, so that times may be this much longer or shorter."""


@dataclass(frozen=True)
class AnalyticTier:
    """Latency by steps, and every rank's bytes over its own links, or through its card."""

    bandwidth_bytes_per_s: float
    latency_ns: float
    link: str = "nvswitch"
    factor: float = FACTOR  # of either end of the interval

    def times(self, messages: Messages) -> CollectiveTimes:
        """How long each takes by itself; nothing was measured, and the interval says so."""
        ns = np.zeros(len(messages))
        for kind, ranks, places in groups(messages):
            if ranks > 1:
                moved = 0.0 if kind == "barrier" else moved_share(kind, ranks)
                moving_ns = messages.load[places] * (1e9 * moved / self.bandwidth_bytes_per_s)
                ns[places] = (self._across if self.link == NETWORK else self._inside)(kind, ranks, moving_ns)
        return CollectiveTimes(ns, ns / self.factor, ns * self.factor, messages.ranks <= 1)

    def knows(self, kind: str) -> bool:
        """A data sheet answers for all kinds."""
        return kind in KINDS

    def _inside(self, kind: str, ranks: int, moving_ns: Floats) -> Floats:
        peers_ns = read_nccl().node_peer_ns * (ranks - 2) if kind == "all_to_all" else 0.0
        steps = 1 if kind in ("send_recv", "all_to_all") else ring_steps(kind, ranks)
        latency_ns = self.latency_ns * (1.0 + _STEP * (steps - 1)) + peers_ns
        moving_ns = moving_ns / _REACHED
        result: Floats = latency_ns + moving_ns + _TRANSITION * np.sqrt(latency_ns * moving_ns)
        return result

    def _across(self, kind: str, ranks: int, moving_ns: Floats) -> Floats:
        """A rank on each node; bytes are many enough in flight that latency and moving add up."""
        use = read_nccl().network
        if kind == "all_to_all":
            return self.latency_ns + use.peer_ns * (ranks - 2) + moving_ns / use.exchange_fraction
        if kind == "send_recv":
            slowest = max(1.0 / use.exchange_fraction, self.bandwidth_bytes_per_s / use.pair_bytes_per_s(ranks))
            return self.latency_ns + moving_ns * slowest
        return self.latency_ns + best_ns(kind, self.link, ranks, moving_ns / use.ring_fraction)
