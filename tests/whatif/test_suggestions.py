"""`steptime whatif`: what it lists is what saves most, each as a what-if of its own says."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tests.api.answer_schema import wrong_in

import steptime
from steptime._cli.app import run
from steptime._report.whatif import print_suggestions

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "platform"), [("prefetch_sync", None), ("h200_mps4_dlrm", None), ("prefetch_sync", "1xh200")])
def test_what_is_listed_saves_most_and_is_what_the_change_alone_saves(name: str, platform: str | None) -> None:
    found = steptime.whatif(EXAMPLES / name, platform).to_dict()
    saved = [each["saves_ms"] for each in found["changes"] if not each["change"].startswith("batch")]
    assert 0 < len(saved) <= 10
    assert saved == sorted(saved, reverse=True)
    assert found["tried"] >= len(saved)
    first = found["changes"][0]
    alone = steptime.predict(EXAMPLES / name, platform, what_if=[first["change"]]).to_dict()
    assert alone["changes"][0]["saves_ms"] == pytest.approx(first["saves_ms"], abs=1e-6)
    assert all(each["meaning"] for each in found["changes"])


ROOFLINES = ("roofline", "* 0.5", "remove", "level")


@pytest.fixture(scope="module")
def gpt2() -> steptime.Suggestions:
    return steptime.whatif(EXAMPLES / "configs" / "gpt2.toml", "1xh200", batch=64)


def test_compiling_is_tried_and_saves_what_the_compiled_prediction_says(gpt2: steptime.Suggestions) -> None:
    saved = next(each for each in gpt2.savings if each.changes == ("compile",))
    compiled = steptime.predict(EXAMPLES / "configs" / "gpt2.toml", "1xh200", batch=64, compile="default")
    assert saved.after_ms == pytest.approx(compiled.step_time_ms, rel=1e-6)


def test_what_one_can_switch_on_stands_apart_from_bounds(gpt2: steptime.Suggestions) -> None:
    assert not any(each.changes[0].endswith(ROOFLINES[:2]) for each in gpt2.savings)
    assert gpt2.headroom and all(each.changes[0].endswith(ROOFLINES) for each in gpt2.headroom)
    document = gpt2.to_dict()
    assert wrong_in(document, "whatif") == []
    assert [each["change"] for each in document["headroom"]] == [each.changes[0] for each in gpt2.headroom]


def test_a_larger_batch_is_said_in_step_time_and_samples(
    capsys: pytest.CaptureFixture[str], gpt2: steptime.Suggestions
) -> None:
    doubled = next(each for each in gpt2.savings if each.changes == ("batch * 2",))
    assert doubled.saves_ms < 0 < doubled.speedup - 1
    assert doubled.speedup == pytest.approx(2 * doubled.before_ms / doubled.after_ms)
    config = str(EXAMPLES / "configs" / "gpt2.toml")
    assert run(["predict", config, "--platform", "1xh200", "--batch", "64", "--what-if", "batch * 2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"+{doubled.after_ms - doubled.before_ms:.3f}" in said
    assert f"{100 * (doubled.speedup - 1):+.1f} %" in said


def test_compiling_a_recording_is_refused_in_a_line() -> None:
    with pytest.raises(steptime.InputError, match="recording has the kernels that ran"):
        steptime.predict(EXAMPLES / "prefetch_sync", "1xh200", what_if=["compile"])
    with pytest.raises(steptime.InputError, match="goes with --platform"):
        steptime.predict(EXAMPLES / "prefetch_sync", what_if=["compile"])
    with pytest.raises(steptime.InputError, match="give one of them as --compile or --batch"):
        steptime.predict(EXAMPLES / "configs" / "gpt2.toml", "1xh200", what_if=["compile", "batch * 2"])


def test_the_host_waits_in_the_example_that_reads_a_value_every_step() -> None:
    changes = [each["change"] for each in steptime.whatif(EXAMPLES / "prefetch_sync").to_dict()["changes"]]
    assert any(change.startswith("sync:") for change in changes)
    assert "tf32 on" in changes


def test_the_command_prints_what_the_function_gives(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(EXAMPLES / "prefetch_sync")
    assert run(["whatif", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == steptime.whatif(path).to_dict()
    assert run(["whatif", path]) == 0
    out = capsys.readouterr().out
    assert "What if" in out
    assert "set_float32_matmul_precision" in out
    assert run(["whatif", str(EXAMPLES / "configs" / "gpt2.toml")]) == 2
    assert "--platform" in capsys.readouterr().err


@pytest.mark.parametrize("width", [60, 80, 100])
def test_long_names_of_changes_cut_no_number(width: int) -> None:
    """`sync:cudaEventSynchronize remove` left no room for the columns behind it."""
    answer, text = steptime.whatif(EXAMPLES / "prefetch_sync"), io.StringIO()
    print_suggestions(Console(file=text, width=width, highlight=False), answer)
    assert "…" not in text.getvalue()
    for saving in (*answer.savings, *answer.headroom):
        low, high = saving.interval_ms
        assert f"{-saving.saves_ms:+.3f}" in text.getvalue()
        assert f"{-high:+.3f} to {-low:+.3f}" in text.getvalue()
