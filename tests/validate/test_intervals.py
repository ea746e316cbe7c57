"""`steptime validate intervals --rows`: rows of others are read or refused in a line, predicted quickly, and scored by box."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.mutated import mutated_text

from steptime._build.transformer.build import build
from steptime._cli.app import run
from steptime._platforms.platform import Platform
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import InputError
from steptime_lab.validate.intervals.intervals import validate_rows
from steptime_lab.validate.intervals.predict import PredictedRow, predicted
from steptime_lab.validate.intervals.rows import read_rows

SMALL = {"layers": 2, "width": 512, "heads": 8, "sequence": 256, "vocabulary": 1000, "batch": 8, "precision": "bf16"}


def row(name: str = "a", measured_ms: float = 10.0, **more: Any) -> dict[str, Any]:
    """A row of a small step on one device."""
    return {
        "source": "somebody",
        "row": name,
        "measured_ms": measured_ms,
        "device": "h100",
        "ranks": 1,
        "cfg": SMALL,
        "fabric": None,
        "notes": "",
        "missing": "",
        **more,
    }


def table(folder: Path, *rows: Any) -> Path:
    file = folder / "rows.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    return file


def test_a_bad_row_costs_one_line_that_names_it_and_the_others_are_read(tmp_path: Path) -> None:
    bad: list[Any] = [
        3,
        row("slow", -1.0),
        row("word", cfg="none"),
        row("heads", cfg={**SMALL, "heads": 7}),
        row("ranks", ranks=8),
        row("alone", device="nothing"),
        row("joined", cfg={**SMALL, "parallel": {"data": 2}}, ranks=2, device="l4"),
    ]
    found = read_rows(table(tmp_path, row(), *bad, row("later", missing="fp8")))
    assert [step.name for step in found.steps] == ["a"]
    assert found.missing == 1
    assert len(found.refused) == len(bad)
    assert all(f"row {place + 1}" in line and "\n" not in line for place, line in enumerate(found.refused))


def test_a_file_without_a_good_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of 1 rows can be predicted"):
        read_rows(table(tmp_path, row(measured_ms=0)))
    with pytest.raises(InputError, match="list of rows"):
        read_rows(table(tmp_path))


def test_devices_and_fabrics_may_lie_beside_the_rows(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "src/steptime/data/devices/h100.toml"
    (tmp_path / "mine.toml").write_text(shipped.read_text(encoding="utf-8"), encoding="utf-8")
    (step,) = read_rows(table(tmp_path, row(device="mine.toml"))).steps
    assert isinstance(predicted(step), PredictedRow)


@pytest.mark.parametrize("parallel", [{}, {"fsdp": 8}])
def test_few_layers_and_parts_tell_what_the_whole_step_takes(tmp_path: Path, parallel: dict[str, int]) -> None:
    ranks = parallel.get("fsdp", 1)
    cfg = {**SMALL, "layers": 16, "width": 2048, "heads": 16, "sequence": 1024, "gradient_accumulation": 5}
    (step,) = read_rows(table(tmp_path, row(cfg={**cfg, "batch": 40 * ranks, "parallel": parallel}, ranks=ranks))).steps
    found = predicted(step)
    assert isinstance(found, PredictedRow)
    whole = predict_on(build(step.config), Platform.of(step.platform))
    assert found.played.step_ms == pytest.approx(whole.step_time_ms, rel=0.005)
    assert found.interval_ms == pytest.approx(whole.interval_ms, rel=0.02)


def test_one_number_per_box_takes_out_what_all_rows_of_a_box_share(tmp_path: Path) -> None:
    cfgs = [{**SMALL, "batch": 8 * (place + 1)} for place in range(12)]
    rows = [row(f"row {place}", cfg=cfg) for place, cfg in enumerate(cfgs)]
    with ThreadPoolExecutor(1) as executor:
        plain = validate_rows(table(tmp_path, *rows), executor=executor)
        slower = [{**each, "measured_ms": 1.4 * case.predicted} for each, case in zip(rows, plain.cases, strict=True)]
        file = table(tmp_path, *slower, row("alone", source="another"))
        found = validate_rows(file, per_box=True, executor=executor)
        assert validate_rows(file, executor=executor).groups["somebody"].summary.gmae == pytest.approx(1 - 1 / 1.4, abs=0.01)
    assert found.whole.summary.rows == 9  # three fit the number; the other source has a row too few
    assert found.whole.summary.gmae < 0.001


def test_the_command_prints_every_source_with_coverage_and_half_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(tmp_path, row(), row("b", source="another"), "damaged")
    assert run(["validate", "intervals", "--rows", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"somebody", "another", "one GPU"} <= set(found["parts"])
    assert {"gmae", "median_error", "interval_coverage", "sharpness"} <= set(found["summary"])
    assert "row 2" in found["warnings"][0]
    assert run(["validate", "intervals", "--per-box"]) == 2
    assert "give --rows FILE" in capsys.readouterr().err


def test_damaged_files_give_rows_or_one_line(tmp_path: Path) -> None:
    text = json.dumps([row(), row("b", cfg={**SMALL, "parallel": {"fsdp": 8}}, ranks=8, fabric="h100-nvlink")])
    draw = random.Random(17)
    for _ in range(500):
        file = tmp_path / "rows.json"
        file.write_text(mutated_text(text, draw), encoding="utf-8")
        try:
            found = read_rows(file)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert all("\n" not in line and str(file) in line for line in found.refused)
