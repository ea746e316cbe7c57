"""`TierModel`: collectives within one tier of links (NVLink of a node, a network, loopback sockets), per kind and rank count.

Rank counts that were not measured lie between or beyond those that were: the part of the time that moves bytes goes by the
bytes a rank moves, the rest by how many steps the collective takes; the interval grows with the distance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.models.collectives.curve import Curve
from steptime.models.collectives.message import Floats, Messages


@dataclass(frozen=True)
class CollectiveTimes:
    """Nanoseconds of each message, the ends of a 90 % interval, and whether it lies within what was measured."""

    ns: Floats
    low_ns: Floats
    high_ns: Floats
    inside: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TierModel:
    """Fitted curves by kind and rank count, and how far they were off on rows they were not fitted to."""

    curves: Mapping[tuple[str, int], Curve]
    idle_power: float  # an uneven exchange takes (pairs / load) ** this of an even one of its load
    residuals: Mapping[str, tuple[float, float]]  # kind -> 5th and 95th percentile of ln(measured / fitted)

    def times(self, messages: Messages) -> CollectiveTimes:
        """How long each takes by itself; a group of one rank takes no time."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> TierModel:
        """What `to_dict` gave; `where` is said in errors."""
        raise NotImplementedError
