"""`TableColumns`: what models read of many tables' statistics, a column for each quantity and a row for each table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.footprint import Footprint
from steptime._lookups.lengths import QUANTILES
from steptime._lookups.spectrum import HOTTEST, Spectrum
from steptime._lookups.statistics import REUSE_BINS, REUSE_EDGES
from steptime._lookups.table import TableStatistics

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

WINDOWS = 2.0 ** np.arange(25)
"""Lookups in the windows at which the order of lookups is kept, an octave apart."""


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

    @property
    def lookups(self) -> Floats:
        """Of the batch: whole numbers, so that no noise of their sum begins another chunk of them."""
        return np.rint(self.bin_lookups.sum(axis=1))

    @property
    def unique(self) -> Floats:
        """Distinct rows looked up."""
        total: Floats = self.bin_rows.sum(axis=1)
        return total

    @property
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
        bins = np.zeros((2, len(tables), REUSE_BINS))
        locality = np.ones((len(tables), len(WINDOWS)))
        for index, table in enumerate(tables):
            bins[:, index] = _binned(table.spectrum)
            locality[index] = _locality(table.spectrum, table.footprint)
        return cls(
            rows=np.array([float(table.rows) for table in tables]),
            dim=np.array([float(table.dim) for table in tables]),
            batch=np.array([float(table.batch) for table in tables]),
            spread=np.array([table.counted.pooling_spread for table in tables]),
            lengths=np.array([table.lengths.quantiles for table in tables]).reshape(-1, len(QUANTILES)),
            hottest=np.array([table.hottest for table in tables], dtype=np.float64).reshape(-1, len(HOTTEST)),
            bin_rows=bins[0],
            bin_lookups=bins[1],
            locality=locality,
        )


def _binned(spectrum: Spectrum) -> Floats:
    """Distinct rows and lookups in each bin of the reuse histogram, [2, 17]."""
    places = np.searchsorted(np.array(REUSE_EDGES) * (1 + 1e-9), spectrum.counts)
    both = (spectrum.rows, spectrum.lookups)
    return np.array([np.bincount(places, weights=what, minlength=REUSE_BINS) for what in both], dtype=np.float64)


def _locality(spectrum: Spectrum, footprint: Footprint) -> Floats:
    if not spectrum.rows:
        return np.ones(len(WINDOWS))
    inside = np.minimum(WINDOWS, footprint.lookups)
    result: Floats = np.clip(footprint.distinct(inside) / np.maximum(spectrum.in_random_order(inside), 1e-9), 0.0, 1.0)
    return result
