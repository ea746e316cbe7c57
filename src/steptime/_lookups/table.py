"""`TableStatistics`: all that is kept of one table's lookups in a batch, and the one pass over the indices that counts it.

`TableColumns` are what models read of many tables' statistics: a column for each quantity and a row for each table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.spectrum import (
    HOTTEST,
    Footprint,
    Spectrum,
    grid,
    hottest_of,
    locality_of,
    of_spectrum,
    of_tally,
    tallied,
)
from steptime._lookups.statistics import (
    QUANTILES,
    REUSE_BINS,
    Integers,
    Lengths,
    Statistics,
    Tally,
    check_range,
    check_vectors,
    from_totals,
    tally_of_offsets,
)
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

WINDOWS = 2.0 ** np.arange(25)
"""Lookups in the windows at which the order of lookups is kept for models, an octave apart."""

_DENSE_ROWS = 1 << 20
"""Up to so many rows an array of their counts is near enough to a core that counting beats sorting."""

_SHORT = 6
"""Rows with up to so many lookups are counted without listing them."""

_BLOCK = 1 << 16
"""Entries that are looked at at a time: a core's cache holds them."""


@dataclass(frozen=True)
class TableStatistics:
    """One table of so many rows and elements per row, looked up by a batch."""

    table: str
    dim: int
    counted: Statistics  # totals and the 17-bin reuse histogram
    # What is long is compared but not hashed: tables whose totals agree are rarely different.
    lengths: Lengths = field(hash=False)
    hottest: tuple[int, ...] = field(hash=False)  # lookups of rows in the places `spectrum.HOTTEST`; 0 where there are fewer
    spectrum: Spectrum = field(hash=False)
    footprint: Footprint = field(hash=False)

    @property
    def rows(self) -> int:
        """Of the table."""
        return self.counted.rows

    @property
    def batch(self) -> int:
        """Samples."""
        return self.counted.batch

    @property
    def lookups(self) -> int:
        """Of the batch."""
        return self.counted.lookups

    @property
    def unique(self) -> int:
        """Distinct rows looked up."""
        return self.counted.unique

    @property
    def longest(self) -> int:
        """Lookups of the longest bag."""
        return round(self.lengths.longest)

    @cached_property
    def reuse_bins(self) -> Floats:
        """Distinct rows and lookups in each bin of the reuse histogram, [2, 17]."""
        return self.spectrum.reuse_bins()

    @cached_property
    def locality(self) -> Floats:
        """Distinct rows in `WINDOWS` over those of the same lookups in random order, [windows]."""
        if not self.spectrum.rows:
            return np.ones(len(WINDOWS))
        inside = np.minimum(WINDOWS, self.footprint.lookups)
        random_order = np.maximum(self.spectrum.in_random_order(inside), 1e-9)
        result: Floats = np.clip(self.footprint.distinct(inside) / random_order, 0.0, 1.0)
        return result


