"""`steptime whatif`: what it lists is what saves most, each as a what-if of its own says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import steptime
from steptime._cli.app import run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "platform"), [("prefetch_sync", None), ("h200_mps4_dlrm", None), ("prefetch_sync", "1xh200")])
def test_what_is_listed_saves_most_and_is_what_the_change_alone_saves(name: str, platform: str | None) -> None:
    found = steptime.whatif(EXAMPLES / name, platform).to_dict()
    saved = [each["saves_ms"] for each in found["changes"]]
    assert 0 < len(saved) <= 10
    assert saved == sorted(saved, reverse=True)
    assert found["tried"] >= len(saved)
    first = found["changes"][0]
    alone = steptime.predict(EXAMPLES / name, platform, what_if=[first["change"]]).to_dict()
    assert alone["changes"][0]["saves_ms"] == pytest.approx(first["saves_ms"], abs=1e-6)
    assert all(each["meaning"] for each in found["changes"])


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
