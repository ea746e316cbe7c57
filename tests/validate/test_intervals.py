"""`steptime validate intervals --rows`: rows of others are read or refused in a line, predicted quickly, and scored by box."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from tests.support.mutated import mutated_text

from steptime._build.transformer.build import build
from steptime._cli.app import run
from steptime._ops.families import WorkFamily
from steptime._platforms.calibration import UNCALIBRATED
from steptime._platforms.platform import Platform
from steptime._platforms.situation import (
    CARRIED,
    read_situations,
    read_unseen,
    situation_of,
    situations,
    unseen_architecture,
    written,
)
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import InputError
from steptime_lab.validate.intervals.boxes import boxes_of, number_of, with_number
from steptime_lab.validate.intervals.intervals import predicted_rows
from steptime_lab.validate.intervals.predict import PredictedRow, predicted
from steptime_lab.validate.intervals.rows import read_rows
from steptime_lab.validate.intervals.widths import by_source, errors_left, fitted_situation, interval_ms, source_factors

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
        row("wide", cfg={**SMALL, "width": 512_000}),
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


@pytest.mark.parametrize("parallel", [{}, pytest.param({"fsdp": 8}, marks=pytest.mark.slow)])
def test_a_row_is_predicted_as_a_config_is(tmp_path: Path, parallel: dict[str, int]) -> None:
    ranks = parallel.get("fsdp", 1)
    cfg = {**SMALL, "layers": 9, "width": 2048, "heads": 16, "sequence": 1024, "gradient_accumulation": 3}
    (step,) = read_rows(table(tmp_path, row(cfg={**cfg, "batch": 24 * ranks, "parallel": parallel}, ranks=ranks))).steps
    found = predicted(step)
    assert isinstance(found, PredictedRow)
    whole = predict_on(build(step.config), Platform.of(step.platform))
    assert found.played.step_ms == pytest.approx(whole.step_time_ms, rel=1e-6)
    assert found.interval_ms == pytest.approx(whole.interval_ms, rel=1e-6)


def many(count: int, source: str = "somebody") -> list[dict[str, Any]]:
    """Rows of one source that a device is busy with, sequences short and long."""
    large = {**SMALL, "width": 1024, "heads": 8, "attention": "flash"}
    sequences = [512 << (place % 4) for place in range(count)]
    return [
        row(f"{source} {place}", cfg={**large, "sequence": sequence, "batch": 16 + place}, source=source)
        for place, sequence in enumerate(sequences)
    ]


@pytest.fixture(scope="module")
def known() -> list[PredictedRow]:
    """Rows of two sources, predicted."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(1) as executor:
        found, refused = predicted_rows(read_rows(table(Path(folder), *many(12), *many(4, "another"))), executor)
    assert not refused
    return found


def slower(rows: list[PredictedRow], **factors: float) -> list[PredictedRow]:
    """The rows as measured where kernels of each kind take so many times as long."""
    result = []
    for each in rows:
        kinds = each.played.kinds_ms
        more = sum(took * (factors.get(kind, 1.0) - 1.0) for kind, took in kinds.items())
        result.append(replace(each, step=replace(each.step, measured_ms=each.played.step_ms + more)))
    return result


def test_what_the_errors_of_a_source_are_made_of_is_found(known: list[PredictedRow]) -> None:
    found = source_factors(slower(known, products=1.2, attention=1.8))
    assert found["products"] == pytest.approx(1.2, abs=0.08)
    assert found["attention"] == pytest.approx(1.8, abs=0.2)
    assert max(map(abs, errors_left(slower(known, products=1.2, attention=1.8)))) < 0.05


def test_widths_hold_nine_of_ten_and_grow_with_the_errors_of_their_kind(known: list[PredictedRow]) -> None:
    sources = by_source(known)
    rows = [*slower(sources["somebody"], attention=1.8), *slower(sources["another"], products=1.3)]
    found = fitted_situation(rows)
    held = {
        source: np.mean(
            [low <= each.step.measured_ms <= high for each in those for low, high in [interval_ms(each, found, found)]]
        )
        for source, those in by_source(rows).items()
    }
    assert np.average(list(held.values()), weights=np.sqrt([len(those) for those in by_source(rows).values()])) >= 0.9
    right = fitted_situation(slower(known))
    assert found.errors["attention"].above > 3 * right.errors["attention"].above
    assert found.rows == len(rows)
    assert found.sources == ("another", "somebody")


def test_one_number_per_box_takes_out_what_all_rows_of_a_box_share(known: list[PredictedRow]) -> None:
    carried = situations()[CARRIED]
    shifted = {kind: float(np.exp(1.3 * error.above)) for kind, error in carried.errors.items()}
    rows = slower(known, **shifted)
    ((fitted, scored),) = [both for box, both in boxes_of(rows).items() if box.startswith("somebody")]
    assert (len(fitted), len(scored)) == (3, 9)
    number = number_of(fitted, carried)
    assert number == pytest.approx(1.3, abs=0.01)
    assert all(with_number(each, carried, number) == pytest.approx(each.step.measured_ms, rel=0.01) for each in scored)


def test_the_interval_of_a_row_is_that_of_the_simulation(known: list[PredictedRow]) -> None:
    carried = situations()[CARRIED]
    for each in known[:4]:
        assert interval_ms(each, carried, carried) == pytest.approx(each.interval_ms, rel=0.05)


def test_what_is_wrong_in_common_is_of_families_on_a_measured_device_and_of_kinds_on_others() -> None:
    assert set(situation_of(Platform.load("1xh200"), UNCALIBRATED).errors) == set(unseen_architecture().errors)
    carried = situation_of(Platform.load("1xh100"), UNCALIBRATED)
    calibrated = situation_of(Platform.load("1xh100"), replace(UNCALIBRATED, device=1.2))
    assert all(calibrated.errors[kind].above < error.above for kind, error in carried.errors.items())


def test_lookups_and_recorded_kernels_are_known_in_steps() -> None:
    known, carried = unseen_architecture(), next(iter(situations().values()))
    assert known.kind("matmul 14 aten::mm.default", WorkFamily.MATMUL) == "matmul"
    assert known.kind("lookup forward", WorkFamily.EMBEDDING) == known.kind("recorded", WorkFamily.OTHER) == ""
    assert known.kind("assumed lookup forward", WorkFamily.EMBEDDING) == "embedding"  # of rows that nobody counted
    assert carried.kind("matmul 14 aten::mm.default", WorkFamily.MATMUL) == "products"


def damaged_is_refused_in_one_line(read: Callable[[Path], object], file: Path, text: str) -> None:
    draw = random.Random(3)
    for _ in range(500):
        file.write_text(mutated_text(text, draw), encoding="utf-8")
        try:
            read(file)
        except InputError as error:
            assert "\n" not in str(error)


def test_families_are_written_as_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "architectures.toml"
    text = written([unseen_architecture()], "as shipped")
    file.write_text(text, encoding="utf-8")
    assert read_unseen(file) == unseen_architecture()
    damaged_is_refused_in_one_line(read_unseen, file, text)


def test_situations_are_written_as_they_are_read(tmp_path: Path) -> None:
    file = tmp_path / "situations.toml"
    text = written(list(situations().values()), "as shipped")
    file.write_text(text, encoding="utf-8")
    assert read_situations(file) == situations()
    damaged_is_refused_in_one_line(read_situations, file, text)


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
