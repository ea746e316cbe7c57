from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._models.error import GMAE_FLOOR, gmae
from steptime_lab.validate.engine import MeasuredCase, repeat_errors, summary


def test_errors_are_relative_to_what_was_measured() -> None:
    assert MeasuredCase("x", 110.0, 100.0).error == pytest.approx(0.1)
    assert MeasuredCase("x", 90.0, 100.0).error == pytest.approx(-0.1)


def test_a_lucky_zero_does_not_sink_the_geometric_mean() -> None:
    assert gmae([0.0]) == pytest.approx(GMAE_FLOOR)
    assert gmae([0.1 - GMAE_FLOOR, 0.1 - GMAE_FLOOR]) == pytest.approx(0.1)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=30))
def test_the_worst_case_is_named_and_nothing_exceeds_it(predictions: list[float]) -> None:
    found = summary([MeasuredCase(f"case {place}", predicted, 1.0) for place, predicted in enumerate(predictions)])
    assert found.rows == len(predictions)
    assert found.max == pytest.approx(max(abs(one - 1) for one in predictions))
    assert found.mape <= found.max + 1e-12
    assert found.p90 <= found.max + 1e-12
    worst = max(range(len(predictions)), key=lambda place: abs(predictions[place] - 1))
    assert abs(predictions[int(found.worst.split(":")[0].removeprefix("case "))] - 1) == pytest.approx(
        abs(predictions[worst] - 1)
    )


def test_coverage_counts_only_cases_with_an_interval() -> None:
    cases = [
        MeasuredCase("a", 1.0, 1.0, interval=(0.9, 1.1)),
        MeasuredCase("b", 1.0, 1.0, interval=(1.1, 1.7)),
        MeasuredCase("c", 1.0, 1.0),
    ]
    assert summary(cases).interval_coverage == 0.5
    assert summary(cases[2:]).interval_coverage is None


def test_a_repeat_is_compared_with_the_mean_of_the_others() -> None:
    assert repeat_errors([1.0, 1.0, 4.0]) == pytest.approx((-0.6, -0.6, 3.0))
    assert repeat_errors([5.0]) == ()
