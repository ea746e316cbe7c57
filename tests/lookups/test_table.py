"""Everything that is counted of one table's lookups, against counting by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._lookups import table as tables
from steptime._lookups.generators import Generator
from steptime._lookups.spectrum import HOTTEST, hottest_of, of_statistics, tallied, with_totals
from steptime._lookups.statistics import QUANTILES, REUSE_BINS, REUSE_EDGES
from steptime._lookups.table import TableStatistics, runs_of, table_statistics, tally_of_runs
from steptime.errors import InputError

STREAMS = [
    Generator(rows=5_000, pooling=20),
    Generator(rows=200_000, pooling=20, kind="zipf", alpha=1.1),
    Generator(rows=1 << 31, pooling=6, lengths="geometric", kind="power", alpha=9.0, locality=0.5, window=300),
    Generator(rows=300, pooling=3, lengths="uniform", kind="hot", alpha=4.0, shift=3.0),
]


def of(stream: Generator, batch: int = 1000) -> TableStatistics:
    bags = stream.bags(batch)
    return table_statistics(bags.indices, bags.offsets, stream.rows, 64, "users")


@pytest.mark.parametrize("stream", STREAMS)
def test_totals_and_reuse_are_those_of_the_published_definition(stream: Generator) -> None:
    bags = stream.bags(1000)
    found, lengths = of(stream).counted, np.diff(bags.offsets)
    counts = np.unique(bags.indices, return_counts=True)[1]
    assert (found.rows, found.batch, found.lookups, found.unique) == (stream.rows, 1000, len(bags.indices), len(counts))
    bins = np.bincount(np.searchsorted(REUSE_EDGES, counts), minlength=REUSE_BINS)
    assert found.reuse == pytest.approx(bins / max(len(counts), 1))
    assert found.pooling_spread == pytest.approx(lengths.std())


@pytest.mark.parametrize("stream", STREAMS)
def test_hottest_rows_and_longest_bag_are_exact(stream: Generator) -> None:
    bags = stream.bags(1000)
    counts = np.sort(np.unique(bags.indices, return_counts=True)[1])[::-1].tolist()
    lengths = np.sort(np.diff(bags.offsets))
    found = of(stream)
    assert found.hottest == tuple(counts[place - 1] if place <= len(counts) else 0 for place in HOTTEST)
    assert found.longest == lengths[-1]
    for share, length in zip(QUANTILES, found.lengths.quantiles, strict=True):
        assert np.mean(lengths <= length) >= share > np.mean(lengths < length)


def test_the_reuse_histogram_by_hand() -> None:
    # Test vectors of the 17 bins: counts at both ends of each bin, one row for each.
    counts = [1, 2, 3, 4, 5, 8, 9, 16, 17, 2**14, 2**14 + 1, 2**15, 2**15 + 1, 100_000]
    indices = np.repeat(np.arange(len(counts)), counts)
    np.random.default_rng(0).shuffle(indices)
    found = table_statistics(indices, np.array([0, len(indices)]), rows=len(counts))
    expected = [1, 1, 2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 2]
    assert found.counted.reuse == pytest.approx([share / len(counts) for share in expected])
    assert found.hottest == (100_000, 2**15 + 1, 2**14 + 1, 0, 0)


@given(st.lists(st.integers(0, 40), max_size=300), st.sampled_from([41, 10_000_000, 1 << 40]))
def test_every_way_of_counting_gives_the_same_spectrum(indices: list[int], rows: int) -> None:
    # 41 rows are counted in an array, the others sorted, in words of 32 and 64 bits.
    found = table_statistics(np.array(indices, dtype=np.int64), np.array([0, len(indices)]), rows)
    counts = np.bincount(np.array(indices, dtype=np.int64), minlength=1)
    expected = np.bincount(counts)[1:]
    assert found.spectrum.rows == tuple(float(number) for number in expected if number)
    assert found.spectrum.counts.tolist() == (np.flatnonzero(expected) + 1).tolist()
    assert found.hottest == hottest_of(tallied([counts]))


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(3, 50))
def test_runs_are_tallied_across_the_ends_of_blocks(lengths: list[int], block: int) -> None:
    ordered = np.repeat(np.arange(len(lengths), dtype=np.uint32), lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_BLOCK", block)
        counts, rows = tally_of_runs(ordered)
        listed = [length for _, part in runs_of(ordered) for length in part.tolist()]
    assert listed == lengths
    assert np.repeat(counts, rows).tolist() == sorted(lengths)


@pytest.mark.parametrize("stream", STREAMS)
def test_seventeen_bins_alone_give_a_spectrum_with_their_totals(stream: Generator) -> None:
    found = of(stream)
    spectrum = of_statistics(found.counted)
    assert spectrum.unique == pytest.approx(found.unique)
    assert spectrum.total == pytest.approx(found.lookups, rel=0.02)
    np.testing.assert_allclose(spectrum.reuse_bins()[0] / spectrum.unique, found.counted.reuse, atol=1e-6)
    windows = found.lookups * np.array([0.01, 0.1, 0.5])
    np.testing.assert_allclose(spectrum.in_random_order(windows), found.spectrum.in_random_order(windows), rtol=0.1)


def test_a_spectrum_takes_the_totals_it_is_given() -> None:
    found = with_totals(of(STREAMS[1]).spectrum, 1000.0, 7000.0)
    assert found.unique == pytest.approx(1000) and found.total == pytest.approx(7000)
    assert (found.counts >= 1).all()


def test_a_table_without_lookups_has_statistics() -> None:
    found = table_statistics(np.zeros(0, dtype=np.int64), np.zeros(4, dtype=np.int64), 10)
    assert (found.batch, found.lookups, found.unique, found.longest, found.hottest) == (3, 0, 0, 0, (0,) * 5)
    assert found.counted.reuse == (0.0,) * 17
    assert found.footprint.distinct(5.0) == 0


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [
        (np.array([1, 7, 2]), [0, 3], "Table users: index 7 at position 1 is outside its 5 rows"),
        (np.array([1, -1]), [0, 2], "Table users: index -1 at position 1"),
        (np.array([1, -1], dtype=np.int8), [0, 2], "Table users: index -1 at position 1"),
        (np.array([1, 200], dtype=np.uint8), [0, 2], "Table users: index 200 at position 1"),
        (np.array([1, 2**63], dtype=np.uint64), [0, 2], "Table users: index 9223372036854775808 at position 1"),
        (np.arange(8)[::-2], [0, 4], "Table users: index 7 at position 0"),
        (np.array([1, 2]), [0, 3], r"Table users: offsets start and end at \(0, 3\)"),
        (np.array([1, 2]), [0, 2, 1, 2], "Table users: offset 2 is below the one before"),
        (np.array([1.0]), [0, 1], "Table users: indices have shape .* and dtype float64"),
        (np.array([True]), [0, 1], "Table users: indices have shape .* and dtype bool"),
        ([1], [0, 1], "Table users: indices are a list"),
        (np.zeros(0, dtype=np.int64), [0], "Table users: the batch is empty .*position 0"),
    ],
)
def test_bad_lookups_are_named_with_table_and_position(indices: npt.NDArray[Any], offsets: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        table_statistics(indices, np.array(offsets, dtype=np.int64), 5, 8, "users")


def test_unsigned_offsets_that_fall_are_seen() -> None:
    with pytest.raises(InputError, match="offset 2 is below"):
        table_statistics(np.array([1, 1]), np.array([0, 2, 1, 2], dtype=np.uint32), 5)
