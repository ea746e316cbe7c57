"""Trees on sizes: rows, dim, pooling, batch and tables, without anything that says which rows are looked up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.table import Floats
from steptime._models.engine.stored import Arrays, pack, unpack
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.correction import Correction
from steptime._models.lookups.forms import LookupTimes
from steptime_lab.baselines.lookups.conditions import Seen, told
from steptime_lab.fit.engine.correction import fit_correction
from steptime_lab.measurements.lookups import MeasuredLookups


@dataclass(frozen=True)
class SizeOnly:
    """Trees of ln(time)."""

    trees: Correction
    seen: Seen

    def times(self, lookups: Lookups) -> LookupTimes:
        """The whole lookup as one part."""
        return self.seen.times(lookups, self.trees.factors(_features(lookups)))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        return pack(self)


def fit(measured: MeasuredLookups, seed: int) -> SizeOnly:
    """As many trees as the models' corrections have."""
    rows = measured.of("fit")
    trees = fit_correction(_features(rows.lookups), np.ones(len(rows)), rows.time_ns, seed)
    return SizeOnly(trees, Seen.of(rows))


def load(arrays: Arrays) -> SizeOnly:
    """The form that `arrays` were taken from."""
    return unpack(SizeOnly, arrays)


def _features(lookups: Lookups) -> Floats:
    """Sums, means and extremes over tables."""
    pool = lookups.pool
    tables = pool.tables
    moved = tables.lookups * pool.row_bytes
    sums = lookups.sums(np.column_stack([tables.lookups, moved, tables.rows * pool.row_bytes, tables.dim, tables.rows]))
    most = lookups.maxima(np.column_stack([tables.batch, tables.pooling, tables.dim, tables.rows, moved]))
    least = -lookups.maxima(-np.column_stack([tables.pooling, tables.dim, tables.rows]))
    means = lookups.sums(np.column_stack([tables.pooling, np.log(tables.rows), tables.pooling * moved])) / np.column_stack(
        [lookups.counts, lookups.counts, np.maximum(sums[:, 1], 1e-9)]
    )
    return np.column_stack([sums, most, least, means, lookups.counts, lookups.dtype, told(lookups)])
