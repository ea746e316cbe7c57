"""What caches keep of lookups: constants of the device that rows were measured on, and misses from reuse and order of lookups.

A cache that keeps the last C rows holds what a window with C distinct rows holds (`steptime._lookups.spectrum`); here for many
tables at once, on the bins that `TableColumns` keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._lookups.table import WINDOWS, Floats, TableColumns
from steptime._models.engine.constants import reference_constants

FORM = "lookups"
_STEPS = 26


@dataclass(frozen=True)
class LookupConstants:
    """SMs, what memory moves in a nanosecond, and bytes that caches keep of what lookups touch."""

    sms: float
    l2_bytes: float
    peak_bytes_per_ns: float
    l1_kept_bytes: float  # of rows, by the cache of an SM
    l2_kept_bytes: float  # of rows and gradients, from one access to the next
    warm_kept_bytes: float  # half of a footprint of so many is there when the same rows are looked up again
    gradient_kept_bytes: float  # of one table's gradient, beside everything else
    summed_kept_bytes: float  # half of gradients of so many is there when they are summed row by row
    scattered_kept_bytes: float  # half of what a dense gradient's kernel before touched is there for its last sums
    near_ns: float  # of a step of such a sum whose segments are in the cache
    far_ns: float  # of one whose segments are not


def reference_lookups() -> LookupConstants:
    """Those of the reference device: files from before constants were kept in them are of it."""
    constants: LookupConstants = reference_constants(FORM, LookupConstants)
    return constants


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
    each = np.arange(len(windows))
    result: Floats = tables.locality[each, low] * (1 - part) + tables.locality[each, low + 1] * part
    return result


def misses(tables: TableColumns, capacity_rows: Floats, share: Floats | float = 1.0) -> Floats:
    """Lookups that miss, over all of 1 / share equal streams, each with an empty cache of its own of so many rows, [tables]."""
    lookups = tables.lookups
    stream = np.broadcast_to(np.asarray(share, dtype=np.float64), lookups.shape)
    low, high = np.full(len(lookups), -20.0), np.zeros(len(lookups))
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
