"""`Lengths`: how long the bags of a batch are, by quantiles. Kernels that walk a bag lookup by lookup wait for the longest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.spectrum import Integers, Tally
from steptime._lookups.statistics import lengths_between

QUANTILES = (*(k / 16 for k in range(1, 16)), 0.98, 0.995, 1.0)
"""Shares of bags that are at most so long; the last is the longest bag."""

_BLOCK = 1 << 17
"""Bags that are looked at at a time: a core's cache holds them."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths at `QUANTILES`."""

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


def tally_of(offsets: npt.NDArray[np.integer[Any]], table: str) -> Tally:
    """Distinct lengths of the bags between offsets, ascending, and how many bags have each."""
    firsts = range(0, len(offsets) - 1, _BLOCK)
    return tallied(lengths_between(offsets[first : first + _BLOCK + 1], table, first) for first in firsts)


def tallied(parts: Iterable[Integers]) -> Tally:
    """The same from lengths, in parts of any size but none."""
    tally: dict[int, int] = {}
    for lengths in parts:
        for length, bags in zip(*_tally_of_block(lengths), strict=True):
            tally[length] = tally.get(length, 0) + bags
    values = sorted(tally)
    return np.array(values, dtype=np.int64), np.array([tally[value] for value in values], dtype=np.int64)


def _tally_of_block(lengths: Integers) -> tuple[list[int], list[int]]:
    low, high = int(lengths.min()), int(lengths.max())
    if low == high:
        return [low], [len(lengths)]
    if high <= _BLOCK:
        bags = np.bincount(lengths)
        result = np.flatnonzero(bags)
        return result.tolist(), bags[result].tolist()
    values, numbers = np.unique(lengths, return_counts=True)
    return values.tolist(), numbers.tolist()


def of_tally(tally: Tally) -> Lengths:
    """From distinct lengths, ascending, and how many bags have each."""
    lengths, bags = tally
    ends = np.cumsum(bags)
    places = np.searchsorted(ends, np.ceil(np.array(QUANTILES) * ends[-1]).clip(1))
    return Lengths(tuple(lengths[places].astype(float).tolist()))
