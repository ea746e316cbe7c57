"""What the forms of one-table lookups share: their columns, and what of their traffic caches keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime._lookups.table import Floats, Places, TableColumns
from steptime._models.lookups.batch import DTYPES, Flags, Lookups, Pool, Shares
from steptime._models.lookups.device import LookupConstants
from steptime._models.lookups.traffic import misses

RATE = 4e3  # bytes a nanosecond, about what memory moves: scales terms, so that factors are near one
SPLIT_BYTES = 2.0**31  # output of one gather kernel: all fitted rows with more have two
SECTOR = 32.0
"""Bytes that caches and memory move at a time."""

_SHARPNESS = 4.0  # of what stays in the cache from the batch before, over its footprint


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
    sms: Floats  # of the share of the GPU
    shares: Shares
    device: LookupConstants

    @classmethod
    def of(cls, lookups: Lookups, device: LookupConstants) -> OneTable:
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
            sms=device.sms / lookups.share,
            shares=lookups.shares,
            device=device,
        )

    def take(self, places: Flags | Places) -> OneTable:
        """Some of the lookups."""
        columns: dict[str, Any] = {name: value[places] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        columns |= {name: getattr(self, name).take(places) for name in ("tables", "pool", "shares")}
        return OneTable(**columns, device=self.device)

    def distinct(self) -> tuple[OneTable, Places]:
        """One lookup of each table on each kind of share, and of every lookup which of these it is: caches, weights aside."""
        keys = (self.place * 1024 + self.shares.count.astype(np.intp)) * 2 + self.shares.crowded.astype(np.intp)
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
    """From reuse and order of lookups. Shares in use have their part of the GPU's cache each."""
    few, inverse = one.distinct()
    device, share = one.device, few.shares.count
    capacity = device.l2_kept_bytes / np.where(few.shares.crowded > 0, share, 1.0)
    total = np.maximum(few.lookups, 1.0)
    second = misses(few.tables, capacity / few.sectors)
    first = np.maximum(misses(few.tables, device.l1_kept_bytes / few.sectors, share / device.sms), second)
    footprint = few.unique * few.sectors + few.batch * few.row + 16.0 * few.lookups
    stays = 1.0 / (1.0 + (footprint / (device.warm_kept_bytes * capacity / device.l2_kept_bytes)) ** _SHARPNESS)
    met = (second / total)[inverse] * (1.0 - one.warm * stays[inverse])
    return Traffic((first / total)[inverse], (second / total)[inverse], met, footprint[inverse])


def sizes_of(one: OneTable) -> Floats:
    """By which a lookup is inside or outside of what was fitted, [lookups, sizes]."""
    return np.column_stack([one.batch, one.dim, one.lookups + 1, one.tables.longest + 1, one.tables.rows, one.shares.count])


def over(bytes_: Floats, limit: Floats | float) -> Floats:
    """What goes beyond a limit."""
    result: Floats = np.maximum(bytes_ - limit, 0.0)
    return result
