"""Completion: a shell that asks gets the names that there are, quickly, and nothing heavy is loaded for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import steptime
from steptime._cli.completion import settings
from steptime._hardware.fabric import fabric_names
from steptime._platforms.platform import shipped_platforms

SOURCE = Path(steptime.__file__).parent.parent
HEAVY = {"numpy", "pyarrow", "rich", "torch", "msgspec"}


def offered(words: str, shell: str = "bash") -> list[str]:
    """What is offered for the last word of a command line, as `complete_bash` and its like have it."""
    line = words.split(" ")
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(line) - 1), "_TYPER_COMPLETE_ARGS": words}
    environment = {**os.environ, **asked, "_STEPTIME_COMPLETE": f"complete_{shell}", "PYTHONPATH": str(SOURCE)}
    environment |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_WORD_TO_COMPLETE": line[-1]}
    done = subprocess.run([sys.executable, "-m", "steptime"], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_every_shipped_platform_is_offered_wherever_a_platform_is_named() -> None:
    names = {parts.name for parts in shipped_platforms()}
    for words in ("steptime predict x --platform ", "steptime plan x --platform ", "steptime platforms "):
        assert set(offered(words)) == names


def test_the_last_platform_of_a_list_is_completed() -> None:
    assert offered("steptime sweep x --platform 1xh200,8xh200-n") == ["1xh200,8xh200-nvlink"]


def test_fabrics_are_offered() -> None:
    assert offered("steptime predict x --fabric ") == fabric_names()


@pytest.mark.parametrize("words", ["steptime predict exam", "steptime predict x --platform ./my", "steptime shard ta"])
def test_files_are_left_to_the_shell(words: str) -> None:
    assert offered(words) == []


def test_keys_of_configs_are_offered_with_their_tables() -> None:
    assert {"parallel.fsdp=", "experts.top_k=", "batch=", "constraints.headroom="} <= set(settings(""))
    assert offered("steptime predict x --set parallel.fs") == ["parallel.fsdp="]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_its_commands_and_options(shell: str) -> None:
    assert "predict" in " ".join(offered("steptime pred", shell))
    assert "--platform" in " ".join(offered("steptime predict x --platf", shell))
    done = subprocess.run(
        [sys.executable, "-m", "steptime", "--show-completion", shell],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "_STEPTIME_COMPLETE" in done.stdout


def test_nothing_heavy_is_loaded() -> None:
    script = (
        "import sys\n"
        "from steptime._cli.completion import BY_OPTION\n"
        "[call('') for call in BY_OPTION.values()]\n"
        "import steptime._cli.app\n"
        "print(*sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())
