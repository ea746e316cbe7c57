"""What a batch looked up in one table, as far as time depends on it: totals (`Statistics`) and lengths of bags (`Lengths`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Tally = tuple[Integers, Integers]
"""Counts or lengths, and how many rows or bags have each."""

REUSE_EDGES = tuple(1 << power for power in range(16))
"""Upper ends of the first 16 bins, (0, 1], (1, 2], (2, 4] ... (2^14, 2^15]; the 17th is everything above."""

REUSE_BINS = len(REUSE_EDGES) + 1

QUANTILES = (*(k / 16 for k in range(1, 16)), 0.98, 0.995, 1.0)
"""Shares of bags that are at most so long; the last is the longest bag."""

_BLOCK = 1 << 17
"""Bags that are looked at at a time: a core's cache holds them."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Lookups of one batch in one table.

    `reuse[b]` is the share of *distinct* rows that were looked up so many times as bin b says (method: count accesses per
    distinct index, bins as `REUSE_EDGES`); a table without lookups has 17 zeros.
    """

    rows: int
    batch: int
    lookups: int
    unique: int
    pooling_spread: float  # standard deviation of the bags' lengths
    reuse: tuple[float, ...] = field(hash=False)

    @property
    def pooling(self) -> float:
        """Mean lookups per sample."""
        return self.lookups / self.batch if self.batch else 0.0


def from_totals(rows: int, batch: int, lookups: int, squares: int, bins: npt.NDArray[np.int64]) -> Statistics:
    """Statistics from integer totals: sum and sum of squares of the bags' lengths, distinct rows in each reuse bin."""
    unique = int(bins.sum())
    variance = (batch * squares - lookups * lookups) / (batch * batch) if batch else 0.0
    return Statistics(
        rows=rows,
        batch=batch,
        lookups=lookups,
        unique=unique,
        pooling_spread=math.sqrt(variance),
        reuse=tuple(int(count) / unique if unique else 0.0 for count in bins),
    )


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of bags, at `QUANTILES`. Kernels that walk a bag lookup by lookup wait for the longest."""

    quantiles: tuple[float, ...]

    @property
    def longest(self) -> float:
        """Of all bags."""
        return self.quantiles[-1]

    def of_batch(self, batch: int, other: int) -> Lengths:
        """The same bags in a batch of another size: a smaller one rarely has the longest, a larger one has longer ones.

        About one bag in `batch` is as long as the longest; lengths beyond the last quantile but one are taken as exponential.
        """
        rare = 1 - QUANTILES[-2]
        if min(batch, other) * rare > 1:
            slope = (self.longest - self.quantiles[-2]) / math.log(batch * rare)
            longest = self.longest + slope * math.log(other / batch)
        else:
            shares = [*QUANTILES[:-1], max(QUANTILES[-2], 1 - 1 / batch)]
            longest = float(np.interp(1 - 1 / other, shares, self.quantiles))
        longest = float(round(longest))
        return Lengths((*(min(length, longest) for length in self.quantiles[:-1]), longest))

    @classmethod
    def of(cls, tally: Tally) -> Lengths:
        """From distinct lengths, ascending, and how many bags have each."""
        lengths, bags = tally
        ends = np.cumsum(bags)
        places = np.searchsorted(ends, np.ceil(np.array(QUANTILES) * ends[-1]).clip(1))
        return cls(tuple(lengths[places].astype(float).tolist()))


def tally_of_offsets(offsets: npt.NDArray[np.integer[Any]], table: str) -> Tally:
    """Distinct lengths of the bags between offsets, ascending, and how many bags have each."""
    firsts = range(0, len(offsets) - 1, _BLOCK)
    return tally_of_lengths(_lengths_between(offsets[first : first + _BLOCK + 1], table, first) for first in firsts)


def tally_of_lengths(parts: Iterable[Integers]) -> Tally:
    """The same from lengths, in parts of any size but none."""
    tally: dict[int, int] = {}
    for lengths in parts:
        if int(lengths.max()) <= _BLOCK:
            bags = np.bincount(lengths)
            values = np.flatnonzero(bags)
            numbers = bags[values]
        else:
            values, numbers = np.unique(lengths, return_counts=True)
        for length, number in zip(values.tolist(), numbers.tolist(), strict=True):
            tally[length] = tally.get(length, 0) + number
    return np.array(sorted(tally), dtype=np.int64), np.array([tally[length] for length in sorted(tally)], dtype=np.int64)


def check_vectors(indices: npt.NDArray[Any], offsets: npt.NDArray[Any], rows: int, table: str) -> None:
    """Whether these can be lookups at all: vectors of integers, the offsets from 0 to the number of indices."""
    if rows < 1:
        raise InputError(f"Table {table}: it has {rows} rows; expected 1 or more.")
    for name, array in (("indices", indices), ("offsets", offsets)):
        if not isinstance(array, np.ndarray):
            raise InputError(f"Table {table}: {name} are a {type(array).__name__}; expected a numpy vector of integers.")
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise InputError(
                f"Table {table}: {name} have shape {array.shape} and dtype {array.dtype}; expected a vector of integers."
            )
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(indices):
        ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else ()
        raise InputError(
            f"Table {table}: offsets start and end at {ends}; expected 0 and the number of indices, {len(indices)}."
        )


def check_range(indices: npt.NDArray[Any], rows: int, table: str, first: int = 0) -> None:
    """Whether every index is a row; positions are counted from `first` on."""
    # Read without a sign, a negative index is larger than any row.
    unsigned = indices.view(np.dtype(f"u{indices.dtype.itemsize}")) if indices.flags.c_contiguous else indices.astype(np.uint64)
    if len(indices) and int(unsigned.max()) >= min(rows, 1 << (8 * indices.dtype.itemsize - 1)):
        bad = np.flatnonzero((indices < 0) | (indices >= rows))
        if len(bad):
            position = int(bad[0])
            raise InputError(
                f"Table {table}: index {int(indices[position])} at position {first + position} is outside its {rows} rows; "
                f"expected 0 to {rows - 1}."
            )


def _lengths_between(offsets: npt.NDArray[Any], table: str, first: int = 0) -> npt.NDArray[np.int64]:
    """Lengths of the bags between offsets; positions are counted from `first` on."""
    # Unsigned offsets that fall would wrap around and look long.
    whole = offsets.astype(np.int64, copy=False)
    lengths: npt.NDArray[np.int64] = whole[1:] - whole[:-1]
    if len(lengths) and int(lengths.min()) < 0:
        fall = first + int(np.flatnonzero(lengths < 0)[0])
        raise InputError(f"Table {table}: offset {fall + 1} is below the one before it; expected ascending offsets.")
    return lengths
