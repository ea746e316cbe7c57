"""`Curve`: time over bytes of one collective, continuous and never falling: latency, transition, bandwidth, and switches.

The logarithm of the time is piecewise linear over that of the bytes, a knot or two per octave, with slopes that are not
negative and change as little as the rows allow. Below the smallest size it is flat; beyond the largest, every further byte
costs what it did over the last octave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError

Floats = npt.NDArray[np.float64]

# How much a change of slope costs against a row that is off, with a knot per octave: .01 to .3 do as well on loopback rows left
# out in turn (5.2 to 5.4 % over 21 curves). Where there are two rows per octave or more, two knots for them, at a lower cost,
# follow the switches of all_reduce more closely: 3.3, 4.3 and 3.3 % instead of 4.0, 4.8 and 4.3 for 2, 4 and 8 ranks.
_PENALTY, _DENSE_PENALTY = 0.1, 0.03
_DENSE = 2.0
_ROUNDS = 4
# A row off by so many times the usual distance counts less, and one off by less than a percent does not count as off.
_USUAL, _CLOSE = 1.5, 0.01
_LEAST_KNOTS = 3
# Beyond the largest size, the part of its time that grows with the bytes: all of it at most, and at least this, whatever noise
# makes of the last octave. Of 51 curves (loopback, public A100 and H100 tables) fitted without their last 4 octaves, the time
# at the largest size is then off by 3 % in the middle; a time in proportion to the bytes is 31 % too long.
_LEAST_MOVING = 0.5
# What a file may hold: an exabyte, and a month.
_MOST_LOG2_BYTES, _MOST_LOG_NS = 60.0, 35.0


@dataclass(frozen=True)
class Curve:
    """Knots in log2 of bytes, and ln of nanoseconds at them."""

    knots: Floats
    log_ns: Floats

    @property
    def moving(self) -> float:
        """Of the time at the largest size, the part that grows with the bytes beyond it."""
        slope = (self.log_ns[-1] - self.log_ns[-2]) / (self.knots[-1] - self.knots[-2]) / np.log(2.0)
        return float(np.clip(slope, _LEAST_MOVING, 1.0))

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


def fit_curve(size_bytes: npt.ArrayLike, time_ns: npt.ArrayLike, *, penalty: float | None = None) -> Curve:
    """The curve through measured times; few that are far off count less. Sizes need not be distinct."""
    sizes, times = (np.asarray(values, dtype=np.float64) for values in (size_bytes, time_ns))
    if len(sizes) < _LEAST_KNOTS or len(set(sizes.tolist())) < _LEAST_KNOTS or sizes.min() < 1 or times.min() <= 0:
        raise InputError(f"a curve over bytes needs {_LEAST_KNOTS} sizes of a byte or more with times above 0")
    try:
        optimize: Any = import_module("scipy.optimize")
    except ImportError as error:
        raise InputError("fitting collectives needs SciPy: install steptime[fit]") from error
    places, logs = np.log2(sizes), np.log(times)
    octaves = float(np.ptp(places))
    dense = len(set(sizes.tolist())) >= _DENSE * octaves
    knots = np.linspace(places.min(), places.max(), max(_LEAST_KNOTS, round((2 if dense else 1) * octaves) + 1))
    if penalty is None:
        penalty = _DENSE_PENALTY if dense else _PENALTY
    width = np.diff(knots)
    basis = np.clip(places[:, None] - knots[:-1], 0.0, width)
    bends = np.sqrt(penalty) * np.diff(np.eye(len(width)), axis=0)
    still = np.zeros((len(bends), 2))  # the level, above and below nothing, bends nothing
    weight = np.ones(len(places))
    level, slopes = 0.0, np.zeros(len(width))
    for _ in range(_ROUNDS):
        own = np.sqrt(weight)[:, None]
        rows = np.concatenate([np.concatenate([own, -own, basis * own], axis=1), np.concatenate([still, bends], axis=1)])
        result, _ = optimize.nnls(rows, np.concatenate([logs * own[:, 0], np.zeros(len(bends))]))
        level, slopes = float(result[0] - result[1]), result[2:]
        off = np.abs(logs - level - basis @ slopes)
        weight = 1.0 / np.maximum(1.0, off / max(_USUAL * float(np.median(off)), _CLOSE))
    return Curve(knots, level + np.concatenate([[0.0], np.cumsum(slopes * width)]))
