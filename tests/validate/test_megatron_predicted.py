"""Predictions of Megatron iterations where nobody ran them: a slower host never helps, and rows that fit it stay unreported."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.validate.test_megatron import HEADER

from steptime.errors import InputError
from steptime.validate import megatron_predicted
from steptime.validate.megatron import Iteration
from steptime.validate.megatron_predicted import Predictor, host_slower, megatron


def small(batch: int, time_ms: float = 10.0) -> Iteration:
    return Iteration(2, batch, 1, 64, 2, 1, 32, 2, 1, 1, time_ms)


def test_a_slower_host_never_makes_a_step_faster() -> None:
    times = Predictor().times_ms(small(2), (1.0, 1.5, 2.0))
    assert times == sorted(times)
    # So small a model waits for the host all the time.
    assert times[2] == pytest.approx(2 * times[0], rel=0.15)


def test_an_interval_is_around_the_step() -> None:
    (one,) = Predictor("2xh100-nvlink").predicted(small(1))
    assert one.low_ms < one.time_ms < one.high_ms


def test_the_hosts_factor_is_the_one_with_which_rows_are_least_off() -> None:
    predictor = Predictor()
    rows = [small(batch, predictor.times_ms(small(batch), (1.75,))[0]) for batch in (1, 2)]
    assert host_slower(rows) == 1.75


def test_rows_that_choose_the_host_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_predicted, "_TRIED_ROWS", 2)
    rows = [f"2,{batch},1,64,2,1,32,2,1,1,{10 + batch}" for batch in range(1, 5)]
    (tmp_path / "rows.csv").write_text("\n".join((HEADER, *rows)))
    found = megatron(tmp_path / "rows.csv")
    assert found.whole.summary.rows == 2
    (baseline,) = found.whole.baselines
    assert baseline == f"host {found.facts['host_slower']:.2f} times as slow"
    assert found.whole.baselines[baseline].rows == 2
    with pytest.raises(InputError, match="ranks"):
        megatron(tmp_path / "rows.csv", platform="1xa100")
