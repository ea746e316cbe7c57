"""When each rank is done with an exchange that ranks reach one by one, on sockets with one thread a rank that moves the data.

All flows of a rank, in and out, share its thread evenly, so that small ones are done before large ones. What two ranks exchange
moves once both are there; before that, a sender fills the buffers of the connection. A receiver is done when all flows to it
have arrived, a sender when what is left of its flows fits into buffers. So a rank with little to receive leaves before
others, and one that comes last finds much of the work done: the exchange ends for all at once only where it is even and reached
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Curve = Callable[[Floats], Floats]
"""ns of an even exchange, from the bytes of a rank's whole buffer."""

# Of 320 exchanges with drawn columns and pauses on four quarters of an H200 (benchmarks/h200/ranks_together.py, 2026-11-15,
# NCCL 2.28.9), ends from the last arrival on, over that of the last rank: 1.0, 1.25, 1.5 and 2 MB give mean errors of 11.9,
# 11.1, 10.9 and 11.0 % a rank, against 46 % for ends at once. As many exchanges of 2 and 8 ranks, which had no say: 13.6 and
# 20.8 %, against 52 and 51.
BUFFERED_BYTES: Mapping[str, float] = {"loopback": 1.5e6}
"""Fabric -> bytes of a flow that lie in buffers, of those that were measured."""


def ends_ns(sent: Floats, arrivals_ns: Floats, buffered_bytes: float, even: Curve) -> Floats:
    """[ranks, exchanges] when each rank is done, counted from the last one's arrival.

    `sent` are bytes from rank to rank, [senders, receivers, exchanges]; what a rank keeps for itself does not count.
    `arrivals_ns`: [ranks, exchanges].
    """
    ranks = len(sent)
    flows = sent * (1.0 - np.eye(ranks))[:, :, None]
    last = arrivals_ns.max(axis=0)
    early = last - arrivals_ns
    if early.any():
        both = np.minimum(early[:, None], early[None])
        whole = np.maximum(even(_moved_bytes(flows, flows)), 1.0)
        moved = flows * np.minimum(both / whole, 1.0)
        moved += np.minimum(buffered_bytes, flows) * np.minimum((early[:, None] - both) / whole, 1.0)
        flows = np.maximum(flows - moved, 0.0)
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
    found = np.zeros_like(moved)
    for other in range(len(flows)):
        found += np.minimum(flows[:, other, None], moved)
        found += np.minimum(flows[other, :, None], moved)
    return found
