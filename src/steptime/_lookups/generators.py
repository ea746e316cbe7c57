"""`Generator`: a stream of lookups as data. The same generator gives the same indices on every device.

Integer arithmetic only: uniforms come from hashed counters, rows from integer knots, so that numpy and torch, CPU and GPU,
agree bit for bit; everything is int64 and wraps on overflow. docs/lookups.md has the formulas.

Draw i of a stream depends on its key and on i alone, so it can be made anywhere, in any order. The mixer is the finaliser of
splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), on int64 that wraps: what neither numpy
nor torch does on unsigned words on every device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError

VERSION = 1
"""Raised with every change after which the same parameters give other indices."""

LENGTHS = ("fixed", "uniform", "geometric")
MOST_ROWS = 1 << 31

UNIFORM_BITS = 36
"""A uniform draw is an integer below 2**36: times a row span below 2**26 it still fits int64."""

_LONG_BAG = {"long_bag": 0, "long_bag_at": 0.5}

_LENGTH_BITS = 20  # a bag's length before rounding, in fixed point
_LENGTH_QUANTILES = 4096
_BLOCK = 1 << 15  # bags whose lengths are drawn at a time: a core's cache holds them
_GOLDEN = (math.sqrt(5) - 1) / 2

_SINGLE_ROWS = 256
"""So many of the hottest rows have a knot each; further out knots are spaced by a constant ratio."""

_RATIO = 1.02
"""A linear piece this long misses the density of any kind below by well under the noise of a batch."""

_WORD = 1 << 64
_INCREMENT, _FIRST_FACTOR, _SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

# What a draw is for: each purpose has its own key.
_ROW, _LENGTH, _ROUNDING, _REPEAT, _DISTANCE, _SCATTER = range(6)

Array: TypeAlias = Any
"""An int64 vector of one library: `numpy.ndarray` or `torch.Tensor`."""


class Arrays(Protocol):
    """A library of int64 vectors: what is called differently from one to the next."""

    def arange(self, stop: int) -> Array:
        """0, 1, ..., stop - 1."""
        ...

    def from_numpy(self, values: npt.NDArray[np.int64]) -> Array:
        """The same values where this library keeps its vectors."""
        ...

    def segment_of(self, edges: Array, values: Array) -> Array:
        """For each value the number of `edges` (ascending) that are not above it, less one."""
        ...


class NumpyArrays:
    """`Arrays` of numpy."""

    def arange(self, stop: int) -> Array:
        """0, 1, ..., stop - 1."""
        return np.arange(stop, dtype=np.int64)

    def from_numpy(self, values: npt.NDArray[np.int64]) -> Array:
        """The values themselves."""
        return values

    def segment_of(self, edges: Array, values: Array) -> Array:
        """For each value the number of `edges` (ascending) that are not above it, less one."""
        return np.searchsorted(edges, values, side="right") - 1


NUMPY: Arrays = NumpyArrays()


@dataclass(frozen=True, slots=True)
class Knots:
    """Inverse of the share of lookups below a row, linear between knots; uniforms and rows are integers."""

    uniforms: npt.NDArray[np.int64]  # [k] ascending, the first is 0
    rows: npt.NDArray[np.int64]  # [k] the row at each
    uniform_spans: npt.NDArray[np.int64]  # [k] to the next knot; positive
    row_spans: npt.NDArray[np.int64]  # [k]


def _zipf_share(part: float, rows: int, alpha: float, shift: float) -> float:
    if abs(alpha - 1) < 1e-9:
        return math.log1p(part / shift) / math.log1p(rows / shift)
    exponent = 1 - alpha
    return math.expm1(exponent * math.log1p(part / shift)) / math.expm1(exponent * math.log1p(rows / shift))


def _hot_share(part: float, rows: int, alpha: float, shift: float) -> float:
    hot = min(shift, rows)
    below, above = min(part, hot) / hot, max(part - hot, 0.0) / (rows - hot) if rows > hot else 0.0
    chance = alpha / (1 + alpha) if rows > hot else 1.0
    return chance * below + (1 - chance) * above


SHARES: dict[str, Callable[[float, int, float, float], float]] = {
    "uniform": lambda part, rows, _alpha, _shift: part / rows,
    "power": lambda part, rows, alpha, _shift: math.pow(part / rows, 1 / alpha),
    "zipf": _zipf_share,
    "hot": _hot_share,
}
"""kind -> share of lookups that go to rows below a given one (rank order, hottest first).

For a uniform u in [0, 1), E rows, exponent a (`alpha`) and shift q, the row before scattering is

