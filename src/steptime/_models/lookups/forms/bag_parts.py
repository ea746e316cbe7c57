"""What the forms of one-table lookups share: their columns, and what of their traffic caches keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._lookups.columns import Floats, Places, TableColumns
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.batch import DTYPES, Flags, Lookups, Pool
from steptime._models.lookups.rows import MeasuredLookups
from steptime._models.lookups.traffic import misses
from steptime.errors import InputError

RATE = 4e3  # bytes a nanosecond, about what memory moves: scales terms, so that factors are near one
SPLIT_BYTES = 2.0**31  # output of one gather kernel: all fitted rows with more have two
SMS = 132.0
"""Of the GPU all rows were measured on, an H200."""

SECTOR = 32.0
"""Bytes that caches and memory move at a time."""

# Bytes of rows that caches keep, of the H200's 256 kB for each SM and 50 MB. Physics of embedding_bag forward fits alike (4.4 %
# of fit rows) from half the first and from 22 to 40 MB of the second.
_L1, _L2 = 200e3, 30e6
# What of the batch before stays in the L2 cache: half of a footprint of so many bytes, and how sharply. Set on fit rows of
# embedding_bag forward, warm against cold.
_KEPT, _SHARPNESS = 35e6, 4.0


@dataclass(frozen=True)
class OneTable:
    """Lookups of one table each, with the columns of that table: all [lookups]."""

    tables: TableColumns
    pool: Pool
    place: Places  # of the table among those that lookups share
    lookups: Floats
    unique: Floats
    batch: Floats
    dim: Floats
    item: Floats
    row: Floats  # bytes
    sectors: Floats  # bytes of a row as caches move it
    warm: Floats
    weighted: Floats
    half: Floats
    bfloat: Floats
    sms: Floats  # of the part of the GPU
    share: Floats
    crowded: Floats  # whether other parts use caches and memory as well
    others: Places

    @classmethod
    def of(cls, lookups: Lookups) -> OneTable:
        """Tables beside the first of a lookup are left out: these implementations have one."""
        place = lookups.member[lookups.starts[:-1]]
        pool = lookups.pool.take(place)
        tables = pool.tables
        return cls(
            tables=tables,
            pool=pool,
            place=place,
            lookups=tables.lookups,
            unique=tables.unique,
            batch=np.maximum(tables.batch, 1.0),
            dim=tables.dim,
            item=pool.item,
            row=pool.row_bytes,
            sectors=SECTOR * np.ceil(pool.row_bytes / SECTOR),
            warm=lookups.warm.astype(np.float64),
            weighted=lookups.weighted.astype(np.float64),
            half=(pool.item < 4).astype(np.float64),
            bfloat=(pool.dtype == DTYPES.index("bfloat16")).astype(np.float64),
            sms=SMS / lookups.share,
            share=lookups.share,
            crowded=((lookups.share > 1) & (lookups.others >= OTHERS.index("same"))).astype(np.float64),
            others=lookups.others,
        )

    def take(self, places: Flags | Places) -> OneTable:
        """Some of the lookups."""
        own = {name: value[places] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return OneTable(tables=self.tables.take(places), pool=self.pool.take(places), **own)

    def distinct(self) -> tuple[OneTable, Places]:
        """One lookup of each table on each kind of part, and of every lookup which of these it is: caches, weights aside."""
        keys = (self.place * 1024 + self.share.astype(np.intp)) * 2 + self.crowded.astype(np.intp)
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        return self.take(first), inverse


@dataclass(frozen=True)
class Traffic:
    """Shares of lookups that miss caches, [lookups]."""

    first: Floats  # an SM's own cache
    second: Floats  # the cache of the GPU, empty at first
    met: Floats  # the same, with what stays of the batch before where rows are warm
    footprint: Floats  # bytes of all that the kernel touches


def traffic_of(one: OneTable) -> Traffic:
    """From reuse and order of lookups. Parts in use have a share of the GPU's cache each."""
    few, inverse = one.distinct()
    capacity = _L2 / np.where(few.crowded > 0, few.share, 1.0)
    total = np.maximum(few.lookups, 1.0)
    second = misses(few.tables, capacity / few.sectors)
    first = np.maximum(misses(few.tables, _L1 / few.sectors, few.share / SMS), second)
    footprint = few.unique * few.sectors + few.batch * few.row + 16.0 * few.lookups
    stays = 1.0 / (1.0 + (footprint / (_KEPT * capacity / _L2)) ** _SHARPNESS)
    met = (second / total)[inverse] * (1.0 - one.warm * stays[inverse])
    return Traffic((first / total)[inverse], (second / total)[inverse], met, footprint[inverse])


def sizes_of(one: OneTable) -> Floats:
    """By which a lookup is inside or outside of what was fitted, [lookups, sizes]."""
    return np.column_stack([one.batch, one.dim, one.lookups + 1, one.tables.longest + 1, one.tables.rows, one.share])


def fit_rows(measured: MeasuredLookups) -> MeasuredLookups:
    """Those of the split `fit`, of which there must be some."""
    rows = measured.of("fit")
    if not len(rows):
        kind = f"{measured.lookups.implementation} {measured.lookups.direction}"
        raise InputError(f"no row of {kind} is of the split fit: nothing to fit to")
    return rows


def over(bytes_: Floats, limit: Floats | float) -> Floats:
    """What goes beyond a limit."""
    found: Floats = np.maximum(bytes_ - limit, 0.0)
    return found
