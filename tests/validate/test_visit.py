"""A held-out visit: calibrating helps, and intervals hold."""

from __future__ import annotations

import pytest

from steptime_lab.validate.held_out import UNCALIBRATED_NAME, validate_visit


@pytest.mark.slow
def test_calibrating_as_a_user_does_helps_on_a_visit_that_nothing_was_fitted_to() -> None:
    whole = validate_visit().whole
    assert whole.summary.gmae < whole.baselines[UNCALIBRATED_NAME].gmae
    assert whole.summary.gmae <= 0.04
    assert whole.summary.interval_coverage is not None
    assert 0.85 <= whole.summary.interval_coverage <= 0.97