- uniform: floor(E * u)
- power:   floor(E * u^a)
- zipf:    floor((q^(1-a) + u * ((E+q)^(1-a) - q^(1-a)))^(1/(1-a)) - q), and for a = 1 its limit, floor(q * (1 + E/q)^u - q)
- hot:     one of q rows for u < a/(1+a), all equally likely, else one of the others: a is the odds of a hot row
"""


@lru_cache(maxsize=1024)
def knots_of(kind: str, rows: int, alpha: float, shift: float) -> Knots:
    """The knots to sample a kind from."""
    share = SHARES[kind]
    scale = 1 << UNIFORM_BITS
    edges = _row_edges(rows)
    # Python's own pow and log: numpy's differ in the last place from one CPU to the next.
    uniforms = np.array([round(scale * share(edge, rows, alpha, shift)) for edge in edges], dtype=np.int64)
    positions = np.array(edges, dtype=np.int64)
    uniforms[0], uniforms[-1] = 0, scale
    used = np.flatnonzero(np.diff(uniforms) > 0)
    return Knots(
        uniforms=np.ascontiguousarray(uniforms[used]),
        rows=np.ascontiguousarray(positions[used]),
        uniform_spans=np.diff(uniforms)[used],
        row_spans=np.diff(positions)[used],
    )


def _row_edges(rows: int) -> list[int]:
    edges = list(range(min(rows, _SINGLE_ROWS) + 1))
    while edges[-1] < rows:
        edges.append(min(rows, math.ceil(edges[-1] * _RATIO)))
    return edges


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
        offsets = lengths.cumsum(0)
        return offsets, int(offsets[-1])

    def _drawn_lengths(self, samples: Array, iteration: int, arrays: Arrays) -> Array:
        """Of the bags that end at these places of `offsets`."""
        draws = uniforms(self._key(_LENGTH, iteration), samples) >> (UNIFORM_BITS - 12)
        lengths = arrays.from_numpy(_length_quantiles(self.lengths, self._fixed_point_mean))[draws]
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
        positions -= repeats.cumsum(0)  # of fresh draws so far, less one where this is one
        positions -= distances  # below 0: a draw from before the batch
        return positions

    def block_shares(self, blocks: int) -> npt.NDArray[np.float64]:
        """Shares of the lookups that go to each of so many blocks of rows, equal but for the last one, [blocks].

        The most popular rows count one by one where they are, the others evenly.
        """
        size = -(-self.rows // blocks)
        ends = np.minimum(np.arange(blocks + 1) * size, self.rows)
        share = SHARES[self.kind]
        if not self.scatter:
            return np.diff([share(float(end), self.rows, self.alpha, self.shift) for end in ends])
        single = min(self.rows, _SINGLE_ROWS)
        below = np.array([share(float(row), self.rows, self.alpha, self.shift) for row in range(single + 1)])
        places = (np.arange(single) * stride_of(self.rows) + key_of(self.seed, _SCATTER) % self.rows) % self.rows
        popular = np.bincount(places // size, weights=np.diff(below), minlength=blocks)
        result: npt.NDArray[np.float64] = popular + (1.0 - below[-1]) * np.diff(ends) / self.rows
        return result

    def _rows_of(self, draws: Array, arrays: Arrays) -> Array:
        knots = knots_of(self.kind, self.rows, self.alpha, self.shift)
        edges = arrays.from_numpy(knots.uniforms)
        segments = arrays.segment_of(edges, draws)
        draws -= edges[segments]
        draws *= arrays.from_numpy(knots.row_spans)[segments]
        draws //= arrays.from_numpy(knots.uniform_spans)[segments]
        draws += arrays.from_numpy(knots.rows)[segments]
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


def key_of(*words: int) -> int:
    """One int64 from several integers (seed, iteration, purpose); any change in any of them gives an unrelated key."""
    key = 0
    for word in words:
        key = _mixed((key ^ (word % _WORD)) + _INCREMENT)
    return _signed(key)


def uniforms(key: int, counters: Array) -> Array:
    """One integer below 2**UNIFORM_BITS for each counter."""
    words = counters * _signed(_INCREMENT)
    words += key
    words ^= (words >> 30) & _low_bits(34)
    words *= _signed(_FIRST_FACTOR)
    words ^= (words >> 27) & _low_bits(37)
    words *= _signed(_SECOND_FACTOR)
    words ^= (words >> 31) & _low_bits(33)
    words >>= 64 - UNIFORM_BITS
    words &= _low_bits(UNIFORM_BITS)
    return words


def _mixed(word: int) -> int:
    word %= _WORD
    word = (word ^ (word >> 30)) * _FIRST_FACTOR % _WORD
    word = (word ^ (word >> 27)) * _SECOND_FACTOR % _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _low_bits(count: int) -> int:
    return (1 << count) - 1
