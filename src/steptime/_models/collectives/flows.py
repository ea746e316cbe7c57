"""When each rank is done with an exchange that ranks reach one by one, on sockets with one thread a rank that moves the data.

All flows of a rank, in and out, share its thread evenly, so that small ones are done before large ones. What two ranks exchange
moves once both are there; before that, a sender fills the buffers of the connection. A receiver is done when all flows to it
have arrived, a sender when what is left of its flows fits into buffers. So a rank with little to receive leaves before
others, and one that comes last finds much of the work done: the exchange ends for all at once only where it is even and reached
together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from steptime._models.collectives.message import Floats

Curve = Callable[[Floats], Floats]
"""ns of an even exchange, from the bytes of a rank's whole buffer."""


@dataclass(frozen=True, eq=False)
class Flows:
    """Exchanges: what does not depend on when ranks arrive; [senders, receivers, exchanges] but for `slower`."""

    sent: Floats  # bytes; what a rank keeps for itself does not count
    whole_ns: Floats  # until each flow has moved, where all ranks are there
    slower: Floats  # [exchanges]
    buffered_bytes: float
    even: Curve

    @classmethod
    def of(cls, sent: Floats, buffered_bytes: float, even: Curve, together_ns: Floats | None = None) -> Flows:
        """`together_ns`, [exchanges]: when the last rank is done with an exchange that all reach at once, where more is known.

        Flows alone make uneven exchanges of 2 to 8 ranks 6 to 12 % too long.
        """
        flows = sent * (1.0 - np.eye(len(sent)))[:, :, None]
        slower = np.ones(sent.shape[2])
        if together_ns is not None:
            slower = together_ns / np.maximum(_done_ns(flows, buffered_bytes, even).max(axis=0), 1.0)
        whole = np.maximum(even(_moved_bytes(flows, flows)) * slower, 1.0)
        return cls(flows, whole, slower, buffered_bytes, even)

    def departures_ns(self, arrivals_ns: Floats) -> Floats:
        """[ranks, exchanges] when each rank is done, counted from the last one's arrival."""
        flows = self.sent
        early = arrivals_ns.max(axis=0) - arrivals_ns
        if early.any():
            both = np.minimum(early[:, None], early[None])
            moved = flows * np.minimum(both / self.whole_ns, 1.0)
            moved += np.minimum(self.buffered_bytes, flows) * np.minimum((early[:, None] - both) / self.whole_ns, 1.0)
            flows = np.maximum(flows - moved, 0.0)
        return _done_ns(flows, self.buffered_bytes, self.even) * self.slower


def _done_ns(flows: Floats, buffered_bytes: float, even: Curve) -> Floats:
    """[ranks, exchanges] when all flows to a rank have arrived and those from it fit into buffers."""
    received = _moved_bytes(flows, flows).max(axis=0)
    handed_over = _moved_bytes(flows, np.maximum(flows - buffered_bytes, 0.0)).max(axis=1)
    return even(np.maximum(received, handed_over))


def _moved_bytes(flows: Floats, moved: Floats) -> Floats:
    """The buffer of an even exchange that takes until so much of every flow has moved, [senders, receivers, exchanges]."""
    ranks = len(flows)
    sender, receiver = _served(flows, moved), _served(flows, moved.swapaxes(0, 1)).swapaxes(0, 1)
    # An even exchange of one byte a buffer serves this many at every rank.
    of_one = 2.0 * max(ranks - 1, 1) / ranks
    return np.where(moved > 0, np.maximum(sender, receiver) / of_one, 0.0)


def _served(flows: Floats, moved: Floats) -> Floats:
    """Bytes that a rank has served when so many of one of its flows have moved: of every other as many, or all of it."""
    result, least = np.zeros_like(moved), np.empty_like(moved)
    for other in range(len(flows)):
        result += np.minimum(flows[:, other, None], moved, out=least)
        result += np.minimum(flows[other, :, None], moved, out=least)
    return result
