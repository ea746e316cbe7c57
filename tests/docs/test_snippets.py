"""Every command and snippet of the documentation runs; those that need what a test has not got are at least understood."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.docs.site_scripts import script
from tests.docs.snippets import ROOT, Block, blocks, clone, pages, run, unrun

from steptime._cli.app import app

commands = script("commands")
CALLS = {info.name or info.callback.__name__: info.callback for info in app.registered_commands if info.callback}
PAGES = [page for page in pages() if blocks(page)]
# What a newcomer reads first; the rest is run with the slow tests, to keep the quick ones quick.
FIRST = ("README.md", "docs/quickstart.md", "docs/install.md")
NEEDING = [block for page in PAGES for block in blocks(page) if block.mark == "Needs"]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def failures(page: Path, folder: Path, *, slow: bool) -> list[str]:
    environment = clone(folder)
    chosen = [block for block in blocks(page) if block.mark == "" or (slow and block.mark == "Takes")]
    return [wrong for block in chosen if (wrong := run(block, folder, environment))]


@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) in FIRST], ids=name_of)
def test_what_is_read_first_runs(page: Path, tmp_path: Path) -> None:
    assert failures(page, tmp_path, slow=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if name_of(page) not in FIRST], ids=name_of)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    assert failures(page, tmp_path, slow=True) == []


@pytest.mark.parametrize("block", NEEDING, ids=lambda block: block.where)
def test_what_cannot_be_run_here_has_commands_and_options_that_exist(block: Block) -> None:
    for words in block.commands():
        if words[0] == "make" and shutil.which("make"):
            subprocess.run(["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, check=True)
        if words[0] == "steptime":
            check_words(words[1:])


def check_words(words: list[str]) -> None:
    """Fails where a command line has a command or an option that there is not."""
    words = words[: words.index("--")] if "--" in words else words
    name, given = words[0], {word.partition("=")[0] for word in words if word.startswith("-")}
    if name.startswith("-"):
        return  # of the command itself, as --install-completion
    assert name in CALLS, name
    parsers: list[argparse.ArgumentParser] = [made() for _, made in commands.OWN_PARSERS.get(name, ())]
    known = {each for parser in parsers for action in parser._actions for each in action.option_strings}
    if not parsers:
        infos = [info for _, _, info, _ in commands._parameters(CALLS[name]) if isinstance(info, commands.OptionInfo)]
        known = {each for info in infos for each in commands.spellings(info)}
    assert given <= known, sorted(given - known)


def test_few_blocks_are_left_out() -> None:
    counted = [block for page in PAGES for block in blocks(page) if not block.file]
    assert len(NEEDING) <= len(counted) / 4


def test_commands_stand_in_blocks_that_are_run() -> None:
    """A block without a language is not run, so no command may hide in one."""
    hidden = [
        f"{name_of(page)}: {text}"
        for page in pages()
        for text in unrun(page)
        if any(line.startswith(("steptime ", "$ steptime ")) for line in text.splitlines())
    ]
    assert hidden == []
