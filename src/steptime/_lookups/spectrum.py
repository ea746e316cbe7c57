"""`Spectrum`: how many rows were looked up how often in a batch, in bins fine enough to count, scale and cache with.

Counts up to 32 have a bin each; beyond, every octave has eight. Each bin keeps its rows and its lookups, so that totals and
mean counts are exact, and the ends of the 17 bins of the reuse histogram (`statistics`) are ends of bins here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.statistics import REUSE_BINS, REUSE_EDGES, Statistics
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

_SINGLE, _PER_OCTAVE, _OCTAVES = 32, 8, 40
EDGES: Integers = np.array(
    [*range(1, _SINGLE + 1)]
    + [(1 << k) + j * (1 << k) // _PER_OCTAVE for k in range(5, _OCTAVES) for j in range(1, _PER_OCTAVE + 1)],
    dtype=np.int64,
)
"""Upper ends of the bins, up to 2^40 lookups of one row."""

HOTTEST = (1, 2, 4, 16, 64)
"""Of the rows in these places, hottest first, the counts are kept one by one: updates of one row wait for each other."""

_REUSE_ENDS = np.array(REUSE_EDGES) * (1 + 1e-9)
"""A mean count may have been rounded: it is on its bin's side of an end, however near."""

_TABULATED = 1 << 12
"""Counts up to here are tallied by themselves, which makes binning a single pass; few rows have more."""


@dataclass(frozen=True, slots=True)
class Spectrum:
    """Rows and the lookups that went to them, by how often each row was looked up; bins without rows are left out."""

    rows: tuple[float, ...]
    lookups: tuple[float, ...]

    @property
    def counts(self) -> Floats:
        """Mean lookups of a row in each bin, ascending."""
        return np.array(self.lookups) / np.array(self.rows) if self.rows else np.zeros(0)

    @property
    def unique(self) -> float:
        """Distinct rows."""
        return float(sum(self.rows))

    @property
    def total(self) -> float:
        """Lookups."""
        return float(sum(self.lookups))

    def reuse_bins(self) -> Floats:
        """Distinct rows and lookups in each bin of the reuse histogram, [2, 17]."""
        places = np.searchsorted(_REUSE_ENDS, self.counts)
        return np.array([np.bincount(places, weights=what, minlength=REUSE_BINS) for what in (self.rows, self.lookups)])

    def hottest(self) -> tuple[int, ...]:
        """Counts of the rows in the places `HOTTEST`, as far as bins tell; 0 where there is none."""
        above = np.cumsum(self.rows[::-1])
        counts = self.counts[::-1].round(6)  # the middle of a bin may be half way between two whole numbers: no noise decides
        places = np.searchsorted(above, np.array(HOTTEST) - 0.5)
        return tuple(round(counts[index]) if index < len(counts) else 0 for index in places.tolist())

    def in_random_order(self, windows: Floats) -> Floats:
        """Distinct rows expected in a window of the batch, were its lookups in random order, [windows]."""
        if not self.rows:
            return np.zeros(len(windows))
        shares = np.clip(windows / self.total, 0.0, 1.0)
        with np.errstate(divide="ignore"):
            missed = np.exp(np.outer(np.log1p(-shares), self.counts))  # [windows, bins]
        result: Floats = (1 - missed) @ np.array(self.rows)
        return result


def with_totals(spectrum: Spectrum, unique: float, lookups: float) -> Spectrum:
    """A spectrum of the same shape with exactly so many rows and lookups: lookups beyond one per row are scaled."""
    rows = np.array(spectrum.rows) * (unique / spectrum.unique)
    beyond = (spectrum.counts - 1) * rows
    left = max(0.0, lookups - unique)
    beyond = beyond * (left / beyond.sum()) if beyond.sum() > 0 else rows * (left / unique)
    return Spectrum(tuple(rows.tolist()), tuple((rows + beyond).tolist()))


def of_bins(rows: npt.NDArray[Any], lookups: npt.NDArray[Any]) -> Spectrum:
    """From rows and lookups per bin of `EDGES`."""
    used = rows > 0
    return Spectrum(tuple(rows[used].tolist()), tuple(lookups[used].tolist()))


def of_histogram(counts: Integers, rows: Integers) -> Spectrum:
    """From a histogram: `rows[i]` rows were looked up `counts[i]` times each."""
    if counts.shape != rows.shape or counts.ndim != 1:
        raise InputError(f"Histogram of lookups: counts {counts.shape} and rows {rows.shape}; expected vectors of one length.")
    bad = np.flatnonzero((counts < 0) | (rows < 0))
    if len(bad):
        index = int(bad[0])
        raise InputError(
            f"Histogram of lookups: {rows[index]} rows looked up {counts[index]} times at position {index}; expected 0 or more."
        )
    seen = counts > 0
    return of_tally((counts[seen], rows[seen]))


def of_statistics(statistics: Statistics) -> Spectrum:
    """From the 17 bins of the reuse histogram: one count stands for each, the same way between the ends of all of them.

    It is the way that gives as many lookups as there were; what the open last bin holds is what the others leave.
    """
    shares = np.array(statistics.reuse)
    rows = shares * statistics.unique
    lows = np.array([1.0, 2.0, *(edge + 1.0 for edge in REUSE_EDGES[1:])])
    highs = np.array([*map(float, REUSE_EDGES), max(REUSE_EDGES[-1] + 1.0, 8.0 * REUSE_EDGES[-1])])
    if not statistics.lookups:
        return Spectrum((), ())
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        enough = float(rows @ (lows ** (1 - middle) * highs**middle)) >= statistics.lookups
        low, high = (low, middle) if enough else (middle, high)
    counts = lows ** (1 - high) * highs**high
    lookups = rows * counts
    lookups[-1] += max(0.0, statistics.lookups - lookups.sum()) if rows[-1] else 0.0
    return of_bins(rows, lookups)


Tally = tuple[Integers, Integers]
"""Counts and how many rows have each."""


def tallied(parts: Iterable[Integers]) -> Tally:
    """From how often each row was looked up, in parts of any size; zeros do not matter."""
    tally = np.zeros(_TABULATED + 1, dtype=np.int64)
    large = [np.zeros(0, dtype=np.int64)]
    for counts in parts:
        # Most rows of a large table are looked up once: adding to one place again and again is what an array is slow at.
        several = counts[counts > 1]
        tally[1] += np.count_nonzero(counts) - len(several)
        if len(several) and int(several.max()) > _TABULATED:
            large.append(several[several > _TABULATED])
            several = several[several <= _TABULATED]
        result = np.bincount(several)
        tally[: len(result)] += result
    small = np.flatnonzero(tally)
    rest = np.sort(np.concatenate(large))
    return np.concatenate([small, rest]), np.concatenate([tally[small], np.ones(len(rest), dtype=np.int64)])


def hottest_of(tally: Tally) -> tuple[int, ...]:
    """Exact counts of the rows in the places `HOTTEST`; 0 where there are fewer rows."""
    counts, rows = tally[0][::-1], tally[1][::-1]
    places = np.searchsorted(np.cumsum(rows), HOTTEST)
    return tuple(int(counts[index]) if index < len(counts) else 0 for index in places.tolist())


def of_tally(tally: Tally) -> Spectrum:
    """The same in bins."""
    counts, rows = tally
    places = np.searchsorted(EDGES, counts)
    numbers = rows.astype(np.float64)
    result, lookups = (np.bincount(places, weights=what, minlength=len(EDGES)) for what in (numbers, numbers * counts))
    return of_bins(result, lookups)
