"""Covered time: what sorting and running maxima say is what marking every instant says."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from steptime._sim.explain.activity import Spans, clip, fold

Column = npt.NDArray[np.int64]

LENGTH = 20

_SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 25)), min_size=0, max_size=8)


def columns(spans: list[tuple[int, int]]) -> tuple[Column, Column]:
    start = np.array([s for s, _ in spans], dtype=np.int64).reshape(-1, 1)
    return start, start + np.array([d for _, d in spans], dtype=np.int64).reshape(-1, 1)


def length() -> Column:
    return np.array([LENGTH], dtype=np.int64)


def folded(spans: list[tuple[int, int]]) -> Spans:
    return fold(*columns(spans), length())


def marked(spans: list[tuple[int, int]]) -> set[int]:
    """The instants of the repeating window that some span covers, one by one."""
    return {t % LENGTH for start, duration in spans for t in range(start, start + min(duration, LENGTH))}


@given(_SPANS)
def test_folded_cover_is_the_number_of_marked_instants(spans: list[tuple[int, int]]) -> None:
    assert folded(spans).covered_ns().tolist() == [len(marked(spans))]


@given(_SPANS, st.integers(0, 30))
def test_clipped_cover_is_the_number_of_marked_instants(spans: list[tuple[int, int]], begin: int) -> None:
    instants = {t for start, duration in spans for t in range(start, start + duration) if begin <= t < begin + LENGTH}
    assert clip(*columns(spans), begin, length()).covered_ns().tolist() == [len(instants)]


@given(_SPANS)
def test_shares_of_rows_sum_to_the_cover_and_none_exceeds_its_row(spans: list[tuple[int, int]]) -> None:
    own = folded(spans).own_ns()[:, 0]
    assert own.sum() == len(marked(spans))
    assert all(0 <= share <= duration for share, (_, duration) in zip(own.tolist(), spans, strict=True))


@given(_SPANS.filter(bool))
def test_covered_and_idle_fill_a_repeating_window(spans: list[tuple[int, int]]) -> None:
    found = folded(spans)
    assert found.idle_before_ns().sum() + found.covered_ns()[0] == LENGTH


@given(_SPANS, _SPANS)
def test_ranks_side_by_side_do_not_touch_each_other(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    rows = min(len(first), len(second))
    both = [columns(spans[:rows]) for spans in (first, second)]
    start, end = (np.concatenate([pair[i] for pair in both], axis=1) for i in range(2))
    together = fold(start, end, np.array([LENGTH, LENGTH]))
    alone = [folded(spans[:rows]) for spans in (first, second)]
    assert together.covered_ns().tolist() == [int(a.covered_ns()[0]) for a in alone]
    for rank, single in enumerate(alone):
        assert np.array_equal(together.idle_before_ns()[:, rank], single.idle_before_ns()[:, 0])


@given(_SPANS, st.integers(0, 7))
def test_chosen_rows_cover_what_they_cover_alone(spans: list[tuple[int, int]], every: int) -> None:
    chosen = np.arange(0, len(spans), every + 1)
    kept = folded(spans).keep(chosen)
    assert kept.covered_ns().tolist() == [len(marked([spans[i] for i in chosen.tolist()]))]


def test_the_work_that_ends_a_gap_owns_it() -> None:
    spans = folded([(2, 3), (10, 4)])
    assert spans.idle_before_ns()[:, 0].tolist() == [2 + (LENGTH - 14), 5]
