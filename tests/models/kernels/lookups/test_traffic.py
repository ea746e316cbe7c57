"""What a cache misses, for many tables at once: as the footprint of each says, and never less than its distinct rows."""

from __future__ import annotations

import numpy as np
import pytest
from tests.lookups.caches import misses as misses_by_footprint

from steptime._lookups.generators import Generator
from steptime._lookups.table import TableColumns, TableStatistics, table_statistics
from steptime._models.lookups.caches import distinct, misses

_STREAMS = (
    {"kind": "uniform"},
    {"kind": "zipf", "alpha": 1.1},
    {"kind": "zipf", "alpha": 1.5, "shift": 20.0},
    {"kind": "uniform", "locality": 0.7, "window": 500},
)


def _table(values: dict[str, float | str]) -> TableStatistics:
    generator = Generator(rows=50_000, pooling=10.0, seed=7, **values)  # type: ignore[arg-type]
    bags = generator.bags(4096)
    return table_statistics(bags.indices, bags.offsets, generator.rows)


_TABLES = [_table(values) for values in _STREAMS]  # type: ignore[arg-type]
_COLUMNS = TableColumns.of(_TABLES)


@pytest.mark.parametrize("rows", [10.0, 300.0, 3000.0, 20_000.0, 1e6])
def test_misses_are_those_of_the_footprint(rows: float) -> None:
    found = misses(_COLUMNS, np.full(len(_TABLES), rows))
    expected = np.array([float(misses_by_footprint(table.footprint, rows)) for table in _TABLES])
    np.testing.assert_allclose(found / _COLUMNS.lookups, expected / _COLUMNS.lookups, atol=0.04)


def test_a_larger_cache_misses_no_more() -> None:
    sizes = np.geomspace(1, 1e6, 20)
    found = np.array([misses(_COLUMNS, np.full(len(_TABLES), rows)) for rows in sizes])
    # Order is kept an octave apart: between octaves the slope of a local stream's footprint is known to a few percent.
    slack = np.array([0.001, 0.001, 0.001, 0.06]) * _COLUMNS.lookups
    assert (np.diff(found, axis=0) <= slack).all()
    assert (found >= _COLUMNS.unique - 1e-6).all()
    assert (found <= _COLUMNS.lookups + 1e-6).all()


def test_many_small_caches_miss_more_than_one() -> None:
    rows = np.full(len(_TABLES), 2000.0)
    assert (misses(_COLUMNS, rows, 1 / 132) >= misses(_COLUMNS, rows) - 1e-6).all()


def test_a_whole_batch_holds_all_its_distinct_rows() -> None:
    np.testing.assert_allclose(distinct(_COLUMNS, np.ones(len(_TABLES))), _COLUMNS.unique, rtol=1e-6)
