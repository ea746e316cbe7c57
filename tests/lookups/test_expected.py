"""Reuse in expectation against reuse as drawn."""

from __future__ import annotations

import numpy as np
import pytest

from steptime.lookups.expected import expected_reuse
from steptime.lookups.generators import Generator
from steptime.lookups.statistics import statistics_of


@pytest.mark.parametrize(
    "stream",
    [
        Generator(rows=5_000, pooling=4),
        Generator(rows=3_000_000, pooling=10),
        Generator(rows=200_000, pooling=30, kind="zipf", alpha=1.1, shift=5.0),
        Generator(rows=100_000, pooling=30, kind="zipf", alpha=0.6, shift=100.0),
        Generator(rows=300_000, pooling=20, kind="power", alpha=6.0),
    ],
)
def test_drawn_streams_have_the_expected_reuse(stream: Generator) -> None:
    bags = stream.bags(5000)
    drawn = statistics_of(bags.indices, bags.offsets, stream.rows)
    found = expected_reuse(stream.kind, stream.rows, stream.alpha, stream.shift, 5000 * stream.pooling)
    assert found.rows.sum() == pytest.approx(drawn.unique, rel=0.02)
    np.testing.assert_allclose(found.rows / found.rows.sum(), drawn.reuse, atol=0.01)
    assert found.lookups.sum() == pytest.approx(drawn.lookups, rel=1e-6)


def test_a_bin_holds_as_many_lookups_as_its_ends_allow() -> None:
    found = expected_reuse("zipf", 1_000_000, 1.2, 3.0, 1e6)
    assert found.lookups[0] == pytest.approx(found.rows[0], rel=1e-6)
    for place in range(1, 16):
        if found.rows[place] > 1:
            assert 2 ** (place - 1) * 0.98 <= found.lookups[place] / found.rows[place] <= 2**place * 1.02


def test_more_lookups_reach_more_rows_and_never_more_than_there_are() -> None:
    reached = [float(expected_reuse("zipf", 10_000, 1.0, 1.0, lookups).rows.sum()) for lookups in (1e2, 1e4, 1e6, 1e9)]
    assert reached == sorted(reached)
    assert reached[0] <= 100
    assert reached[-1] == pytest.approx(10_000, rel=1e-6)


def test_no_lookups_reach_no_row() -> None:
    found = expected_reuse("uniform", 1000, 1.0, 1.0, 0.0)
    assert not found.rows.any()
    assert not found.lookups.any()
