"""What a cache of so many rows misses, by the footprint of what is looked up: least recently used rows leave first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime._lookups.spectrum import Footprint
from steptime._lookups.statistics import Floats


def misses(footprint: Footprint, cache_rows: npt.ArrayLike, *, warm: bool = False) -> Floats:
    """Lookups of the batch that do not find their row.

    Cold: the cache is empty at first, and every row misses once. Warm: the same batch ran before.
    """
    capacity = np.asarray(cache_rows, dtype=np.float64)
    if not footprint.windows:
        return np.zeros_like(capacity)
    logs, log_rows = np.log(footprint.windows), np.log(footprint.rows)
    # Where two windows hold as many rows, the longer one counts.
    kept = np.append(np.diff(log_rows) > 1e-12, True)
    inside = np.clip(capacity, 1.0, footprint.unique)
    at = np.interp(np.log(inside), log_rows[kept], logs[kept])
    window = np.exp(at)
    gained = np.interp(at, logs, _gains(footprint))  # distinct rows per further lookup
    missed = gained * footprint.lookups
    if not warm:
        missed = np.maximum(inside + (footprint.lookups - window) * gained, footprint.unique)
    enough = capacity >= footprint.unique
    result = np.where(enough, 0.0 if warm else footprint.unique, np.minimum(missed, footprint.lookups))
    return np.where(capacity < 1.0, footprint.lookups, result)


def hit_rate(footprint: Footprint, cache_rows: npt.ArrayLike, *, warm: bool = False) -> Floats:
    """Share of the batch's lookups that find their row."""
    return 1.0 - misses(footprint, cache_rows, warm=warm) / footprint.lookups


def _gains(footprint: Footprint) -> Floats:
    windows, rows = np.array(footprint.windows), np.array(footprint.rows)
    if len(windows) < 2:
        return np.ones(len(windows))
    gains: Floats = np.clip(np.gradient(rows, windows), 0.0, 1.0)
    return gains
