"""What is counted of a batch's lookups."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steptime._lookups.generators import Bags, Generator
from steptime._lookups.statistics import REUSE_BINS
from steptime._lookups.table import table_statistics
from steptime.errors import InputError
from steptime_lab.workloads.torch_arrays import TorchArrays
from steptime_lab.workloads.torch_statistics import statistics_of_launch, statistics_of_tables


def bag(*samples: list[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    indices = np.array([index for sample in samples for index in sample], dtype=np.int64)
    return indices, np.cumsum([0, *(len(sample) for sample in samples)])


def slow_reuse(indices: list[int]) -> list[float]:
    """The definition, row by row."""
    bins = [0] * 17
    for count in Counter(indices).values():
        upper = 0
        while upper < 16 and count > 2**upper:
            upper += 1
        bins[upper] += 1
    return [value / sum(bins) if sum(bins) else 0.0 for value in bins]


def test_counts_by_hand() -> None:
    # Row 0 once, row 1 twice, row 2 three times, row 3 four times, row 4 five times.
    indices, offsets = bag([0, 1, 1], [2, 2, 2, 3, 3, 3, 3], [], [4, 4, 4, 4, 4])
    found = table_statistics(indices, offsets, rows=10).counted
    assert (found.rows, found.batch, found.lookups, found.unique) == (10, 4, 15, 5)
    assert found.reuse == (0.2, 0.2, 0.4, 0.2, *[0.0] * 13)
    assert found.pooling == 15 / 4
    assert found.pooling_spread == pytest.approx(np.std([3, 7, 0, 5]))


@pytest.mark.parametrize(
    ("count", "place"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (2**15, 15), (2**15 + 1, 16), (99_999, 16)]
)
def test_a_bin_takes_its_upper_end_and_not_its_lower(count: int, place: int) -> None:
    found = table_statistics(np.full(count, 3), np.array([0, count]), rows=7).counted
    assert [b for b, share in enumerate(found.reuse) if share] == [place]
    assert found.reuse[place] == 1.0


def test_a_table_without_lookups_has_seventeen_zeros() -> None:
    found = table_statistics(np.array([], dtype=np.int64), np.zeros(5, dtype=np.int64), rows=100).counted
    assert found.reuse == (0.0,) * 17
    assert (found.unique, found.pooling, found.pooling_spread) == (0, 0.0, 0.0)


@given(st.lists(st.integers(0, 11), max_size=200), st.sampled_from([12, 1_000_000]))
def test_the_histogram_is_the_definition(indices: list[int], rows: int) -> None:
    # 12 rows are counted in an array, a million by sorting.
    found = table_statistics(np.array(indices, dtype=np.int64), np.array([0, len(indices)]), rows).counted
    assert found.reuse == pytest.approx(slow_reuse(indices))
    assert found.unique == len(set(indices))
    assert math.isclose(sum(found.reuse), 1.0 if indices else 0.0)
    assert len(found.reuse) == REUSE_BINS


@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=3, max_size=3), min_size=1, max_size=4))
def test_torch_counts_what_numpy_counts(tables: list[list[list[int]]]) -> None:
    rows = [10 + 7 * t for t in range(len(tables))]
    bags = [bag(*samples) for samples in tables]
    expected = tuple(table_statistics(i, o, r).counted for (i, o), r in zip(bags, rows, strict=True))
    assert statistics_of_tables([Bags(torch.from_numpy(i), torch.from_numpy(o)) for i, o in bags], rows) == expected


def test_torch_counts_generated_streams_as_numpy_does() -> None:
    streams = [
        Generator(rows=50, pooling=3.0, kind="power", alpha=4.0),
        Generator(rows=1 << 31, pooling=0.0),
        Generator(rows=3_000_000, pooling=2.5, lengths="geometric", kind="zipf", seed=5),
    ]
    expected = []
    for stream in streams:
        made = stream.bags(64)
        expected.append(table_statistics(made.indices, made.offsets, stream.rows).counted)
    arrays = TorchArrays(torch.device("cpu"))
    assert statistics_of_tables([s.bags(64, 0, arrays) for s in streams], [s.rows for s in streams]) == tuple(expected)


def test_no_tables_have_no_statistics() -> None:
    assert statistics_of_tables([], []) == ()


def test_a_launch_with_too_few_offsets_is_refused() -> None:
    with pytest.raises(InputError, match="5 offsets; expected 7"):
        statistics_of_launch(torch.zeros(4, dtype=torch.int64), torch.arange(5), rows=[10, 10], batch=3)


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [
        ([1, 7, 2], [0, 3], "users: index 7 at position 1 is outside its 5 rows"),
        ([1, -1], [0, 2], "users: index -1 at position 1"),
        ([1, 2], [0, 3], r"users: offsets start and end at \(0, 3\)"),
        ([1, 2], [1, 2], r"users: offsets start and end at \(1, 2\)"),
        ([1, 2], [], "users: offsets start and end at"),
        ([1, 2, 3], [0, 2, 1, 3], "users: offset 2 is below the one before it"),
        ([1.0], [0, 1], "users: indices have shape .* and dtype float64"),
        ([[1]], [0, 1], "users: indices have shape"),
    ],
)
def test_bad_lookups_are_named_with_table_and_position(indices: list[Any], offsets: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        table_statistics(np.array(indices), np.array(offsets, dtype=np.int64), rows=5, table="users")
