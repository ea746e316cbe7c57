"""The README: its commands run on what is shipped, its output is what they print, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from steptime._calibrate.harness.command import parser
from steptime._cli.app import run
from steptime_lab.adopt.command import parser as adopt_parser
from steptime_lab.measure.command import JOBS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def lines(output: str) -> list[str]:
    """The lines without the margin and what nobody sees at their ends."""
    return textwrap.dedent("\n".join(line.rstrip() for line in output.splitlines())).strip().splitlines()


def commands(program: str) -> list[list[str]]:
    parsed = [shlex.split(line, comments=True) for block in blocks("bash") for line in block.splitlines()]
    return [words for words in parsed if words[:1] == [program]]


def slow_if_long(words: list[str]) -> Any:
    """The words as a parameter; what reads a whole measured set or searches takes many seconds."""
    return pytest.param(words, marks=pytest.mark.slow) if words[1] in ("validate", "shard", "measure") else words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place where the README's paths exist: the examples, and a user's own run."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my_run").symlink_to(ROOT / "examples" / "h200_mps4_dlrm")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_of(words: list[str]) -> str:
    """The measuring job of a command; empty where it is none or needs no GPU."""
    asked = words[2] if words[1] == "measure" else words[1]
    return asked if asked in JOBS or asked == "adopt" else ""


@pytest.mark.parametrize("words", [words for words in commands("steptime") if job_of(words)], ids=" ".join)
def test_every_command_that_needs_a_gpu_is_understood(words: list[str]) -> None:
    job = job_of(words)
    given = (adopt_parser() if job == "adopt" else parser(JOBS[job])).parse_args(words[words.index(job) + 1 :])
    assert given.out.name.startswith("my_")


@pytest.mark.parametrize("words", [slow_if_long(words) for words in commands("steptime") if not job_of(words)], ids=" ".join)
def test_every_steptime_command_runs(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.is_dir()
    assert run(words[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("words", commands("make"), ids=" ".join)
def test_every_make_target_exists(words: list[str]) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if words[1] == "demo":
        assert "steptime replay examples/h200_mps4_dlrm --trace" in done.stdout


def test_the_pasted_output_is_what_the_command_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder.is_dir()
    (pasted,) = blocks("console")
    prompt, _, pasted = pasted.partition("\n")
    monkeypatch.setenv("COLUMNS", "100")
    assert run(shlex.split(prompt)[2:]) == 0
    printed = capsys.readouterr().out
    assert lines(pasted) == lines(printed), "paste it anew: python benchmarks/replay.py --readme-output"


def test_every_link_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


@pytest.mark.parametrize(("page", "marker"), [("README.md", "predict-output"), ("docs/accuracy.md", "replay-table")])
def test_there_is_a_place_for_what_is_measured(page: str, marker: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count(f"<!-- {marker} -->") == text.count(f"<!-- /{marker} -->") == 1
