"""`Footprint`: how many distinct rows a window of so many lookups holds, and from that what a cache of any size misses.

A cache that keeps the last C rows holds what a window w with C distinct rows holds; of the lookups that follow, as many miss
as the window gains distinct rows per lookup (Xiang et al., "HOTL: a higher order theory of locality", 2013). Of lookups in
random order this is Che's approximation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.spectrum import Floats, Integers, Spectrum, of_tally, tallied

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

    def misses(self, cache_rows: npt.ArrayLike, *, warm: bool = False) -> Floats:
        """Lookups of the batch that do not find their row in a cache of so many rows (least recently used leaves first).

        Cold: the cache is empty at first, and every row misses once. Warm: the same batch ran before.
        """
        capacity = np.asarray(cache_rows, dtype=np.float64)
        if not self.windows:
            return np.zeros_like(capacity)
        logs, log_rows = np.log(self.windows), np.log(self.rows)
        # Where two windows hold as many rows, the longer one counts.
        kept = np.append(np.diff(log_rows) > 1e-12, True)
        inside = np.clip(capacity, 1.0, self.unique)
        at = np.interp(np.log(inside), log_rows[kept], logs[kept])
        window = np.exp(at)
        gained = np.interp(at, logs, self._gains())  # distinct rows per further lookup
        missed = gained * self.lookups
        if not warm:
            missed = np.maximum(inside + (self.lookups - window) * gained, self.unique)
        enough = capacity >= self.unique
        result = np.where(enough, 0.0 if warm else self.unique, np.minimum(missed, self.lookups))
        return np.where(capacity < 1.0, self.lookups, result)

    def hit_rate(self, cache_rows: npt.ArrayLike, *, warm: bool = False) -> Floats:
        """Share of the batch's lookups that find their row in a cache of so many rows."""
        return (
            1.0 - self.misses(cache_rows, warm=warm) / self.lookups if self.windows else np.ones_like(cache_rows, dtype=float)
        )

    def _gains(self) -> Floats:
        windows, rows = np.array(self.windows), np.array(self.rows)
        if len(windows) < 2:
            return np.ones(len(windows))
        gains: Floats = np.clip(np.gradient(rows, windows), 0.0, 1.0)
        return gains


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
