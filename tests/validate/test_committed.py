"""Predictions committed before measuring stay as they were; calibrations of runs are what was measured before their steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.errors import InputError
from steptime_lab.measurements.shipped import shipped
from steptime_lab.validate.held_out import AGAIN, DIVIDED, FIRST, FURTHER, RECOMMENDERS, STEPS, validate_committed
from steptime_lab.validate.sets import Models, validated
from steptime_lab.validate.steps.cases import RunCalibrations, _before


def test_what_was_committed_is_read_and_held_against_what_was_measured() -> None:
    found = validate_committed()
    assert {name: group.summary.rows for name, group in found.groups.items()} == {
        STEPS: 6, AGAIN: 6, DIVIDED: 26, RECOMMENDERS: 20, FURTHER: 278, FIRST: 273,
    }  # fmt: skip
    assert found.whole.summary.rows == 6 + 26 + 20 + 278
    # As the documents of that day have them: nothing predicted since then gets in.
    assert found.groups[FURTHER].summary.mape == pytest.approx(0.016, abs=5e-4)
    assert found.groups[FURTHER].summary.bias == pytest.approx(0.0, abs=5e-3)
    assert found.facts["mean_regret_of_the_picked_plans"] == pytest.approx(0.0026, abs=1e-4)


def test_rows_of_a_second_calibration_and_of_other_processes_are_left_out() -> None:
    rows = [{"process": process, "key": "k", "place": place} for place, process in enumerate(("p1", "p1", "p2", "p9"))]
    assert [row["place"] for row in _before(rows, ("p1", "p2"))] == [0, 2]
    assert [row["place"] for row in _before(rows, ())] == [0, 2, 3]


def test_every_shipped_step_of_several_ranks_has_a_calibrated_host() -> None:
    calibrations = RunCalibrations()
    runs = {(row["run"], row["process"]): row for row in shipped("steps").select(["run", "process", "ranks"]).to_pylist()}
    speeds = [calibrations.of_step(row).speed.cpu for row in runs.values()]
    assert len({round(speed, 3) for speed in speeds}) > len(speeds) / 2
    assert all(1.5 < speed < 3.5 for speed in speeds)


def test_a_folder_of_one_device_is_validated_whatever_its_name(tmp_path: Path) -> None:
    for name in ("mine.npz", "mine-lookups.npz", "mine-baselines.npz"):
        (tmp_path / name).touch()
    assert Models(folder=tmp_path).name() == "mine"
    (tmp_path / "other.npz").touch()
    assert Models(folder=tmp_path).name() == "h200"
    with pytest.raises(InputError, match="drop --models"):
        validated("committed", Models(folder=tmp_path))
