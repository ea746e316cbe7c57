"""What a cache misses, by footprint, against a cache that is played."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from tests.lookups.caches import hit_rate, misses

from steptime._lookups.generators import Generator
from steptime._lookups.spectrum import Footprint, grid, locality_of
from steptime._lookups.table import TableStatistics, table_statistics

STREAMS = [
    Generator(rows=2_000, pooling=10),
    Generator(rows=100_000, pooling=10, kind="zipf", alpha=1.1),
    Generator(rows=100_000, pooling=10, kind="zipf", alpha=1.1, locality=0.5, window=300),
    Generator(rows=50_000, pooling=10, kind="power", alpha=5.0, locality=0.8, window=2000),
    Generator(rows=1 << 30, pooling=10, locality=0.7, window=500),
]


def of(stream: Generator) -> tuple[list[int], TableStatistics]:
    bags = stream.bags(2000)
    return bags.indices.tolist(), table_statistics(bags.indices, bags.offsets, stream.rows)


def played(rows: list[int], capacity: int, *, warm: bool) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for _ in range(2 if warm else 1):
        misses = 0
        for row in rows:
            if row in cache:
                cache.move_to_end(row)
                continue
            misses += 1
            cache[row] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return misses


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("warm", [False, True])
def test_hit_rates_are_those_of_a_cache_that_is_played(stream: Generator, warm: bool) -> None:
    rows, found = of(stream)
    for capacity in (10, 100, 1000, 50_000):
        expected = 1 - played(rows, capacity, warm=warm) / len(rows)
        assert float(hit_rate(found.footprint, capacity, warm=warm)) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("stream", STREAMS)
def test_windows_hold_as_many_distinct_rows_as_are_counted(stream: Generator) -> None:
    rows, found = of(stream)
    for window in (30, 400, 5000):
        starts = range(0, len(rows) - window, max(1, (len(rows) - window) // 50))
        counted = np.mean([len(set(rows[start : start + window])) for start in starts])
        assert float(found.footprint.distinct(window)) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_larger_cache_never_misses_more_and_a_cold_one_never_less(stream: Generator) -> None:
    footprint = of(stream)[1].footprint
    caches = np.geomspace(1, 2 * footprint.unique, 200)
    cold, warm = misses(footprint, caches), misses(footprint, caches, warm=True)
    assert (np.diff(cold) <= 0.005 * footprint.lookups).all()
    assert (cold >= footprint.unique * (1 - 1e-6)).all() and (cold <= footprint.lookups).all()
    assert (warm <= cold + 1e-6).all()
    assert cold[-1] == pytest.approx(footprint.unique) and warm[-1] == 0


def test_a_cache_of_less_than_a_row_holds_nothing() -> None:
    footprint = of(STREAMS[1])[1].footprint
    assert float(hit_rate(footprint, 0.5)) == 0


def test_the_grid_goes_from_one_lookup_to_all() -> None:
    for lookups in (1, 2, 3, 1000, 2**20, 123_457):
        windows = grid(lookups)
        assert windows[0] == 1 and windows[-1] == lookups and (np.diff(windows) > 0).all()
    assert len(grid(0)) == 0 and len(grid(30_000_000)) < 100


def test_a_sample_of_rows_tells_the_locality_of_all() -> None:
    # 1.2 million lookups: less than a fourth of the rows is looked at.
    stream = Generator(rows=1 << 30, pooling=60, locality=0.7, window=1000)
    rows = stream.bags(20_000).indices
    windows = np.array([100.0, 1000.0, 10_000.0])
    starts = np.linspace(0, len(rows) - 10_000, 20).astype(int)
    found = locality_of(rows, windows)
    for window, ratio in zip(windows.astype(int).tolist(), found.tolist(), strict=True):
        counted = np.mean([len(np.unique(rows[start : start + window])) for start in starts])
        assert ratio * window == pytest.approx(counted, rel=0.03)


def test_one_row_looked_up_for_ever_is_found_at_once() -> None:
    found = table_statistics(np.zeros(1000, dtype=np.int64), np.array([0, 1000]), 10)
    assert float(misses(found.footprint, 1.0)) == 1
    assert found.footprint == Footprint(found.footprint.windows, (1.0,) * len(found.footprint.windows))
