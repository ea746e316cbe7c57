"""Differences of steps: their parts add up, say what was changed, and nothing of a step against itself."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

import steptime
from steptime._cli.app import run
from steptime._diff.attribute import HOST, WAITING

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORDINGS = ("h200_mps4_dlrm", "prefetch_sync", "gpt_fsdp2_small", "dlrm_overlap4")


@cache
def predicted(name: str, platform: str | None = None, *what_if: str) -> steptime.Prediction:
    return steptime.predict(EXAMPLES / name, platform, what_if=what_if)


def adds_up(answer: steptime.Compared) -> None:
    longer = max(answer.difference.before.step_time_ms, answer.difference.after.step_time_ms)
    assert sum(answer.parts.values()) == pytest.approx(answer.total_ms, abs=1e-6 * longer)


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_step_does_not_differ_from_itself(name: str) -> None:
    answer = steptime.diff(predicted(name), predicted(name))
    assert answer.difference.matched == 1.0
    assert answer.total_ms == 0
    assert all(abs(value) < 1e-9 for value in answer.parts.values())


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("prefetch_sync", "matmul * 0.5", "faster matmul"),
        ("prefetch_sync", "matmul * 2", "slower matmul"),
        ("h200_mps4_dlrm", "host * 3", HOST),
        ("gpt_fsdp2_small", "communication * 2", "slower communication"),
        ("dlrm_overlap4", "all_to_all no-overlap", WAITING),
    ],
)
def test_what_was_changed_is_the_part(name: str, change: str, part: str) -> None:
    before, after = predicted(name), predicted(name, None, change)
    answer = steptime.diff(before, after)
    adds_up(answer)
    assert next(iter(answer.parts)) == part
    assert answer.parts[part] == pytest.approx(answer.total_ms, rel=0.02)
    back = steptime.diff(after, before)
    adds_up(back)
    assert back.total_ms == pytest.approx(-answer.total_ms)


def test_what_one_side_alone_has_is_removed_or_added() -> None:
    whole = predicted("prefetch_sync")
    answer = steptime.diff(EXAMPLES / "prefetch_sync", EXAMPLES / "gpt_fsdp2_small")
    adds_up(answer)
    assert answer.difference.matched < 0.9
    assert any(name.startswith("added attention") for name in answer.parts)
    back = steptime.diff(EXAMPLES / "gpt_fsdp2_small", whole)
    adds_up(back)
    assert any(name.startswith("removed attention") for name in back.parts)
    for unlike in (answer, back):
        assert "may be different models" in unlike.to_dict()["warnings"][0]
    assert not any("different models" in text for text in steptime.diff(whole, whole).to_dict()["warnings"])


def test_a_recording_and_its_prediction_are_matched_op_by_op() -> None:
    for name, platform in (("prefetch_sync", "1xh200"), ("h200_mps4_dlrm", "4xh200-quarter-loopback")):
        answer = steptime.diff(EXAMPLES / name, EXAMPLES / name, after_platform=platform)
        adds_up(answer)
        assert answer.difference.matched > 0.9


def test_two_batches_of_a_config_differ_by_the_work_on_samples() -> None:
    config = EXAMPLES / "configs" / "bert.toml"
    few, many = (steptime.predict(config, "1xh200", batch=batch) for batch in (64, 128))
    answer = steptime.diff(few, many)
    adds_up(answer)
    assert answer.difference.matched == 1.0
    assert answer.parts["slower matmul"] > 0.1 * answer.total_ms > 0
    assert abs(answer.parts[WAITING]) < 0.1 * answer.total_ms
    assert not any(name.startswith(("added", "removed")) for name in answer.parts)


def test_the_command_writes_text_json_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = str(EXAMPLES / "prefetch_sync"), tmp_path / "page.html"
    assert run(["diff", one, one, "--after", "1xh200", "--html", str(other)]) == 0
    out = capsys.readouterr().out
    assert "they add up to the difference" in out
    page = other.read_text(encoding="utf-8")
    assert "Content-Security-Policy" in page
    assert "<script" not in page
    assert page.count("together") == 1
    assert run(["diff", one, one, "--after", "1xh200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["parts"].values()) == pytest.approx(found["total_ms"], abs=1e-4)
    assert run(["diff", one, one, "--html", str(other)]) == 0
    assert "all others" not in capsys.readouterr().out + other.read_text(encoding="utf-8")  # of parts that are all zero
    assert run(["diff", one, str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


CHANGES = (
    "matmul * 0.5", "host remove", "sync remove", "device * 2", "communication overlap", "communication no-overlap",
    "cuda graph", "python remove", "rank:0 level", "optimizer fused", "tf32 on", "bf16 on", "batch * 2", "op:aten:: remove",
    "kernel:* = 3us", "all_to_all remove", "matmul roofline",
)  # fmt: skip


def test_of_an_eager_and_a_compiled_step_it_is_said_what_generated_kernels_stand_for() -> None:
    compiled = EXAMPLES.parent / "tests" / "support" / "recordings" / "h200_gpt_default"
    eager = EXAMPLES / "prefetch_sync"
    said = steptime.diff(eager, compiled).to_dict()["warnings"][0]
    assert said.startswith("one of the two is compiled")
    assert "torch.compile generated have no counterpart" in said
    assert not any("one of the two" in text for text in steptime.diff(compiled, compiled).to_dict()["warnings"])
