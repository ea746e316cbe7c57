"""Releasing: a tag is the version of the package, the notes are what the changelog says of it, workflows call what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import steptime

ROOT = Path(__file__).parents[1]
CHANGELOG = """# Changelog

## [Unreleased]

- later

## [1.2.0] - 2026-01-01

### Added

- this

## [1.1.0] - 2025-01-01

- earlier
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of version 1.2.0 with three sections in its changelog."""
    (tmp_path / "scripts").mkdir()
    for name in ("check_release.sh", "release_notes.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "src" / "steptime").mkdir(parents=True)
    (tmp_path / "src" / "steptime" / "__init__.py").write_text('__version__ = "1.2.0"\n', encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    return tmp_path


def script(folder: Path, name: str, tag: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(folder / "scripts" / name), tag], capture_output=True, text=True, check=False)


def test_the_notes_of_a_release_are_its_section_alone(clone: Path) -> None:
    done = script(clone, "release_notes.sh", "v1.2.0")
    assert done.stdout.split() == ["###", "Added", "-", "this"]


def test_a_release_without_notes_is_refused(clone: Path) -> None:
    done = script(clone, "release_notes.sh", "v1.3.0")
    assert done.returncode != 0
    assert "no section [1.3.0]" in done.stderr


def test_a_tag_that_is_not_the_version_is_refused(clone: Path) -> None:
    assert script(clone, "check_release.sh", "v1.2.0").returncode == 0
    done = script(clone, "check_release.sh", "v1.1.0")
    assert done.returncode != 0
    assert "v1.2.0" in done.stderr


def test_the_version_is_where_the_release_looks_for_it() -> None:
    text = (ROOT / "src" / "steptime" / "__init__.py").read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE) == [steptime.__version__]


def test_workflows_call_scripts_and_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [
        command
        for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for command in re.findall(r"^\s*- run: (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert any(command.startswith(".ci/run") for command in commands)
    for command in commands:
        first, *others = re.sub(r'\w+="[^"]*"|\w+=\S+', "", command).split()
        assert not first.startswith(("scripts/", ".ci/")) or (ROOT / first).stat().st_mode & 0o100
        assert first != "make" or (others and set(others) <= targets)


def test_the_changelog_has_the_sections_of_its_form_once_and_in_order() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    form = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    for release in text.split("\n## ")[1:]:
        sections = re.findall(r"^### (.+)$", release, re.MULTILINE)
        assert sections == [each for each in form if each in sections]
