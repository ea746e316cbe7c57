"""P(fastest): what layouts have in common cancels."""

from __future__ import annotations

import numpy as np
import pytest

from steptime._plan.chances import MEASURED_OWN_ERROR, beats, chances, p_faster_of_others

RNG = np.random.default_rng(5)
COMMON = np.exp(0.3 * RNG.standard_normal(64))
OTHER = np.exp(0.1 * RNG.standard_normal(64))


def test_chances_add_up_to_one() -> None:
    steps = [100.0, 101.0, 110.0]
    assert sum(chances(steps, [step * COMMON for step in steps])) == pytest.approx(1.0)


def test_an_error_that_all_layouts_share_says_nothing_about_which_is_fastest() -> None:
    near, sure = 100.0, 110.0
    assert beats((near, sure), (near * COMMON, sure * COMMON), MEASURED_OWN_ERROR) > 0.95
    assert beats((near, sure), (near * COMMON, sure * OTHER), MEASURED_OWN_ERROR) < 0.8


def test_equal_layouts_have_equal_chances() -> None:
    result = chances([100.0] * 4, [100.0 * COMMON] * 4)
    assert result == pytest.approx([0.25] * 4, abs=0.02)


def test_the_faster_layout_is_likelier() -> None:
    result = chances([100.0, 102.0, 104.0], [step * COMMON for step in (100.0, 102.0, 104.0)])
    assert result[0] > result[1] > result[2]


def test_without_any_error_the_fastest_is_certain() -> None:
    assert chances([100.0, 100.1], [np.full(64, 100.0), np.full(64, 100.1)], own_error=0.0) == [1.0, 0.0]


def test_layouts_that_were_not_played_count_by_how_near_they_are() -> None:
    steps, draws = [100.0, 110.0], [100.0 * COMMON, 110.0 * COMMON]
    far, near, nearer = (
        p_faster_of_others(steps, draws, others, [0.02] * len(others), MEASURED_OWN_ERROR)
        for others in ([200.0] * 9, [104.0], [104.0] * 9)
    )
    assert far == 0.0
    assert 0.05 < near < nearer < 1.0