@dataclass(frozen=True)
class TableColumns:
    """Statistics of tables. Rows and lookups are kept by the 17 bins of the reuse histogram, so that mean counts are exact."""

    rows: Floats  # [tables] of the table
    dim: Floats  # [tables]
    batch: Floats  # [tables] samples
    spread: Floats  # [tables] standard deviation of the bags' lengths
    lengths: Floats  # [tables, quantiles] of bags, at `lengths.QUANTILES`; the last is the longest bag
    hottest: Floats  # [tables, places] lookups of the rows in the places `spectrum.HOTTEST`
    bin_rows: Floats  # [tables, bins] distinct rows
    bin_lookups: Floats  # [tables, bins]
    locality: Floats  # [tables, windows] distinct rows in `WINDOWS` over those of the same lookups in random order

    def __len__(self) -> int:
        """How many tables there are."""
        return len(self.rows)

    @cached_property
    def lookups(self) -> Floats:
        """Of the batch: whole numbers, so that no noise of their sum begins another chunk of them."""
        total: Floats = np.rint(self.bin_lookups.sum(axis=1))
        return total

    @cached_property
    def unique(self) -> Floats:
        """Distinct rows looked up."""
        total: Floats = self.bin_rows.sum(axis=1)
        return total

    @cached_property
    def pooling(self) -> Floats:
        """Mean lookups per sample."""
        return self.lookups / np.maximum(self.batch, 1.0)

    @property
    def longest(self) -> Floats:
        """Lookups of the longest bag."""
        return self.lengths[:, -1]

    def take(self, places: npt.NDArray[Any]) -> TableColumns:
        """Some of the tables, in any order, also more than once."""
        return TableColumns(*(getattr(self, field.name)[places] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[TableColumns]) -> TableColumns:
        """The tables of all parts, one behind the other."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    @classmethod
    def of(cls, tables: Sequence[TableStatistics]) -> TableColumns:
        """From statistics of tables."""
        bins = np.array([table.reuse_bins for table in tables]).reshape(-1, 2, REUSE_BINS)
        return cls(
            rows=np.array([float(table.rows) for table in tables]),
            dim=np.array([float(table.dim) for table in tables]),
            batch=np.array([float(table.batch) for table in tables]),
            spread=np.array([table.counted.pooling_spread for table in tables]),
            lengths=np.array([table.lengths.quantiles for table in tables]).reshape(-1, len(QUANTILES)),
            hottest=np.array([table.hottest for table in tables], dtype=np.float64).reshape(-1, len(HOTTEST)),
            bin_rows=np.ascontiguousarray(bins[:, 0]),
            bin_lookups=np.ascontiguousarray(bins[:, 1]),
            locality=np.array([table.locality for table in tables]).reshape(-1, len(WINDOWS)),
        )


def table_statistics(
    indices: npt.NDArray[np.integer[Any]],
    offsets: npt.NDArray[np.integer[Any]],
    rows: int,
    dim: int = 1,
    table: str = "table",
) -> TableStatistics:
    """Statistics of one table's lookups; sample i looks up `indices[offsets[i]:offsets[i + 1]]`."""
    check_vectors(indices, offsets, rows, table)
    check_range(indices, rows, table)
    if not dim >= 1:  # so said that NaN is refused too
        raise InputError(f"Table {table}: its rows have {dim} elements; expected 1 or more.")
    if len(offsets) < 2:
        raise InputError(f"Table {table}: the batch is empty (offsets end at position 0); expected at least one sample.")
    bags = tally_of_offsets(offsets, table)
    tally, locality = _tally_and_locality(indices, rows)
    spectrum = of_tally(tally)
    lengths, numbers = (part.astype(object) for part in bags)  # Python's integers: squares of long bags leave int64
    lookups, squares = int((lengths * numbers).sum()), int((lengths * lengths * numbers).sum())
    return TableStatistics(
        table=table,
        dim=dim,
        counted=from_totals(rows, int(numbers.sum()), lookups, squares, spectrum.reuse_bins()[0].astype(np.int64)),
        lengths=Lengths.of(bags),
        hottest=hottest_of(tally),
        spectrum=spectrum,
        footprint=of_spectrum(spectrum, locality),
    )


def _tally_and_locality(indices: npt.NDArray[np.integer[Any]], rows: int) -> tuple[Tally, Floats]:
    """How many rows were looked up how often, and what the order of lookups does to windows on `grid`."""
    windows = grid(len(indices))
    if rows <= _DENSE_ROWS and rows <= 2 * len(indices):  # counting all rows is quicker than sorting the lookups
        counts = np.bincount(indices)
        parts = (counts[start : start + _BLOCK] for start in range(0, len(counts), _BLOCK))
        return tallied(parts), locality_of(indices, windows)
    # Half as wide words sort twice as fast.
    narrow: npt.NDArray[np.unsignedinteger[Any]] = indices.astype(np.uint32 if rows <= 1 << 32 else np.uint64)
    locality = locality_of(narrow, windows)
    narrow.sort()
    return tally_of_runs(narrow), locality


def tally_of_runs(ordered: npt.NDArray[Any]) -> Tally:
    """How many rows have how many entries in a sorted vector, without a list of the many that have few.

    Entries that equal the one k further on are as many as rows have beyond k each, so that second differences over k count
    the rows with exactly k. Those beyond the last k are runs of their own, shorter by k.
    """
    lookups = len(ordered)
    beyond = np.zeros(_SHORT + 2, dtype=np.int64)
    beyond[0] = lookups
    rest = [ordered[:0]]
    for first in range(0, lookups, _BLOCK):
        for k in range(1, _SHORT):
            beyond[k] += np.count_nonzero(_repeats(ordered, first, k))
        last = _repeats(ordered, first, _SHORT)
        number = int(np.count_nonzero(last))
        beyond[_SHORT] += number
        here = ordered[first : first + len(last)]
        rest.append(here if number == len(here) else here[last])
    counts, rows = tallied(lengths for _, lengths in runs_of(np.concatenate(rest)))
    beyond[-1] = beyond[-2] - rows.sum()
    few = beyond[:-2] - 2 * beyond[1:-1] + beyond[2:]
    result = np.flatnonzero(few)
    return np.concatenate([result + 1, counts + _SHORT]), np.concatenate([few[result], rows])


def _repeats(ordered: npt.NDArray[Any], first: int, distance: int) -> npt.NDArray[np.bool_]:
    """Of a block, which entries equal the one so far behind them."""
    end = max(first, min(first + _BLOCK, len(ordered) - distance))
    result: npt.NDArray[np.bool_] = ordered[first:end] == ordered[first + distance : end + distance]
    return result


def runs_of(ordered: npt.NDArray[Any]) -> Iterator[tuple[Integers, Integers]]:
    """Where the run of each distinct row ends (before which position) and how long it is, part by part."""
    start = 0
    for first in range(0, len(ordered), _BLOCK):
        last = min(first + _BLOCK, len(ordered))
        ends: Integers = np.flatnonzero(ordered[first + 1 : last + 1] != ordered[first : min(last, len(ordered) - 1)])
        ends += first + 1
        if last == len(ordered):
            ends = np.append(ends, last)
        if len(ends):
            lengths = np.empty_like(ends)
            lengths[0] = ends[0] - start
            np.subtract(ends[1:], ends[:-1], out=lengths[1:])
            yield ends, lengths
            start = int(ends[-1])
