"""Rings and trees as NCCL's tuner has them: a protocol takes its steps and reaches its part of the bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2

import numpy as np

from steptime._hardware.nccl import Protocol, read_nccl
from steptime._models.collectives.message import Floats

TURNS = {"all_reduce": 2, "barrier": 2}
"""How often a collective goes round its ring; others do once."""


def ring_steps(kind: str, ranks: int) -> int:
    """From rank to rank until everybody has everything."""
    return TURNS.get(kind, 1) * (ranks - 1)


def passed_ns(steps: Mapping[str, float], moving_ns: Floats) -> Floats:
    """Through rings with so many steps over links of each kind; `moving_ns` are the bytes over the full bandwidth."""
    return _best(read_nccl().rings, steps, moving_ns)


def best_ns(kind: str, link: str, ranks: int, moving_ns: Floats) -> Floats:
    """Through a ring of ranks on links of one kind, or through trees where those are faster."""
    # The first step is in what the smallest message of two ranks takes.
    ring = passed_ns({link: ring_steps(kind, ranks) - 1}, moving_ns)
    if kind in ("all_gather", "reduce_scatter"):
        return ring
    tree = _best(read_nccl().trees, {link: TURNS.get(kind, 1) * log2(ranks)}, moving_ns)
    result: Floats = np.minimum(ring, tree)
    return result


def _best(protocols: Sequence[Protocol], steps: Mapping[str, float], moving_ns: Floats) -> Floats:
    each = [
        sum(count * protocol.step_ns(link) for link, count in steps.items()) + moving_ns / protocol.reached
        for protocol in protocols
    ]
    result: Floats = np.min(each, axis=0)
    return result
