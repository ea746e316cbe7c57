"""Uneven all_to_all: what a matrix of bytes from rank to rank weighs, as the buffer of an even exchange, by several rules.

The rules answer one question, which even exchange takes as long, and a curve over even exchanges does the rest. On loopback
sockets one thread per rank serves both directions, so that a rank's sent and received bytes add.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def _away(sent: Floats) -> Floats:
    """[cases, senders, receivers] without what ranks keep."""
    ranks = sent.shape[1]
    result: Floats = sent * (1.0 - np.eye(ranks))
    return result


def _grown(sent: Floats) -> float:
    """What makes the bytes that leave a rank its whole buffer, in an even exchange."""
    ranks = sent.shape[1]
    return float(ranks / max(ranks - 1, 1))


def load_bytes(sent: Floats) -> Floats:
    """The busiest rank, sent and received together, own chunk left out."""
    away = _away(sent)
    result: Floats = (away.sum(axis=2) + away.sum(axis=1)).max(axis=1) / 2 * _grown(sent)
    return result


def pair_bytes(sent: Floats) -> Floats:
    """Root mean square of what pairs of ranks exchange."""
    ranks = sent.shape[1]
    result: Floats = np.sqrt((_away(sent) ** 2).sum(axis=(1, 2)) / max(ranks * (ranks - 1), 1)) * ranks
    return result


def _sum(sent: Floats) -> Floats:
    """All bytes, shared evenly."""
    result: Floats = sent.sum(axis=(1, 2)) / sent.shape[1]
    return result


def _max_of_max(sent: Floats) -> Floats:
    """As published: the most that a rank sends to or receives from others, fed to a curve over whole buffers."""
    away = _away(sent)
    result: Floats = np.maximum(away.sum(axis=2), away.sum(axis=1)).max(axis=1)
    return result


def _max_of_max_corrected(sent: Floats) -> Floats:
    """The same as a whole buffer."""
    return _max_of_max(sent) * _grown(sent)


def _max_of_sum(sent: Floats) -> Floats:
    """As published: the most that a rank sends and receives, fed to a curve over whole buffers."""
    away = _away(sent)
    result: Floats = (away.sum(axis=2) + away.sum(axis=1)).max(axis=1)
    return result


RULES: dict[str, Callable[[Floats], Floats]] = {
    "sum": _sum,
    "max of max": _max_of_max,
    "max of max, own chunk corrected": _max_of_max_corrected,
    "max of sum": _max_of_sum,
    "busiest rank": load_bytes,
}
"""Bytes of an even exchange by each rule, from matrices [cases, senders, receivers]."""
