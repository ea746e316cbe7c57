"""Errors of lookup models: parts are named and ordered, ranks are Spearman's, held-out lookups are those of their test."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime_lab.validate.engine import rank_correlation
from steptime_lab.validate.lookups import _order, _range

_TIMES = st.lists(st.integers(1, 50).map(float), min_size=2, max_size=12)


@given(_TIMES)
def test_ranks_agree_with_themselves_and_with_any_growing_function_of_them(times: list[float]) -> None:
    values = np.array(times)
    expected = 1.0 if len(set(times)) > 1 else 0.0
    assert rank_correlation(values, values**3 + 1) == pytest.approx(expected)
    assert rank_correlation(values, -values) == pytest.approx(-expected)


def test_a_model_that_sees_no_difference_has_no_rank_correlation() -> None:
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.full(3, 5.0)) == 0.0


def test_ties_share_their_rank() -> None:
    # By hand: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert rank_correlation(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(0.9486833)


@pytest.mark.parametrize(("value", "said"), [(1, "1"), (2, "2 to 5"), (5, "2 to 5"), (20, "6 to 20"), (61, "21 to 60")])
def test_ranges_are_named_by_their_ends(value: int, said: str) -> None:
    assert _range(value, (1, 5, 20, 60)) == said


def test_parts_come_in_the_order_of_what_they_are() -> None:
    labels = [
        "forward, 6 to 20 tables",
        "1/2 of the GPU beside idle parts",
        "table_batched forward",
        "backward",
        "forward, 1 tables",
        "forward, most skewed quarter of streams",
        "forward, least skewed quarter of streams",
        "forward",
    ]
    assert sorted(labels, key=_order)[:4] == [
        "backward",
        "forward",
        "table_batched forward",
        "1/2 of the GPU beside idle parts",
    ]
    rest = sorted(labels, key=_order)[4:]
    assert rest.index("forward, least skewed quarter of streams") < rest.index("forward, most skewed quarter of streams")
    assert rest.index("forward, 1 tables") < rest.index("forward, 6 to 20 tables")
