"""`Generator`: a stream of lookups as data. The same generator gives the same indices on every device.

Integer arithmetic only: uniforms come from hashed counters, rows from integer knots (`skew`), so that numpy and torch,
CPU and GPU, agree bit for bit. docs/lookups.md has the formulas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.arrays import NUMPY, Array, Arrays
from steptime._lookups.hashing import UNIFORM_BITS, key_of, uniforms
from steptime._lookups.skew import SHARES, knots_of
from steptime.errors import InputError

VERSION = 1
"""Raised with every change after which the same parameters give other indices."""

LENGTHS = ("fixed", "uniform", "geometric")
MOST_ROWS = 1 << 31

_LONG_BAG = {"long_bag": 0, "long_bag_at": 0.5}

_LENGTH_BITS = 20  # a bag's length before rounding, in fixed point
_LENGTH_QUANTILES = 4096
_BLOCK = 1 << 15  # bags whose lengths are drawn at a time: a core's cache holds them
_GOLDEN = (math.sqrt(5) - 1) / 2

# What a draw is for: each purpose has its own key.
_ROW, _LENGTH, _ROUNDING, _REPEAT, _DISTANCE, _SCATTER = range(6)


@dataclass(frozen=True, slots=True)
class Bags:
    """Lookups of a batch: sample i looks up `indices[offsets[i]:offsets[i + 1]]`."""

    indices: Array  # int64 [lookups]
    offsets: Array  # int64 [batch + 1]


@dataclass(frozen=True, slots=True)
class Generator:
    """An index stream: how many rows, how many lookups a sample, how skewed, how local in time.

    `lengths` of bags: `fixed` (all equal; a broken mean alternates between its neighbours), `uniform` between 0 and
    twice the mean, `geometric` (many short bags, few long ones). `locality` is the share of lookups that repeat one of
    the last `window` fresh draws. `scatter` spreads rows of neighbouring popularity over the table. `long_bag` is the length
    of one bag that differs from all others (0: none does), `long_bag_at` where it is: 0 for the first, 1 for the last.
    """

    rows: int
    pooling: float  # mean lookups per sample; 0: every bag is empty
    lengths: str = "fixed"
    kind: str = "uniform"
    alpha: float = 1.0  # of power and zipf: exponent; of hot: odds of a hot row
    shift: float = 1.0  # of zipf: about so many of the hottest rows are equally hot; of hot: exactly so many
    locality: float = 0.0
    window: int = 1024
    scatter: bool = True
    seed: int = 0
    version: int = VERSION
    long_bag: int = 0  # `_LONG_BAG` has these defaults too
    long_bag_at: float = 0.5

    def __post_init__(self) -> None:
        checks = (
            (1 <= self.rows <= MOST_ROWS, "rows", f"1 to {MOST_ROWS}"),
            (0 <= self.pooling <= 1e6, "pooling", "0 to 1e6 lookups per sample"),
            (self.lengths in LENGTHS, "lengths", " or ".join(LENGTHS)),
            (self.kind in SHARES, "kind", " or ".join(SHARES)),
            (0 < self.alpha <= 1000, "alpha", "above 0, at most 1000"),
            (0 < self.shift <= 1e12, "shift", "above 0, at most 1e12"),
            (0 <= self.locality <= 1, "locality", "a share from 0 to 1"),
            (1 <= self.window <= MOST_ROWS, "window", f"1 to {MOST_ROWS} lookups"),
            (0 <= self.long_bag <= 1_000_000, "long_bag", "0 to 1,000,000 lookups"),
            (0 <= self.long_bag_at <= 1, "long_bag_at", "a place from 0 (first sample) to 1 (last)"),
            (self.version == VERSION, "version", f"{VERSION}, the only one this release draws"),
        )
        for holds, name, expected in checks:
            if not holds:
                raise InputError(f"Generator: {name} is {getattr(self, name)!r}; expected {expected}.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a long bag only where there is one: stored measurements know their streams by this text."""
        left_out = {name for name, usual in _LONG_BAG.items() if getattr(self, name) == usual}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Generator:
        """The generator that `to_dict` gave."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise InputError(f"Generator: unknown field {unknown[0]!r}; expected some of {[f.name for f in fields(cls)]}.")
        return cls(**values)

    def to_json(self) -> str:
        """Compact text; the same generator always gives the same text."""
        return json.dumps(self.to_dict(), separators=(",", ":"), sort_keys=True)

    def bags(self, batch: int, iteration: int = 0, arrays: Arrays = NUMPY) -> Bags:
        """The lookups of one batch; other iterations draw anew from the same distribution over the same rows."""
        offsets, lookups = self.offsets(batch, iteration, arrays)
        draws = uniforms(self._key(_ROW, iteration), self._counters(lookups, iteration, arrays))
        return Bags(indices=self._rows_of(draws, arrays), offsets=offsets)

    def _key(self, purpose: int, iteration: int) -> int:
        return key_of(self.seed, purpose, iteration)

    def offsets(self, batch: int, iteration: int = 0, arrays: Arrays = NUMPY) -> tuple[Array, int]:
        """Where the bags of a batch begin and the last one ends, and the number of lookups."""
        if batch < 0:
            raise InputError(f"Generator: batch is {batch}; expected 0 or more samples.")
        offsets, lookups = self._usual_offsets(batch, iteration, arrays)
        if not self.long_bag or not batch:
            return offsets, lookups
        index = round(self.long_bag_at * (batch - 1))
        longer = self.long_bag - int(offsets[index + 1] - offsets[index])
        offsets += (arrays.arange(batch + 1) > index) * longer
        return offsets, lookups + longer

    def _usual_offsets(self, batch: int, iteration: int, arrays: Arrays) -> tuple[Array, int]:
        mean, samples = self._fixed_point_mean, arrays.arange(batch + 1)
        if self.lengths == "fixed":
            return (samples * mean) >> _LENGTH_BITS, (batch * mean) >> _LENGTH_BITS
        lengths = self._drawn_lengths(samples, iteration, arrays)
        lengths[0] = 0
        offsets = arrays.cumsum(lengths)
        return offsets, int(offsets[-1])

    def _drawn_lengths(self, samples: Array, iteration: int, arrays: Arrays) -> Array:
        """Of the bags that end at these places of `offsets`."""
        draws = uniforms(self._key(_LENGTH, iteration), samples) >> (UNIFORM_BITS - 12)
        lengths = arrays.take(arrays.from_numpy(_length_quantiles(self.lengths, self._fixed_point_mean)), draws)
        # Rounding at random keeps the mean of every quantile.
        lengths += uniforms(self._key(_ROUNDING, iteration), samples) >> (UNIFORM_BITS - _LENGTH_BITS)
        lengths >>= _LENGTH_BITS
        return lengths

    def bag_lengths(self, batch: int) -> Iterator[npt.NDArray[np.int64]]:
        """The lengths of the bags of a batch, in parts: differences of `offsets`, which is large and not made."""
        index = round(self.long_bag_at * (batch - 1)) if self.long_bag else -1
        for first in range(0, batch, _BLOCK):
            ends = np.arange(first, min(first + _BLOCK, batch) + 1)
            if self.lengths == "fixed":
                lengths = np.diff((ends * self._fixed_point_mean) >> _LENGTH_BITS)
            else:
                lengths = self._drawn_lengths(ends[1:], 0, NUMPY)
            if first <= index < first + len(lengths):
                lengths[index - first] = self.long_bag
            yield lengths

    @property
    def _fixed_point_mean(self) -> int:
        return round(self.pooling * (1 << _LENGTH_BITS))

    def _counters(self, lookups: int, iteration: int, arrays: Arrays) -> Array:
        """Which draw each lookup takes: its own, or one of the last `window` for the share that repeats."""
        positions = arrays.arange(lookups)
        if not self.locality:
            return positions
        repeats = uniforms(self._key(_REPEAT, iteration), positions) < round(self.locality * (1 << UNIFORM_BITS))
        distances = uniforms(self._key(_DISTANCE, iteration), positions)
        distances %= self.window
        distances *= repeats
        positions -= arrays.cumsum(repeats)  # of fresh draws so far, less one where this is one
        positions -= distances  # below 0: a draw from before the batch
        return positions

    def _rows_of(self, draws: Array, arrays: Arrays) -> Array:
        knots = knots_of(self.kind, self.rows, self.alpha, self.shift)
        edges = arrays.from_numpy(knots.uniforms)
        segments = arrays.segment_of(edges, draws)
        draws -= arrays.take(edges, segments)
        draws *= arrays.take(arrays.from_numpy(knots.row_spans), segments)
        draws //= arrays.take(arrays.from_numpy(knots.uniform_spans), segments)
        draws += arrays.take(arrays.from_numpy(knots.rows), segments)
        if self.scatter:
            draws *= stride_of(self.rows)
            draws += key_of(self.seed, _SCATTER) % self.rows
            draws %= self.rows
        return draws


@lru_cache(maxsize=1024)
def stride_of(rows: int) -> int:
    """A stride without a common divisor with `rows`, near the golden section: rank * stride mod rows visits every row once."""
    stride = max(1, round(rows * _GOLDEN))
    while math.gcd(stride, rows) != 1:
        stride += 1
    return stride


@lru_cache(maxsize=1024)
def _length_quantiles(lengths: str, mean: int) -> npt.NDArray[np.int64]:
    """Fixed-point lengths at equally likely quantiles; their mean is `mean`."""
    shape, total = _length_shape(lengths)
    return np.rint(mean * _LENGTH_QUANTILES / total * shape).astype(np.int64)


@cache
def _length_shape(lengths: str) -> tuple[npt.NDArray[np.float64], float]:
    """Lengths at the quantiles, up to a factor, and their sum."""
    middles = [(i + 0.5) / _LENGTH_QUANTILES for i in range(_LENGTH_QUANTILES)]
    # Python's own log: numpy's differs in the last place from one CPU to the next.
    shape = middles if lengths == "uniform" else [-math.log1p(-middle) for middle in middles]
    return np.array(shape), math.fsum(shape)
