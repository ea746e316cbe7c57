"""`steptime shard`: answers, files, and one line for what a user can cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steptime._build.dlrm.plan import DATA_PARALLEL, KINDS, TABLE_WISE, Placement, Plan
from steptime._cli import output
from steptime._cli.app import run
from steptime._cli.output import stdout
from steptime._report.shard.text import print_plan_tables

PLATFORM = ("--platform", "4xh200-quarter-loopback")
TABLES = "name,rows,dim,pooling_factor,kind\n" + "".join(f"t{i},{1000 * 3**i},32,{5 + 7 * i},zipf\n" for i in range(6))


EVALUATIONS = ("--evaluations", "60")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tables") / "tables.csv"
    file.write_text(TABLES, encoding="utf-8")
    return file


def test_json_has_the_best_plan_for_every_table_and_the_same_task_gives_it_again(
    tables: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for _ in range(2):
        assert run(["shard", str(tables), *PLATFORM, *EVALUATIONS, "--json"]) == 0
        answers.append({key: value for key, value in json.loads(capsys.readouterr().out).items() if key != "seconds"})
    found = answers[0]
    assert found == answers[1]
    assert set(found["best"]["plan"]) == {f"t{i}" for i in range(6)}
    assert found["best"]["step_time_ms"] <= min(found["rules"].values())
    assert len(found["ranks"]) == 4
    assert any("dense layers" in warning for warning in found["warnings"])


def test_text_page_and_torchrec_plan_are_written(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, plan = tmp_path / "page.html", tmp_path / "plan.json"
    arguments = ["shard", str(tables), *PLATFORM, *EVALUATIONS, "--html", str(page), "--torchrec", str(plan)]
    assert run(arguments) == 0
    said = capsys.readouterr().out
    for title in ("Best plan", "Ranks", "Why", "Runners-up", "Usual rules", "Bound by"):
        assert title in said
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    document = json.loads(plan.read_text(encoding="utf-8"))
    assert set(document["plan"][""]) == {f"t{i}" for i in range(6)}


def test_copies_are_called_copies_and_kinds_that_were_not_tried_are_named(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["shard", str(tables), *PLATFORM, *EVALUATIONS]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"tried: {', '.join(KINDS)}" in said
    head, *lines = TABLES.strip().splitlines()
    own = tmp_path / "kinds.csv"
    own.write_text("\n".join([f"{head},kinds", *(f"{line},table_wise data_parallel" for line in lines)]), encoding="utf-8")
    assert run(["shard", str(own), *PLATFORM, *EVALUATIONS]) == 0
    assert "tried: table_wise, data_parallel, not column_wise, row_wise," in " ".join(capsys.readouterr().out.split())
    for count in (8, 80):
        copied = {f"t{at}": Placement(DATA_PARALLEL, (0, 1)) for at in range(count // 2)}
        plan = Plan(2, {**copied, **{f"u{at}": Placement(TABLE_WISE, (at % 2,)) for at in range(count // 2)}})
        with stdout() as console:
            print_plan_tables(console, plan)
        words = " ".join(capsys.readouterr().out.split())
        assert "data_parallel" not in words
        assert (
            "every rank t0, t1, t2, t3 (copied)" if count == 8 else "copied to every rank: 40 tables; divided: none"
        ) in words


def test_missing_statistics_are_said_with_what_they_could_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ebc.json"
    values = [{"name": f"t{i}", "num_embeddings": 100_000, "embedding_dim": 32, "feature_names": [f"f{i}"]} for i in range(6)]
    file.write_text(json.dumps(values), encoding="utf-8")
    assert run(["shard", str(file), *PLATFORM, *EVALUATIONS, "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert any("6 tables without a pooling factor" in one and "longer than the best plan's" in one for one in warnings)


def test_given_plans_are_predicted(tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = tmp_path / "plans.json"
    plans.write_text(json.dumps({"one": {f"t{i}": 0 for i in range(6)}, "dealt": {f"t{i}": i % 4 for i in range(6)}}))
    assert run(["shard", str(tables), *PLATFORM, "--evaluate", str(plans), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    assert [plan["name"] for plan in found] == ["dealt", "one"]
    assert all(len(plan["ranks"]) == 4 and plan["reasons"] and plan["bound_by"] for plan in found)
    assert run(["shard", str(tables), *PLATFORM, "--evaluate", str(plans)]) == 0
    said = capsys.readouterr().out
    assert all(title in said for title in ("dealt", "Ranks", "Why", "Bound by"))


def test_a_plan_written_for_torchrec_is_evaluated_and_keeps_to_pins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pinned, plan = tmp_path / "pinned.csv", tmp_path / "plan.json"
    head, *lines = TABLES.splitlines()
    pinned.write_text("\n".join((f"{head},pinned", f"{lines[0]},3", *(f"{line}," for line in lines[1:]))), encoding="utf-8")
    assert run(["shard", str(pinned), *PLATFORM, *EVALUATIONS, "--torchrec", str(plan), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["plan"]["t0"] == [3]
    assert run(["shard", str(pinned), *PLATFORM, "--evaluate", str(plan), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["plans"]
    assert (found["plan"], found["step_time_ms"]) == (best["plan"], pytest.approx(best["step_time_ms"]))
    pinned.write_text(pinned.read_text(encoding="utf-8").replace(f"{lines[0]},3", f"{lines[0]},1"), encoding="utf-8")
    assert run(["shard", str(pinned), *PLATFORM, "--evaluate", str(plan)]) == 2
    assert "table 't0' is on ranks [3] and pinned to 1" in capsys.readouterr().err


def test_another_fabric_and_headroom_change_the_answer(tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for more in ((), ("--fabric", "h200-nvlink"), ("--headroom", "0.5")):
        assert run(["shard", str(tables), *PLATFORM, *EVALUATIONS, *more, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["best"]["step_time_ms"] < found[0]["best"]["step_time_ms"]
    assert found[2]["ranks"][0]["limit_bytes"] == found[0]["ranks"][0]["limit_bytes"] // 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--ranks", "8"), "on 8 ranks: platform 4xh200-quarter-loopback joins 4"),
        (("--batch", "1001"), "a batch of 1001 cannot be split evenly"),
        (("--memory", "141"), "141 is in bytes; did you mean 141GB?"),
        (("--memory", "2000000"), "does not fit on 4 ranks: every rank needs"),
        (("--memory", "120000000"), "What would help: (1)"),
        (("--evaluate", "nowhere.json"), "nowhere.json: no such file"),
    ],
)
def test_what_a_user_can_cause_is_one_line(
    tables: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    assert run(["shard", str(tables), *PLATFORM, *more]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train.py", "print()", "or `steptime predict` for a script"),
        ("decoder.toml", 'kind = "transformer"', "a transformer has no tables to place; `steptime plan`"),
    ],
)
def test_what_is_no_task_is_told_which_command_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, said: str
) -> None:
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    assert run(["shard", str(file), *PLATFORM]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1


def test_a_long_search_says_how_far_it_is(
    tables: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LINE_EVERY_S", 0.0)
    assert run(["shard", str(tables), *PLATFORM, *EVALUATIONS, "--json"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("steptime: searching plans: ") for line in said)
    assert all(any(part in line for line in said) for part in ("of memory is known", "plans evaluated", "of the answer played"))
