"""Batches of other sizes, and statistics that nothing was drawn for, against batches that were drawn."""

from __future__ import annotations

import numpy as np
import pytest
from tests.lookups.caches import hit_rate
from tests.lookups.expected_reuse import expected_reuse

from steptime._lookups.estimated import draws_in, expected_statistics, scaled
from steptime._lookups.generators import Generator
from steptime._lookups.statistics import Lengths
from steptime._lookups.table import TableStatistics, table_statistics
from steptime.errors import InputError

INDEPENDENT = [
    Generator(rows=50_000, pooling=20),
    Generator(rows=200_000, pooling=20, kind="zipf", alpha=1.1),
    Generator(rows=2_000_000, pooling=20, kind="zipf", alpha=0.8, shift=50.0),
]
LOCAL = [
    Generator(rows=200_000, pooling=20, kind="zipf", alpha=1.1, locality=0.5, window=300),
    Generator(rows=1 << 30, pooling=20, locality=0.7, window=200),
]


def of(stream: Generator, batch: int) -> TableStatistics:
    bags = stream.bags(batch)
    return table_statistics(bags.indices, bags.offsets, stream.rows, 32, "users")


@pytest.mark.parametrize("stream", [*INDEPENDENT, *LOCAL])
@pytest.mark.parametrize("batch", [256, 1024])
def test_a_smaller_batch_has_the_rows_of_its_window(stream: Generator, batch: int) -> None:
    found, drawn = scaled(of(stream, 4096), batch), of(stream, batch)
    assert (found.batch, found.lookups, found.longest) == (batch, drawn.lookups, drawn.longest)
    assert found.unique == pytest.approx(drawn.unique, rel=0.03)
    caches = drawn.unique * np.array([0.03, 0.1, 0.3])
    np.testing.assert_allclose(hit_rate(found.footprint, caches), hit_rate(drawn.footprint, caches), atol=0.03)
    np.testing.assert_allclose(found.counted.reuse, drawn.counted.reuse, atol=0.08)
    assert found.hottest[0] == pytest.approx(drawn.hottest[0], rel=0.15, abs=2)


@pytest.mark.parametrize("stream", [*INDEPENDENT, *LOCAL])
def test_a_batch_four_times_as_large_is_foretold(stream: Generator) -> None:
    found, drawn = scaled(of(stream, 4096), 16384), of(stream, 16384)
    assert found.lookups == drawn.lookups
    assert found.unique == pytest.approx(drawn.unique, rel=0.05)
    assert found.footprint.unique == pytest.approx(found.unique, abs=1)
    np.testing.assert_allclose(found.counted.reuse, drawn.counted.reuse, atol=0.06)
    assert found.hottest[0] == pytest.approx(drawn.hottest[0], rel=0.1, abs=25)


@pytest.mark.parametrize("batch", [1, 100, 4000, 5000, 100_000])
def test_scaled_statistics_stay_possible(batch: int) -> None:
    for stream in (INDEPENDENT[1], LOCAL[0]):
        found = scaled(of(stream, 4096), batch)
        assert 0 < found.unique <= min(found.lookups, found.rows)
        assert sum(found.counted.reuse) == pytest.approx(1.0)
        assert found.spectrum.total == pytest.approx(found.lookups) and found.spectrum.unique == pytest.approx(
            found.unique, abs=1
        )
        assert list(found.hottest) == sorted(found.hottest, reverse=True)
        assert found.footprint.lookups == found.lookups


def test_the_same_batch_is_left_alone_and_no_batch_is_refused() -> None:
    found = of(INDEPENDENT[0], 128)
    assert scaled(found, 128) is found
    with pytest.raises(InputError, match="Table users: batch is 0"):
        scaled(found, 0)


def test_a_table_without_lookups_stays_without() -> None:
    found = scaled(of(Generator(rows=10, pooling=0.0), 64), 1024)
    assert (found.batch, found.lookups, found.unique, found.counted.reuse) == (1024, 0, 0, (0.0,) * 17)


def test_larger_batches_have_longer_bags_and_equal_bags_stay_equal() -> None:
    exponential = Lengths(
        (*np.round(-10 * np.log(1 - np.array([*(k / 16 for k in range(1, 16)), 0.98, 0.995]))).tolist(), 83.0)
    )
    # 10 times as many bags of exponential length: the longest grows by 10 * ln(10).
    assert exponential.of_batch(4096, 40_960).longest == pytest.approx(83 + 23, abs=3)
    assert exponential.of_batch(4096, 512).longest == pytest.approx(83 - 21, abs=4)
    assert exponential.of_batch(4096, 4).longest <= 20
    equal = Lengths((7.0,) * 18)
    assert equal.of_batch(100, 100_000) == equal.of_batch(100, 1) == equal


@pytest.mark.parametrize(
    "stream", [*INDEPENDENT, *LOCAL, Generator(rows=900, pooling=4, lengths="geometric", kind="hot", shift=3.0)]
)
def test_a_skew_gives_the_statistics_that_are_drawn(stream: Generator) -> None:
    found, drawn = expected_statistics(stream, 4096, 32, "users"), of(stream, 4096)
    assert (found.table, found.dim, found.rows, found.lookups) == ("users", 32, drawn.rows, drawn.lookups)
    assert found.lengths == drawn.lengths
    assert found.counted.pooling_spread == pytest.approx(drawn.counted.pooling_spread)
    assert found.unique == pytest.approx(drawn.unique, rel=0.03)
    np.testing.assert_allclose(found.counted.reuse, drawn.counted.reuse, atol=0.03)
    assert found.hottest[0] == pytest.approx(drawn.hottest[0], rel=0.06, abs=2)
    caches = drawn.unique * np.array([0.03, 0.1, 0.3])
    np.testing.assert_allclose(hit_rate(found.footprint, caches), hit_rate(drawn.footprint, caches), atol=0.02)


@pytest.mark.parametrize("locality", [0.2, 0.8, 1.0])
@pytest.mark.parametrize("lookups", [50, 700, 20_000])
def test_repeated_draws_are_counted_once(locality: float, lookups: int) -> None:
    # No two draws of so many rows meet: what is distinct are draws.
    stream = Generator(rows=1 << 31, pooling=float(lookups), locality=locality, window=400)
    distinct = np.mean([len(np.unique(stream.bags(1, iteration).indices)) for iteration in range(20)])
    assert float(draws_in(stream, np.array([float(lookups)]))[0]) == pytest.approx(distinct, rel=0.04)


def test_a_skew_without_lookups_or_batch() -> None:
    found = expected_statistics(Generator(rows=10, pooling=0.0), 8)
    assert (found.lookups, found.unique, found.longest, found.hottest) == (0, 0, 0, (0,) * 5)
    with pytest.raises(InputError, match="batch is 0"):
        expected_statistics(Generator(rows=10, pooling=1.0), 0)


def test_the_expected_histogram_is_that_of_the_reuse_expectation() -> None:
    found = expected_statistics(INDEPENDENT[1], 4096).counted
    expected = expected_reuse("zipf", 200_000, 1.1, 1.0, 4096 * 20)
    np.testing.assert_allclose(found.reuse, expected.rows / expected.rows.sum(), atol=2e-3)
