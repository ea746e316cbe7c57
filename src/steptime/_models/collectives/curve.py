"""`Curve`: time over bytes of one collective among so many ranks, and how many bytes each kind moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.collectives.message import Floats

# Beyond the largest size, the part of its time that grows with the bytes: all of it at most, and at least this, whatever noise
# makes of the last octave. Of 51 curves (loopback, public A100 and H100 tables) fitted without their last 4 octaves, the time
# at the largest size is then off by 3 % in the middle; a time in proportion to the bytes is 31 % too long.
_LEAST_GROWING = 0.5
# What a file may hold: an exabyte, and a month.
_MOST_LOG2_BYTES, _MOST_LOG_NS = 60.0, 35.0


@dataclass(frozen=True)
class Curve:
    """Time over bytes of one collective, continuous and never falling: latency, transition, bandwidth, and switches.

    The logarithm of the time is piecewise linear over that of the bytes: knots in log2 of bytes, and ln of nanoseconds at them.
    Below the smallest size it is flat; beyond the largest, every further byte costs what it did over the last octave.
    """

    knots: Floats
    log_ns: Floats

    @property
    def moving(self) -> float:
        """Of the time at the largest size, the part that grows with the bytes beyond it."""
        slope = (self.log_ns[-1] - self.log_ns[-2]) / (self.knots[-1] - self.knots[-2]) / np.log(2.0)
        return float(np.clip(slope, _LEAST_GROWING, 1.0))

    @property
    def smallest_bytes(self) -> float:
        """Below, nothing was measured."""
        return float(2.0 ** self.knots[0])

    @property
    def largest_bytes(self) -> float:
        """Beyond, nothing was measured."""
        return float(2.0 ** self.knots[-1])

    def ns(self, size_bytes: npt.ArrayLike) -> Floats:
        """Of messages of so many bytes."""
        places = np.log2(np.maximum(np.asarray(size_bytes, dtype=np.float64), 1.0))
        times = np.exp(np.interp(places, self.knots, self.log_ns))
        if places.size and places.max() > self.knots[-1]:
            times *= 1.0 + self.moving * (np.exp2(np.maximum(places - self.knots[-1], 0.0)) - 1.0)
        result: Floats = times
        return result

    def to_dict(self) -> dict[str, list[float]]:
        """Plain values, to the microsecond's last digit."""
        return {
            "log2_bytes": [round(float(knot), 4) for knot in self.knots],
            "log_ns": [round(float(value), 5) for value in self.log_ns],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Curve:
        """The curve that `to_dict` gave; what cannot be one is said by the caller, who knows where it stands."""
        knots, log_ns = (np.array(values[name], dtype=np.float64) for name in ("log2_bytes", "log_ns"))
        if knots.ndim != 1 or knots.shape != log_ns.shape or len(knots) < 2 or not np.all(np.isfinite(knots + log_ns)):
            raise ValueError("a curve needs as many log2_bytes as log_ns, two or more, all finite")
        if knots.min() < 0 or knots.max() > _MOST_LOG2_BYTES or log_ns.min() < 0 or log_ns.max() > _MOST_LOG_NS:
            raise ValueError(f"a curve's log2_bytes lie in 0 to {_MOST_LOG2_BYTES:g}, its log_ns in 0 to {_MOST_LOG_NS:g}")
        if (np.diff(knots) <= 0).any() or (np.diff(log_ns) < 0).any():
            raise ValueError("a curve's log2_bytes ascend and its log_ns do not fall")
        return cls(knots, log_ns)


def moved_share(kind: str, ranks: int) -> float:
    """Bytes that a rank sends over those of its buffer, as nccl-tests has it for bus bandwidths."""
    if kind in ("all_to_all", "all_gather", "reduce_scatter"):
        return (ranks - 1) / ranks
    return 2 * (ranks - 1) / ranks if kind == "all_reduce" else 1.0
