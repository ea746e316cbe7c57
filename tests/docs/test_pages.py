"""Pages say what is so: messages that they explain are printed, places for generated tables are there, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.snippets import ROOT, alike

SOURCES = re.sub(
    r"""["']\s*\n\s*f?["']""",  # a message over several lines of code
    "",
    "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "src" / "steptime").rglob("*.py"))),
)


def test_every_message_that_troubleshooting_explains_is_one_that_is_printed() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    first = [cell for line in page.splitlines() if line.startswith("| `") for cell in re.findall(r"^\| `([^`]+)`", line)]
    parts = [part.strip() for message in first for part in re.split(r"\.\.\.|\b[NM]\b|[()]", message) if part.strip()]
    assert len(parts) > 15
    assert [part for part in parts if part not in SOURCES] == []


@pytest.mark.parametrize(("page", "marker"), [("docs/accuracy.md", "replay-table")])
def test_there_is_a_place_for_what_is_measured(page: str, marker: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count(f"<!-- {marker} -->") == text.count(f"<!-- /{marker} -->") == 1


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_of_the_root_pages_leads_to_a_file(page: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 100


def test_the_version_is_in_one_place() -> None:
    holding = [
        path
        for path in (ROOT / "pyproject.toml", ROOT / "lab" / "pyproject.toml", ROOT / "scripts" / "site" / "conf.py")
        if re.search(r"""^(version|release)\s*=\s*["']\d""", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert holding == []


@pytest.mark.parametrize(
    ("pasted", "printed", "same"),
    [
        ("a\n...\nc\n", "a\nb\nb\nc\n", True),
        ("a\n...\n", "a\nb\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("...\nb\n", "a\nc\n", False),
    ],
)
def test_dots_stand_for_any_lines(pasted: str, printed: str, same: bool) -> None:
    assert alike(pasted, printed) is same


def test_every_page_of_the_site_is_in_its_contents() -> None:
    listed = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    missing = {page for page in pages if not re.search(rf"(^|<){re.escape(page)}(>|$)", listed, re.MULTILINE)}
    assert missing <= {"index", *(page for page in pages if Path(page).parent.name == "decisions")}
