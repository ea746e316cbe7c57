"""What lookups have to move, on a device with a cache of some size: rows that miss it, rows that do not, and results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steptime._lookups.columns import Floats, TableColumns
from steptime._lookups.table import TableStatistics
from steptime._models.lookups.question import EMBEDDING_BAG, FORWARD, ITEM_BYTES, TABLE_BATCHED, Lookup
from steptime._models.lookups.traffic import misses
from steptime._platforms.analytic.work import Work

_INDEX_BYTES = 8
# Of a cache, what rows have beside indices and results: as bytes of measured steps stay in 30 of an H200's 50 MB.
_KEPT = 0.6
# Of a row of an optimiser's state, in rows; a rowwise one is a number.
_STATE = {"none": 0.0, "sgd": 0.0, "adagrad": 1.0, "rowwise_adagrad": 0.0}
_POOLED = (TABLE_BATCHED, EMBEDDING_BAG, "embedding_bag_dense")


def lookup_works(lookups: Sequence[Lookup], cache_bytes: float) -> list[Work]:
    """Bytes from memory and from the cache, of each; the tables of a lookup have equal shares of the cache."""
    places: dict[tuple[int, str, int], int] = {}
    tables: list[TableStatistics] = []
    for lookup in lookups:
        for table in lookup.tables:
            if places.setdefault((id(table), lookup.dtype, len(lookup.tables)), len(tables)) == len(tables):
                tables.append(table)
    if not tables:
        return []
    columns = TableColumns.of(tables)
    row_bytes = columns.dim * np.array([float(ITEM_BYTES[dtype]) for _, dtype, _ in places])
    together = np.array([float(count) for _, _, count in places])
    missed = misses(columns, _KEPT * cache_bytes / together / np.maximum(row_bytes, 1.0))
    results = []
    for lookup in lookups:
        own = np.array([places[id(table), lookup.dtype, len(lookup.tables)] for table in lookup.tables])
        results.append(_work(lookup, columns.take(own), row_bytes[own], missed[own]))
    return results


def _work(lookup: Lookup, tables: TableColumns, row_bytes: Floats, missed: Floats) -> Work:
    looked_up = float(tables.lookups @ row_bytes)
    results = float(row_bytes @ (tables.batch if lookup.implementation in _POOLED else tables.lookups))
    indices = float(_INDEX_BYTES * tables.lookups.sum())
    if lookup.direction == FORWARD:
        read = float(missed @ row_bytes)
        return Work(memory_bytes=read + results + indices, cache_bytes=max(looked_up - read, 0.0))
    # Gradients are read for every lookup, mostly from the cache; every distinct row is read and written, its state too.
    updated = 2.0 * (1.0 + _STATE[lookup.optimizer]) * float(tables.unique @ row_bytes)
    return Work(memory_bytes=results + indices + updated, cache_bytes=max(looked_up - results, 0.0))
