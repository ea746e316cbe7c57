"""`steptime validate recommenders`: rows of others are read or refused in a line, predicted as a user would, and ranked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.mutated import damaged_tables

from steptime._cli.app import run
from steptime.errors import InputError
from steptime_lab.validate.engine import MeasuredCase
from steptime_lab.validate.recommenders import COLUMNS, rank_agreement, read_steps, validate_recommenders

SMALL = Path(__file__).parents[2] / "examples" / "configs" / "dlrm_small.toml"
HEAD = ",".join(COLUMNS)
ROWS = (
    "NVIDIA H100-SXM5-80GB,1,8,4096,5.0",
    "NVIDIA H100-SXM5-80GB,2,8,4096,5.0",
    "NVIDIA Blackwell GPU (GB200),2,4,4096,5.0",
    "NVIDIA Blackwell Ultra GPU (B300-SXM-270GB),1,8,4096,5.0",
)


def written(tmp_path: Path, *rows: str) -> Path:
    file = tmp_path / "rows.csv"
    file.write_text("\n".join((HEAD, *rows)))
    return file


def test_a_system_is_asked_of_the_platform_of_its_gpus(tmp_path: Path) -> None:
    steps, refused = read_steps(written(tmp_path, *ROWS))
    assert [(each.device, each.fabric, each.ranks) for each in steps] == [
        ("h100", "h100-nvlink", 8),
        ("h100", "h100-ib400", 16),
        ("gb200", "gb200-nvlink", 8),
        ("b300", "b200-nvlink", 8),
    ]
    assert refused == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("NVIDIA L40,1,8,4096,5.0", "no platform has 'NVIDIA L40'"),
        ("NVIDIA H100-PCIe-80GB,1,4,4096,5.0", "nobody knows how GPUs"),
        ("NVIDIA H100,x,8,4096,5.0", "nodes is 'x'; expected a whole number from 1"),
        ("N/A,4,0,65536,200.0", "per_node is '0'; expected a whole number from 1"),
        ("NVIDIA H100,1,8,4096,nan", "ms_per_step is 'nan'; expected a number above 0"),
    ],
)
def test_a_row_that_cannot_be_predicted_costs_a_line(tmp_path: Path, row: str, said: str) -> None:
    steps, (refused,) = read_steps(written(tmp_path, row, ROWS[0]))
    assert len(steps) == 1
    assert said in refused


def test_rows_are_scored_by_device_and_say_who_did_not_verify_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, *ROWS[:2], "NVIDIA L40,1,8,4096,5.0")
    assert run(["validate", "recommenders", "--rows", str(file), "--config", str(SMALL), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [case["name"] for case in document["cases"]] == ["line 2, batch 4096", "line 3, batch 4096"]
    assert set(document["parts"]) == {"h100", "one node", "several nodes"}
    assert any("not verified by MLCommons" in warning for warning in document["warnings"])
    assert any("L40" in warning for warning in document["warnings"])


def test_systems_that_are_predicted_alike_are_ranked_as_one() -> None:
    cases = [MeasuredCase("a", 1.0, 3.0), MeasuredCase("b", 1.0, 1.0), MeasuredCase("c", 1.0, 1.5), MeasuredCase("d", 2.0, 2.0)]
    assert rank_agreement(cases) == 1.0
    assert rank_agreement([*cases, MeasuredCase("e", 3.0, 1.0)]) == pytest.approx(-1 / 3)


def test_a_file_without_a_good_row_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no column 'gpu'"):
        read_steps(_plain(tmp_path, "a,b\n1,2"))
    with pytest.raises(InputError, match="no row can be predicted"):
        validate_recommenders(written(tmp_path, "NVIDIA L40,1,8,4096,5.0"), SMALL)
    assert run(["validate", "recommenders"]) == 2


def _plain(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "plain.csv"
    file.write_text(text)
    return file


def test_five_hundred_damaged_tables_are_read_or_refused(tmp_path: Path) -> None:
    for steps in damaged_tables(tmp_path, (HEAD, *ROWS), read_steps):
        assert all(each.ranks > 0 and each.measured_ms > 0 for each in steps)
