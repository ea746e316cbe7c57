"""`Spectrum`: how many rows were looked up how often in a batch, and `Footprint`: how many of them a window of lookups holds.

Counts up to 32 have a bin each; beyond, every octave has eight. Each bin keeps its rows and its lookups, so that totals and
mean counts are exact, and the ends of the 17 bins of the reuse histogram (`statistics`) are ends of bins here.

A footprint tells what a cache of any size misses: one that keeps the last C rows holds what a window w with C distinct rows
holds; of the lookups that follow, as many miss as the window gains distinct rows per lookup (Xiang et al., "HOTL: a higher
order theory of locality", 2013). Of lookups in random order this is Che's approximation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.statistics import REUSE_BINS, REUSE_EDGES, Floats, Integers, Statistics, Tally

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

_WINDOWS = np.unique(np.floor(2.0 ** (np.arange(4 * 53) / 4)))
"""Of how many lookups: four an octave."""

_DIGITS = 7
"""That are kept of distinct rows."""

_SAMPLE = 1 << 18
"""Positions of at most about so many lookups are looked at: those of rows that a hash picks."""

_HOT_SHARE = 1 / 16
"""A row with more than this share of the sample is left out of it: it is in every window that matters."""

_BLOCK = 1 << 17
"""Lookups that are hashed at a time: a core's cache holds them."""

_NO_KEYS = np.zeros(0, dtype=np.uint64)
_HASH = np.uint32(0x85EBCA6B)  # any odd number is a bijection; not the golden section, by which `generators` scatter rows


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


@dataclass(frozen=True, slots=True)
class Footprint:
    """Distinct rows in a window, on average over the windows of a batch."""

    windows: tuple[float, ...]  # lookups, ascending: from 1 to all of the batch
    rows: tuple[float, ...]  # distinct rows in each

    @property
    def lookups(self) -> float:
        """Of the batch."""
        return self.windows[-1] if self.windows else 0.0

    @property
    def unique(self) -> float:
        """Distinct rows of the batch."""
        return self.rows[-1] if self.rows else 0.0

    def distinct(self, windows: npt.ArrayLike) -> Floats:
        """Distinct rows in windows of so many lookups; a window longer than the batch holds no more than the batch."""
        asked = np.asarray(windows, dtype=np.float64)
        if not self.windows:
            return np.zeros_like(asked)
        result = np.exp(np.interp(np.log(np.maximum(asked, 1.0)), np.log(self.windows), np.log(self.rows)))
        return result * np.minimum(asked, 1.0)


def grid(lookups: float) -> Floats:
    """Windows at which a batch's footprint is kept: four an octave, and all of it."""
    return np.append(_WINDOWS[: np.searchsorted(_WINDOWS, lookups)], float(lookups)) if lookups >= 1 else np.zeros(0)


def of_spectrum(spectrum: Spectrum, locality: Floats | None = None) -> Footprint:
    """Of lookups in random order, or of others: `locality` is what their windows on `grid` hold over those in random order."""
    windows = grid(spectrum.total)
    rows = spectrum.in_random_order(windows)
    if locality is not None:
        rows = np.minimum(rows * locality, spectrum.unique)
    if len(rows):
        rows[0], rows[-1] = 1.0, spectrum.unique
    return of_rows(windows, rows)


def of_rows(windows: Floats, rows: Floats) -> Footprint:
    """From distinct rows at windows, to seven digits: never fewer in a longer window, and never more than its lookups."""
    kept = np.minimum(np.maximum.accumulate(np.maximum(rows, 1.0)), windows)
    # Powers of ten are exact, so that what is divided by them is the number nearest to the digits.
    tens = 10.0 ** np.abs(digits := _DIGITS - 1 - np.floor(np.log10(kept)))
    short = np.where(digits < 0, np.rint(kept / tens) * tens, np.rint(kept * tens) / tens)
    return Footprint(tuple(windows.tolist()), tuple(short.tolist()))


def locality_of(indices: npt.NDArray[np.integer[Any]], windows: Floats) -> Floats:
    """Distinct rows in windows of a stream over those of the same lookups in random order, by a sample of its rows, [windows].

    A row of c lookups stays out of as many windows as fit between its lookups. The ratio needs few rows: what differs from row
    to row, how often it is looked up, is in both of its parts.
    """
    positions, starts = _sampled(indices)
    lookups = len(indices)
    if not len(positions):
        return np.ones(len(windows))
    counts = np.diff(np.append(starts, len(positions)))
    ends = np.append(starts[1:], len(positions)) - 1
    inner = np.diff(positions)
    inner[ends[:-1]] = 0
    gaps = np.sort(np.concatenate([inner, positions[starts] + 1, lookups - positions[ends]]))
    sums = np.append(0, np.cumsum(gaps[::-1]))
    longer = len(gaps) - np.searchsorted(gaps, windows, side="right")
    absent = (sums[longer] - longer * windows) / (lookups - windows + 1)
    spectrum = of_tally(tallied([counts]))
    # The share of a window is one of the whole stream, of which the sample has only a part.
    random_order = spectrum.in_random_order(windows * (spectrum.total / lookups))
    result: Floats = np.clip((len(starts) - absent) / np.maximum(random_order, 1e-9), 0.0, 1.0)
    return result


def _sampled(indices: npt.NDArray[np.integer[Any]]) -> tuple[Integers, Integers]:
    """Positions of the lookups of sampled rows, row by row and ascending in each, and where each row starts."""
    most = np.uint32(min(2**32 - 1, (_SAMPLE << 32) // max(1, len(indices))))
    keys = np.sort(np.concatenate([_keys(indices, start, most) for start in range(0, len(indices), _BLOCK)] or [_NO_KEYS]))
    rows = (keys >> np.uint64(32)).astype(np.uint32)
    starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1])[: len(rows)])
    counts = np.diff(np.append(starts, len(rows)))
    few = counts <= _HOT_SHARE * _SAMPLE
    positions = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)[np.repeat(few, counts)]
    return positions, np.cumsum(counts[few]) - counts[few]


def _keys(indices: npt.NDArray[np.integer[Any]], start: int, most: np.uint32) -> npt.NDArray[np.uint64]:
    """Of a block's lookups of rows whose hash is at most `most`: hash and position in one word."""
    hashes = indices[start : start + _BLOCK].astype(np.uint32)
    hashes *= _HASH
    chosen = np.flatnonzero(hashes <= most)
    return (hashes[chosen].astype(np.uint64) << np.uint64(32)) | (chosen + start).astype(np.uint64)
