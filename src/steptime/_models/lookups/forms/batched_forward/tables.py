"""What a table adds to a table-batched forward launch, before any constant is known."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.table import Floats, TableColumns
from steptime._models.lookups.batch import Pool
from steptime._models.lookups.device import LookupConstants
from steptime._models.lookups.forms.batched_forward.programs import Programs
from steptime._models.lookups.traffic import misses

_LINE, _SECTOR = 128.0, 32.0
_INDEX_BYTES, _OUT_BYTES = 8.0, 4.0
# Locality is read at windows of 2^14 lookups: about what runs on the GPU at once.
_WINDOW = 14


@dataclass(frozen=True)
class ForwardTables:
    """Of each table of a pool, [tables]."""

    programs: Programs
    lookups: Floats
    dim: Floats
    batch: Floats
    half: Floats  # 1 where elements have two bytes
    row_bytes: Floats
    sector_bytes: Floats  # of a row
    bytes: Floats  # of the table
    l1_missed: Floats  # share of lookups
    l2_missed: Floats  # share of lookups, the first ones of rows included
    single: Floats  # share of lookups that are the only ones of their row
    footprint: Floats  # bytes of cache lines that are touched
    fixed: Floats  # 1 where all bags are equally long
    index_sectors: Floats  # that four indices of a bag lie in
    out: Floats  # bytes of the output
    local: Floats  # distinct rows at once, over those of a random order
    device: LookupConstants

    @classmethod
    def of(cls, pool: Pool, device: LookupConstants) -> ForwardTables:
        """From a pool's statistics."""
        tables, row = pool.tables, pool.row_bytes
        lookups, unique = tables.lookups, tables.unique
        each = np.maximum(lookups, 1.0)
        sectors = np.ceil(row / _SECTOR) * _SECTOR
        footprint = _lines(tables, row)
        return cls(
            programs=Programs.of(tables),
            lookups=lookups,
            dim=tables.dim,
            batch=tables.batch,
            half=(pool.item < _OUT_BYTES).astype(np.float64),
            row_bytes=row,
            sector_bytes=sectors,
            bytes=tables.rows * row,
            l1_missed=misses(tables, device.l1_kept_bytes / sectors, 1 / device.sms) / each,
            l2_missed=misses(tables, device.l2_kept_bytes * np.maximum(unique, 1.0) / np.maximum(footprint, 1.0)) / each,
            single=tables.bin_rows[:, 0] / each,
            footprint=footprint + _INDEX_BYTES * lookups + _OUT_BYTES * tables.batch * tables.dim,
            fixed=_fixed(tables).astype(np.float64),
            index_sectors=_index_sectors(tables),
            out=_OUT_BYTES * tables.batch * tables.dim,
            local=tables.locality[:, _WINDOW],
            device=device,
        )

    def take(self, places: npt.NDArray[Any]) -> ForwardTables:
        """Some of the tables."""
        programs = Programs(*(getattr(self.programs, column.name)[places] for column in fields(Programs)))
        columns = {name: value[places] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return ForwardTables(programs=programs, device=self.device, **columns)

    @property
    def index_bytes(self) -> Floats:
        """Of the indices."""
        return _INDEX_BYTES * self.lookups


def _lines(tables: TableColumns, row: Floats) -> Floats:
    """Bytes of cache lines that the rows touch: short rows share lines with others, which are looked up or not."""
    shared = np.maximum(_LINE / row, 1.0)
    density = np.clip(tables.unique / np.maximum(tables.rows, 1.0), 0.0, 1.0 - 1e-12)
    short = np.maximum(tables.rows, 1.0) / shared * -np.expm1(shared * np.log1p(-density)) * _LINE
    long = tables.unique * (np.ceil(row / _SECTOR) * _SECTOR + np.where(row % _LINE > 0, _SECTOR, 0.0))
    return np.where(row < _LINE, np.minimum(short, tables.unique * _LINE), long)


def _fixed(tables: TableColumns) -> npt.NDArray[np.bool_]:
    fixed: npt.NDArray[np.bool_] = (tables.spread < 1e-3) & (tables.lookups > 0)
    return fixed


def _index_sectors(tables: TableColumns) -> Floats:
    """A sector has four indices. Bags of a fixed length that four divides begin with a sector, others anywhere."""
    rest = np.rint(tables.pooling) % 4
    result: Floats = np.where(_fixed(tables), np.select([rest == 0, rest == 2], [1.0, 1.5], 1.75), 1.75)
    return result
