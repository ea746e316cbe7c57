"""`Stream`: statistics of lookups that come in chunks, all of which together may be too many for memory.

What is kept is one counter per row of the table (4 bytes, 8 for small tables and after 2^32 lookups), not the lookups. All
chunks are one batch; `scaling` says what a batch of a training step has of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError
from steptime.lookups import lengths as bag_lengths
from steptime.lookups.footprint import Footprint, grid, locality_of, of_spectrum
from steptime.lookups.spectrum import Floats, Tally, of_tally, tallied
from steptime.lookups.statistics import check_range, check_vectors
from steptime.lookups.table import Table, TableStatistics, blocks, is_dense, narrowed, of_tallies, runs_of

_WIDE_ROWS = 1 << 24


class Stream:
    """Counts the lookups of one table, chunk by chunk."""

    def __init__(self, rows: int, dim: int = 1, table: str = "table") -> None:
        if rows < 1:
            raise InputError(f"Table {table}: it has {rows} rows; expected 1 or more.")
        self._table = Table(table, rows, dim)
        self._counts: npt.NDArray[Any] = np.zeros(rows, dtype=np.int64 if rows <= _WIDE_ROWS else np.uint32)
        self._bags: dict[int, int] = {}
        self._samples, self._lookups, self._unique = 0, 0, 0
        self._windows: list[tuple[int, Footprint]] = []  # of every chunk
        self._seen: list[tuple[int, int]] = []  # lookups and distinct rows after every chunk

    def add(self, indices: npt.NDArray[np.integer[Any]], offsets: npt.NDArray[np.integer[Any]]) -> None:
        """The next samples; sample i of these looks up `indices[offsets[i]:offsets[i + 1]]`."""
        name, rows = self._table.name, self._table.rows
        check_vectors(indices, offsets, rows, name)
        check_range(indices, rows, name, self._lookups)
        lengths, numbers = bag_lengths.tally_of(offsets, name)
        for length, bags in zip(lengths.tolist(), numbers.tolist(), strict=True):
            self._bags[length] = self._bags.get(length, 0) + bags
        self._samples += len(offsets) - 1
        if not len(indices):
            return
        if self._lookups + len(indices) >= 1 << 32:
            self._counts = self._counts.astype(np.int64, copy=False)
        locality = locality_of(indices, grid(len(indices)))
        chunk = of_tally(tallied(self._count(indices)))
        self._lookups += len(indices)
        self._windows.append((len(indices), of_spectrum(chunk, locality)))
        self._seen.append((self._lookups, self._unique))

    def _count(self, indices: npt.NDArray[np.integer[Any]]) -> Iterator[npt.NDArray[np.int64]]:
        """Adds to the counters of rows, and gives what it added, part by part."""
        if is_dense(indices, self._table.rows):
            counts = np.bincount(indices)
            self._unique += int(np.count_nonzero((self._counts[: len(counts)] == 0) & (counts > 0)))
            self._counts[: len(counts)] += counts
            yield from blocks(counts)
            return
        ordered = narrowed(indices, self._table.rows)
        ordered.sort()
        for ends, counts in runs_of(ordered):
            rows = ordered[ends - 1]
            before = self._counts[rows]
            self._unique += len(rows) - int(np.count_nonzero(before))
            self._counts[rows] = before + counts.astype(before.dtype)
            yield counts

    def statistics(self) -> TableStatistics:
        """Of all chunks as one batch."""
        if not self._samples:
            raise InputError(f"Table {self._table.name}: the stream is empty (no sample was added); expected at least one.")
        tally = tallied(part.astype(np.int64) for part in blocks(self._counts))
        lengths = np.array(sorted(self._bags), dtype=np.int64)
        bags: Tally = lengths, np.array([self._bags[length] for length in lengths.tolist()], dtype=np.int64)
        return of_tallies(self._table, tally, bags, self._locality(tally))

    def _locality(self, tally: Tally) -> Floats:
        """Windows up to a chunk's length are averaged over chunks; those of several chunks are what the stream began with."""
        windows = grid(self._lookups)
        random_order = of_tally(tally).in_random_order(windows)
        longest = max((lookups for lookups, _ in self._windows), default=0)
        lookups_seen, rows_seen = np.array([(1, 1), *self._seen], dtype=np.float64).T
        found = np.asarray(np.interp(windows, lookups_seen, rows_seen))
        within = windows <= longest
        rows, weights = np.zeros(int(within.sum())), np.zeros(int(within.sum()))
        for lookups, footprint in self._windows:
            held = lookups * (windows[within] <= lookups)
            rows += held * footprint.distinct(windows[within])
            weights += held
        found[within] = rows / np.maximum(weights, 1)
        ratio: Floats = np.clip(found / np.maximum(random_order, 1e-9), 0.0, 1.0)
        return ratio
