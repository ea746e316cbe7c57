"""Comparing answers: what differs, whether it is more than errors, and for two the attribution that `diff` makes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.api.answer_schema import wrong_in

import steptime
from steptime._cli.app import run
from steptime._report.compare_text import verdict_words

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = EXAMPLES / "configs" / "dlrm_small.toml"
HEAVY = EXAMPLES / "configs" / "dlrm_heavy4.toml"
RECORDED = EXAMPLES / "h200_mps4_dlrm"
MACHINE = "2xh200-nvlink"


@cache
def gpt(batch: int, machine: str = "8xh200-nvlink", layers: int = 2) -> steptime.Prediction:
    config = EXAMPLES / "configs" / "gpt2-ddp.toml"
    return steptime.predict(config, machine, batch=batch, settings={"layers": layers, "width": 1536})


def test_the_same_twice_is_the_same() -> None:
    found = steptime.compare(gpt(64), gpt(64))
    assert [each.ratio for each in found.differences] == [1.0, 1.0]
    assert not found.differences[1].certain
    assert found.differs == {}
    assert found.diff is not None
    assert found.diff.total_ms == 0


def test_two_end_with_what_diff_says() -> None:
    found = steptime.compare(gpt(64), gpt(128))
    alone = steptime.diff(gpt(64), gpt(128))
    assert found.diff is not None
    assert found.diff.to_dict() == alone.to_dict() == found.to_dict()["diff"]
    assert steptime.compare(gpt(64), gpt(128), gpt(256)).diff is None


def test_a_large_difference_is_certain_and_a_small_one_is_not() -> None:
    found = steptime.compare(gpt(512), gpt(512, layers=6), gpt(520))
    _, longer, near = found.differences
    assert longer.certain
    assert longer.ratio > 1.5
    assert longer.interval[0] > 1
    assert longer.p_faster < 0.01
    assert not near.certain
    assert near.interval[0] < near.ratio < near.interval[1]
    assert found.per_sample  # batches differ, so that samples are compared
    assert near.ratio == pytest.approx((gpt(520).step_time_ms / 520) / (gpt(512).step_time_ms / 512))


def test_steps_of_unknown_batches_are_not_taken_for_the_same_work(tmp_path: Path) -> None:
    def of(batch: int, *, known: bool, name: str) -> Path:
        document = json.loads(json.dumps(gpt(batch).to_dict()))
        gone = {} if known else dict.fromkeys(("batch", "samples_per_s", "tokens_per_s"))
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({**document, **gone}))
        return file

    known = steptime.compare(of(64, known=True, name="a"), of(128, known=True, name="b"))
    assert known.warnings == ()
    assert "less time per sample than" in verdict_words(known)
    for second in (True, False):
        unknown = steptime.compare(of(64, known=False, name="a"), of(128, known=second, name="b"))
        assert not unknown.per_sample
        assert "not known" in unknown.warnings[0]
        assert list(unknown.warnings) == unknown.to_dict()["warnings"]
        assert "may do different amounts of work" in verdict_words(unknown)
    machines = steptime.compare(RECORDED, platform=["4xh200-nvlink", "4xh100-nvlink"])
    assert machines.warnings == ()  # one job is the same work wherever it runs


def test_errors_of_one_machine_cancel_and_those_of_two_do_not() -> None:
    same = steptime.compare(gpt(512), gpt(1024)).differences[1]
    other = steptime.compare(gpt(512), gpt(512, "8xh100-nvlink")).differences[1]
    narrow, wide = (each.interval[1] / each.interval[0] for each in (same, other))
    assert narrow < wide
    low, high = gpt(512).interval_ms
    assert narrow < (high / low) ** 2


def test_what_differs_is_every_input_that_does() -> None:
    found = steptime.compare(gpt(64), gpt(128, layers=6))
    assert found.differs["batch"] == [64, 128]
    assert found.differs["layers"] == [2, 6]
    assert "width" not in found.differs
    tables = steptime.compare(
        steptime.predict(SMALL, MACHINE), steptime.predict(SMALL, MACHINE, settings={"tables.user.rows": 1000})
    )
    assert {key for key in tables.differs if "rows" in key} == {"tables.user.rows"}


def test_answers_that_were_written_compare_as_those_at_hand(tmp_path: Path) -> None:
    files = []
    for batch in (64, 128):
        files.append(tmp_path / f"{batch}.json")
        files[-1].write_text(json.dumps(gpt(batch).to_dict()))
    written, here = steptime.compare(*files), steptime.compare(gpt(64), gpt(128))
    assert written.diff is None
    for one, other in zip(written.differences, here.differences, strict=True):
        assert one.ratio == pytest.approx(other.ratio, rel=1e-6)
        assert one.interval == pytest.approx(other.interval, rel=1e-4)


def test_a_sweep_is_all_of_its_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, table, page = tmp_path / "sweep.json", tmp_path / "a.csv", tmp_path / "a.html"
    swept = steptime.sweep(SMALL, MACHINE, batch=[1024, 2048])
    file.write_text(json.dumps(swept.to_dict()))
    words = ["compare", str(file), str(SMALL), "--platform", MACHINE, "--csv", str(table), "--html", str(page)]
    assert run([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [each["settings"].get("batch") for each in answer["variants"]] == [1024, 2048, None]
    assert answer["variants"][1]["step_time_ms"] == answer["variants"][2]["step_time_ms"]
    assert wrong_in(answer, "compare") == []
    assert answer["differs"]["batch"] == [1024, 2048, 2048]
    assert run(words) == 0
    assert "Verdict" in capsys.readouterr().out
    assert len(table.read_text().splitlines()) == 4
    assert "What differs" in page.read_text()


def test_recordings_compare_as_recorded() -> None:
    found = steptime.compare(RECORDED, RECORDED, platform=None)
    assert found.differences[1].ratio == 1.0
    both = steptime.compare(steptime.predict(RECORDED), steptime.predict(RECORDED, "4xh200-quarter-loopback"))
    assert both.differs["platform"] == [None, "4xh200-quarter-loopback"]


def damaged(change: dict[str, Any]) -> dict[str, Any]:
    return {**gpt(64).to_dict(), **change}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 2}, "schema_version 1"),
        ({"step_time_ms": "long"}, "step_time_ms"),
        ({"step_time_ms": -1}, "step_time_ms"),
        ({"interval_ms": [1]}, "interval_ms"),
        ({"draws_ms": [1, None]}, "draws_ms"),
        ({"memory": []}, "memory"),
        ({"samples_per_s": "many"}, "samples_per_s is damaged"),
    ],
)
def test_a_damaged_answer_is_one_line(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(damaged(change)))
    with pytest.raises(steptime.InputError, match=said):
        steptime.compare(file, gpt(64))


def test_one_answer_is_nothing_to_compare() -> None:
    with pytest.raises(steptime.InputError, match="give two or more"):
        steptime.compare(gpt(64))
