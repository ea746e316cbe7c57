"""The sources of the site: docs/, pages made from the code, and what pages link to outside docs/.

Files of the repository that pages link to are published with the site, so that a copy of it works without a network; links to
folders become plain text.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import answers
import commands
import configs
import python_api

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Pages of the repository's root, and where the site has them. People who read the README there have the site's home here.
ROOT_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
FILES = "repository"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)\s*$", re.MULTILINE | re.DOTALL)


def generated() -> Mapping[str, Callable[[], str]]:
    """Pages made from the code, by their place in the site."""
    return {
        "reference/commands.md": commands.page,
        "reference/configs.md": configs.page,
        "reference/json.md": answers.page,
        "reference/python.md": python_api.page,
    }


def write_sources(folder: Path) -> None:
    """Lays out everything that Sphinx reads."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder)
    for name, place in ROOT_PAGES.items():
        if place != "index.md":
            (folder / place).write_text(_moved((ROOT / name).read_text(encoding="utf-8")), encoding="utf-8")
    for place, made in generated().items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(made(), encoding="utf-8")
    for page in sorted(folder.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(_led_back(text, page, folder), encoding="utf-8")


def outside(text: str, place: Path) -> Mapping[str, Path]:
    """Links of a page of docs/ that lead out of it, and the file or folder that each names."""
    found = {}
    for _, target in LINK.findall(FENCE.sub("", text)):
        path = Path(os.path.normpath(place.parent / target.partition("#")[0]))
        if "://" not in target and not target.startswith("#") and not path.is_relative_to(DOCS):
            found[target] = path
    return found


def _moved(text: str) -> str:
    """A page of the repository's root as a page of docs/."""

    def moved(match: re.Match[str]) -> str:
        label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        return f"[{label}]({target.removeprefix('docs/') if target.startswith('docs/') else f'../{target}'})"

    return LINK.sub(moved, text)


def _led_back(text: str, page: Path, folder: Path) -> str:
    """The page with links that leave docs/ leading to a copy of what they name."""
    leaving = outside(text, DOCS / page.relative_to(folder))

    def led(match: re.Match[str]) -> str:
        label, target = match.groups()
        path = leaving.get(target)
        if path is None or not path.exists():
            return match[0]  # a link to nothing stays one, and Sphinx says so
        if path.is_dir():
            return str(label)
        name = path.relative_to(ROOT).as_posix()
        copy = folder / ROOT_PAGES.get(name, f"{FILES}/{name}")
        if name not in ROOT_PAGES and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        anchor = target.partition("#")[2]
        return f"[{label}]({os.path.relpath(copy, page.parent)}{f'#{anchor}' if anchor else ''})"

    return LINK.sub(led, text)
