from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.measure.test_host_runner import GROUP, a_session, rows_of
from tests.measurements.test_store import a_recipe, a_row, a_store

from steptime._calibrate import calibrate
from steptime._calibrate import reference_steps as steps
from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.ranks import RanksError
from steptime._calibrate.reference_steps import REFERENCE_STEPS
from steptime._measurements.sets import HOST
from steptime._models.host.model import read_host
from steptime.errors import InputError
from steptime_lab.fit.reference_steps import reference_bursts

KEYS = {"schema_version", "recipe", "ranks", "share", "host", "fabric", "recorded", "card", "factors"}


def row(op: str, *times_ns: float, **more: Any) -> dict[str, Any]:
    return {**a_row(op, times_ns), "source": calibrate.SOURCE, **more}


def measured(folder: Path, *rows: dict[str, Any], run: str = "20260101T000000-abcd") -> Path:
    store = a_store(folder, run=run)
    for one in rows:
        store.add(HOST, one)
    store.flush()
    return folder


def content(folder: Path) -> dict[str, Any]:
    return calibrate.calibration(folder, a_recipe().to_dict(), 1, 1)


def test_every_sample_times_every_reference_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SAMPLE_HOST_S", 0.2)
    session = a_session(tmp_path)
    calibrate.sample(GROUP, session)
    rows = rows_of(tmp_path)
    assert {(one["kind"], one["op"]) for one in rows} == {("step", name) for name in REFERENCE_STEPS}
    assert {(one["source"], one["profiler"]) for one in rows} == {("calibration", "off")}
    assert all(len(one["times_ns"]) >= 2 for one in rows)
    calibrate.sample(GROUP, session)
    assert len(rows_of(tmp_path)) == 2 * len(rows)


def test_a_reference_step_that_cannot_be_run_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: str) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(steps, "REFERENCE_STEPS", {**steps.REFERENCE_STEPS, "towers": fails})
    steps.time_reference_steps(GROUP, a_session(tmp_path), 0.1, calibrate.SOURCE)
    assert {one["op"] for one in rows_of(tmp_path)} == {"perceptron", "transformer", "convolutions"}
    assert "reference step towers cannot be run" in capsys.readouterr().err


def test_the_shipped_host_knows_what_reference_steps_take_by_its_own_costs() -> None:
    host = read_host("xeon-h200")
    for name, burst in reference_bursts(host).items():
        assert host.bursts[name].time_ns == pytest.approx(burst.time_ns, rel=0.01)
        assert host.bursts[name].launch_ns == pytest.approx(burst.launch_ns, rel=0.01)


def test_the_file_holds_medians_over_ranks_with_their_spread(tmp_path: Path) -> None:
    folder = measured(tmp_path / "run", row("b", 1.0, 2.0), row("b", 3.0), row("a", 5.0), {**row("a", 9.0), "source": "sweep"})
    found = content(folder)
    assert set(found) == KEYS
    assert found["factors"] == {"host": None, "applied": None}
    assert [(one["op"], one["time_ns"], one["repeats"]) for one in found["host"]] == [("a", 5.0, 1), ("b", 2.0, 3)]
    assert set(found["host"][0]) == {"kind", "op", "call", "phase", "time_ns", "spread", "repeats"}


def test_rows_of_another_run_are_not_part_of_a_calibration(tmp_path: Path) -> None:
    measured(tmp_path, row("a", 1.0), run="20250101T000000-0000")
    measured(tmp_path, row("a", 7.0))
    assert [one["time_ns"] for one in content(tmp_path)["host"]] == [7.0]


def test_factors_are_geometric_means_against_the_read_host(tmp_path: Path) -> None:
    usual = read_host("xeon-h200").bursts
    nested, add, view = (usual[name].time_ns for name in ("module_call nested", "op aten::view.default", "alloc empty"))
    folder = measured(
        tmp_path, row("nested", 2 * nested, kind="module_call"), row("aten::view.default", 4 * add),
        row("empty", view, kind="alloc"), row("made.up", 9.0),
    )  # fmt: skip
    assert content(folder)["factors"]["host"] == pytest.approx(
        {"module_call": 2.0, "op": 4.0, "alloc": 1.0, "all": 2.0}, abs=1e-3
    )


def test_a_calibration_says_how_sure_it_is_and_where_it_cannot_tell(tmp_path: Path) -> None:
    usual = read_host("xeon-h200").bursts
    steady = [row(name, *[1.3 * usual[f"step {name}"].time_ns] * 9, kind="step") for name in REFERENCE_STEPS]
    found = content(measured(tmp_path / "steady", *steady))["factors"]["applied"]
    assert 1.0 < found["factor"] < found["shown"]
    assert found["error"] < found["shown_error"]
    assert "predictions take it as 1." in calibrate.said(found)
    wild = [row(name, *(k * usual[f"step {name}"].time_ns for k in (0.5, 4.0)), kind="step") for name in REFERENCE_STEPS]
    unsure = content(measured(tmp_path / "wild", *wild))["factors"]["applied"]
    assert "near the shipped one" in calibrate.said(unsure)
    assert "cannot use it" in calibrate.said(None)


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    first = measured(tmp_path / "1", row("b", 1.0, 2.0), row("a", 5.0))
    second = measured(tmp_path / "2", row("a", 5.0), row("b", 2.0, 1.0))
    files = [tmp_path / "x.json", tmp_path / "y.json"]
    for folder, file in zip((first, second), files, strict=True):
        calibrate.write(file, content(folder))
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_group_that_fails_leaves_a_file_of_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        measured(tmp_path, row("a", 1.0))
        raise RanksError("planted")

    monkeypatch.setattr(calibrate, "run_ranks", fails)
    calibrate.run(a_session(tmp_path), Options(device="cpu", ranks=(2,)))
    found = json.loads((tmp_path / calibrate.FILE).read_text())
    assert (found["schema_version"], found["ranks"], len(found["host"])) == (1, 2, 1)
    assert "planted" in capsys.readouterr().err


def test_a_calibration_names_the_versions_that_only_its_ranks_know(tmp_path: Path) -> None:
    folder = measured(tmp_path, row("a", 1.0))
    parent = {**a_recipe().to_dict(), "nccl": ""}
    assert calibrate.calibration(folder, parent, 1, 1)["recipe"] == a_recipe().to_dict()


def test_a_group_that_measured_nothing_leaves_the_last_calibration_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RanksError("planted")

    (tmp_path / calibrate.FILE).write_text("the last one")
    monkeypatch.setattr(calibrate, "run_ranks", fails)
    with pytest.raises(InputError, match="nothing could be measured"):
        calibrate.run(a_session(tmp_path), Options(device="cpu"))
    assert (tmp_path / calibrate.FILE).read_text() == "the last one"


def test_all_gpus_take_part_unless_ranks_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "gpus", lambda: [{}] * 4)
    assert calibrate._ranks(Options()) == 4
    assert calibrate._ranks(Options(ranks=(2,))) == 2
    assert calibrate._ranks(Options(share_gpu=True)) == 1
