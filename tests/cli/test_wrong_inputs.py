"""Wrong tasks, plans and machines given to commands: one clear line that says what and where (damaged ones: tests/fuzz)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fuzz.samples import PLANS, TASK

import steptime
from steptime._cli.app import run

PLATFORM = ("--platform", "2xh200-nvlink")


def refusal(tmp_path: Path, files: dict[str, str], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert run([str(tmp_path / each) if each in files else each for each in arguments]) == 2
    streams = capsys.readouterr()
    assert not streams.out
    (line,) = streams.err.splitlines()
    return line.replace(str(tmp_path), "")


PLAN_FILES = (
    ('{"plans": [3]}', "plan.json, plan 0: '3'; expected a table of table and ranks"),
    (json.dumps({"plans": [PLANS[4]["plans"][0]] * 2}), "plan.json: two plans are called 'mine'; expected every name once"),
    ('{"user": 0, "item": 1, "user": 1}', "plan.json: cannot be read as JSON (key 'user' is there twice in one object)"),
    ('{"user": 7, "item": 1}', "puts table 'user' on rank 7; expected 0 to 1, or more ranks"),
    (
        '{"user": {"kind": "table_wise", "ranks": [0, 1]}, "item": 1}',
        "table 'user': a whole table on ranks [0, 1]; expected one",
    ),
    ('{"user": {"kind": "row_wise", "ranks": {"kind": "row_wise"}}, "item": 1}', "table 'user': ranks is {'kind': 'row_wise'}"),
    (
        '{"plan": {"": {"user": {"sharding_type": "row_wise", "ranks": [0, 1, 2, 3]}, '
        '"item": {"sharding_type": "table_wise", "ranks": [1]}}}, "torchrec": ""}',
        "puts table 'user' on rank 2; expected 0 to 1",
    ),
)


@pytest.mark.parametrize(("plan", "message"), PLAN_FILES)
@pytest.mark.parametrize("arguments", [("predict", "task.toml", "--plan"), ("shard", "task.toml", "--evaluate")])
def test_a_wrong_plan_is_refused_by_predict_and_shard_alike(
    tmp_path: Path, arguments: tuple[str, ...], plan: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(tmp_path, {"task.toml": TASK, "plan.json": plan}, [*arguments, "plan.json", *PLATFORM], capsys)
    assert message in line
    assert "/plan.json" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("batch = 256 }", "batch = 256_000_000_000 }"), "table 'item', statistics: batch is 256000000000; expected"),
        (("pooling_factor = 20", "pooling_factor = 20e6"), "table 'item': pooling is 20000000.0; expected 0 to 1e6"),
        (("alpha = 0.9", f"alpha = 1{'0' * 400}"), "table 'user', skew: alpha is 1000"),
    ],
)
def test_a_wrong_number_of_a_task_is_refused_by_its_table(
    tmp_path: Path, change: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(tmp_path, {"task.toml": TASK.replace(*change)}, ["predict", "task.toml", *PLATFORM], capsys)
    assert f"/task.toml, {message}" in line


def test_rows_of_a_csv_are_whole_however_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for rows in ("1000000", "1_000_000", "1e6", "1.0E+6"):
        (tmp_path / "tables.csv").write_text(f"name,rows,dim\nuser,{rows},16\n")
        sizes.append(steptime.read(tmp_path / "tables.csv").description.parameters)
    assert len(set(sizes)) == 1
    for rows in ("10M", "1.5", "1e999", "nan", ""):
        files = {"tables.csv": f"name,rows,dim\nuser,{rows},16\n"}
        line = refusal(tmp_path, files, ["predict", "tables.csv", *PLATFORM], capsys)
        assert "line 2" in line
        assert not rows or f"rows is '{rows}'; expected a whole number, as 1000000" in line


@pytest.mark.parametrize("config", ["gpt2-ddp.toml", "dlrm_small.toml"])
def test_a_batch_that_ranks_cannot_share_is_answered_with_the_nearest_they_can(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(Path(__file__).parents[2] / "examples" / "configs" / config)
    assert run(["predict", file, "--platform", "8xh200-nvlink", "--ranks", "8", "--batch", "100"]) == 2
    assert "(96 or 104)" in capsys.readouterr().err
    assert run(["predict", file, "--platform", "8xh200-nvlink", "--ranks", "64", "--batch", "640"]) == 2
    assert "64xh200-ib400" in capsys.readouterr().err


def test_a_csv_cell_of_any_length_is_one_line_of_bounded_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cell in ("x" * 140_000, "9" * 5000):
        files = {"tables.csv": f"name,rows,dim\nuser,{cell},16\n"}
        line = refusal(tmp_path, files, ["predict", "tables.csv", *PLATFORM], capsys)
        assert "/tables.csv" in line
        assert "expected a" in line
        assert len(line) < 2000


def test_a_word_of_any_length_is_one_line_of_bounded_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["x" * 140_000],
        ["predict", "--" + "x" * 140_000],
        ["predict", "x" * 140_000],
        ["platforms", "a", "x" * 140_000],
    ):
        assert len(refusal(tmp_path, {}, words, capsys)) < 2000


def test_a_platform_says_which_file_names_a_part_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"task.toml": TASK, "mine.toml": 'schema_version = 1\nranks = 2\ndevice = "h300"\nfabric = "h200-nvlink"\n'}
    line = refusal(tmp_path, files, ["predict", "task.toml", "--platform", "mine.toml"], capsys)
    assert "/mine.toml: no device 'h300'" in line


def test_a_product_beyond_its_model_is_a_labelled_guess(capsys: pytest.CaptureFixture[str]) -> None:
    """Whose time, in single precision, is no number."""
    config = Path(__file__).parents[2] / "examples" / "configs" / "llama-8b.toml"
    assert run(["predict", str(config), "--platform", "8xh200-nvlink", "--batch", str(1 << 20), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["coverage"]["fallback"] > 0
    assert answer["step_time_ms"] > 1e6


def test_a_script_that_is_not_there_is_refused_before_it_is_said_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(tmp_path, {}, ["predict", str(tmp_path / "no.py"), "--platform", "1xh100"], capsys)
    assert "/no.py: no such file" in line
