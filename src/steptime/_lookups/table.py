"""`TableStatistics`: all that is kept of one table's lookups in a batch, and the one pass over the indices that counts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups import lengths as bag_lengths
from steptime._lookups.footprint import Footprint, grid, locality_of, of_spectrum
from steptime._lookups.lengths import Lengths
from steptime._lookups.spectrum import Floats, Integers, Spectrum, Tally, hottest_of, of_tally, tallied
from steptime._lookups.statistics import Statistics, check_range, check_vectors, from_totals
from steptime.errors import InputError

_DENSE_ROWS = 1 << 20
"""Up to so many rows an array of their counts is near enough to a core that counting beats sorting."""

_SHORT = 6
"""Rows with up to so many lookups are counted without listing them."""

_BLOCK = 1 << 16
"""Entries that are looked at at a time: a core's cache holds them."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table by name and size."""

    name: str
    rows: int
    dim: int

    def __post_init__(self) -> None:
        if not self.dim >= 1:  # so said that NaN is refused too
            raise InputError(f"Table {self.name}: its rows have {self.dim} elements; expected 1 or more.")


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """One table of so many rows and elements per row, looked up by a batch."""

    table: str
    dim: int
    counted: Statistics  # totals and the 17-bin reuse histogram
    lengths: Lengths
    hottest: tuple[int, ...]  # lookups of the rows in the places `spectrum.HOTTEST`; 0 where there are fewer rows
    spectrum: Spectrum
    footprint: Footprint

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
    if len(offsets) < 2:
        raise InputError(f"Table {table}: the batch is empty (offsets end at position 0); expected at least one sample.")
    bags = bag_lengths.tally_of(offsets, table)
    tally, locality = tally_and_locality(indices, rows)
    return of_tallies(Table(table, rows, dim), tally, bags, locality)


def tally_and_locality(indices: npt.NDArray[np.integer[Any]], rows: int) -> tuple[Tally, Floats]:
    """How many rows were looked up how often, and what the order of lookups does to windows on `grid`."""
    windows = grid(len(indices))
    if is_dense(indices, rows):
        return tallied(blocks(np.bincount(indices))), locality_of(indices, windows)
    narrow = narrowed(indices, rows)
    locality = locality_of(narrow, windows)
    narrow.sort()
    return tally_of_runs(narrow), locality


def is_dense(indices: npt.NDArray[np.integer[Any]], rows: int) -> bool:
    """Whether an array of all rows' counts is quicker than sorting the lookups."""
    return rows <= _DENSE_ROWS and rows <= 2 * len(indices)


def narrowed(indices: npt.NDArray[np.integer[Any]], rows: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """A copy in words as narrow as the rows allow: half as wide ones sort twice as fast."""
    return indices.astype(np.uint32 if rows <= 1 << 32 else np.uint64)


def of_tallies(table: Table, tally: Tally, bags: Tally, locality: Floats) -> TableStatistics:
    """Statistics from how many rows were looked up how often, how many bags are how long, and what order does to windows."""
    spectrum = of_tally(tally)
    lengths, numbers = (part.astype(object) for part in bags)  # Python's integers: squares of long bags leave int64
    lookups, squares = int((lengths * numbers).sum()), int((lengths * lengths * numbers).sum())
    return TableStatistics(
        table=table.name,
        dim=table.dim,
        counted=from_totals(table.rows, int(numbers.sum()), lookups, squares, spectrum.reuse_rows().astype(np.int64)),
        lengths=bag_lengths.of_tally(bags),
        hottest=hottest_of(tally),
        spectrum=spectrum,
        footprint=of_spectrum(spectrum, locality),
    )


def blocks(counts: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """A long vector in parts."""
    yield from (counts[start : start + _BLOCK] for start in range(0, len(counts), _BLOCK))


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
