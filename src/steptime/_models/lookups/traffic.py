"""What lookups find in a cache, from rows and lookups by reuse bin and from the order they come in.

A cache that keeps the last C rows holds what a window with C distinct rows holds (`steptime._lookups.spectrum`); here for many
tables at once, on the bins that `TableColumns` keep.
"""

from __future__ import annotations

import numpy as np

from steptime._lookups.table import WINDOWS, Floats, TableColumns

_STEPS = 26


def distinct(tables: TableColumns, share: Floats) -> Floats:
    """Distinct rows in windows of so large a share of each table's lookups, [tables]."""
    lookups = np.maximum(tables.lookups, 1.0)
    inside = np.clip(share, 0.0, 1.0 - 1e-12)[:, None]
    counts = tables.bin_lookups / np.maximum(tables.bin_rows, 1e-9)
    random = (tables.bin_rows * -np.expm1(counts * np.log1p(-inside))).sum(axis=1)
    result: Floats = random * _locality(tables, share * lookups)
    return result


def _locality(tables: TableColumns, windows: Floats) -> Floats:
    """What the order of lookups does to windows of so many, [tables]. The last of a table's windows is its whole batch."""
    last = np.clip(np.log2(np.maximum(tables.lookups, 2.0)), 1.0, len(WINDOWS) - 1.001)
    at = np.minimum(np.log2(np.maximum(windows, 1.0)), last)
    low = np.minimum(at, np.ceil(last) - 1).astype(np.intp)
    part = (at - low) / np.minimum(1.0, last - low)
    each = np.arange(len(tables))
    result: Floats = tables.locality[each, low] * (1 - part) + tables.locality[each, low + 1] * part
    return result


def misses(tables: TableColumns, capacity_rows: Floats, share: Floats | float = 1.0) -> Floats:
    """Lookups that miss, over all of 1 / share equal streams, each with an empty cache of its own of so many rows, [tables]."""
    lookups = tables.lookups
    stream = np.broadcast_to(np.asarray(share, dtype=np.float64), lookups.shape)
    low, high = np.full(len(tables), -20.0), np.zeros(len(tables))
    for _ in range(_STEPS):  # ln of the share of lookups after which the cache is full
        middle = (low + high) / 2
        over = distinct(tables, np.exp(middle)) > capacity_rows
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    window = np.minimum(np.exp(low), stream)
    first = distinct(tables, stream) / stream
    # Distinct rows gained per lookup once the cache is full.
    step = 0.05 * window
    gained = (distinct(tables, np.minimum(window + step, 1.0)) - distinct(tables, window - step)) / np.maximum(
        (np.minimum(window + step, 1.0) - (window - step)) * lookups, 1e-9
    )
    full = np.maximum(first, distinct(tables, window) / stream + (1 - window / stream) * np.clip(gained, 0.0, 1.0) * lookups)
    result: Floats = np.where(window < stream, np.minimum(lookups, full), np.minimum(first, lookups))
    return np.maximum(result, np.minimum(tables.unique, lookups))
