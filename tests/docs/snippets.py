"""Code blocks of the documentation, and a folder that looks like a fresh clone to run them in.

A block is run as its page has it, after those before it on the page. What is in it says how:

- `sh` and `bash`: a script, which ends at the first command that fails; `python`: a program;
- `console`: commands after `$`, and what they print, which has to be the same; a line `...` stands for any lines.
  `python -m tests.docs.snippets` writes what they print now into the pages;
- a first line such as `# train.py` makes a file of the block instead;
- a paragraph in italics before it that begins with "Needs" says what a test has not got: the block is not run, but its
  commands and options have to exist. One that begins with "Takes" says how long: it is run with the slow tests.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
RUN = ("sh", "bash", "console", "python")
_FENCE = re.compile(r"^```(?P<language>[\w{}-]*)\n(?P<text>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (?P<name>[\w./-]+\.(?:py|toml|csv|json))\n")
_MARK = re.compile(r"\*(?P<kind>Needs|Takes) [^*]+\*")
LINKED = ("examples", "benchmarks", "docs", "lab", "scripts", "src", "tests", "Makefile", "pyproject.toml", "README.md")
WIDTH = 100


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    language: str
    text: str
    mark: str = ""  # "Needs" or "Takes"

    @property
    def file(self) -> str:
        """The name of the file that the block is, if it is one."""
        found = _FILE.match(self.text)
        return found["name"] if found else ""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command in a script, comments left out."""
        text = re.sub(r"\\\n\s*", " ", self.text)
        for line in re.sub(r"\s&&\s", "\n", text).splitlines():
            shown = line.removeprefix("$ ") if self.language == "console" else line
            if self.language == "console" and shown == line:
                continue
            words = shlex.split(shown, comments=True)
            if words:
                yield words


def unrun(page: Path) -> list[str]:
    """The text of all other blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [match["text"] for match in _FENCE.finditer(text) if match["language"] not in RUN]


def pages() -> list[Path]:
    """All pages with blocks that are run."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that are in a language that runs, and those that are files."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n\n")[2]
        mark = _MARK.fullmatch(" ".join(before.split()))
        line = text.count("\n", 0, match.start()) + 1
        block = Block(page, line, match["language"], match["text"], mark["kind"] if mark else "")
        if block.language in RUN or block.file:
            found.append(block)
    return found


def clone(folder: Path) -> dict[str, str]:
    """Makes a folder look like a fresh clone with the command installed; gives the environment that commands run in."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, words in (("steptime", "-m steptime"), ("python", ""), ("python3", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": str(WIDTH),
        "PYTHONWARNINGS": "ignore",
    }


def run(block: Block, folder: Path, environment: dict[str, str]) -> str:
    """What is wrong with a block when it is run; empty if nothing is."""
    if block.file:
        (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.file).write_text(block.text, encoding="utf-8")
        return ""
    if block.language == "console":
        printed = shown(block, folder, environment)
        return "" if alike(block.text, printed) else f"{block.where}: prints otherwise:\n{printed}"
    program = ["bash", "-euo", "pipefail"] if block.language in ("sh", "bash") else [sys.executable, "-"]
    done = _run(program, block.text, folder, environment)
    return (
        ""
        if done.returncode == 0
        else f"{block.where}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    )


def shown(block: Block, folder: Path, environment: dict[str, str]) -> str:
    """A console block with what its commands print now."""
    result = ""
    for line in (line for line in block.text.splitlines() if line.startswith("$ ")):
        done = _run(["bash", "-euo", "pipefail"], line[2:], folder, environment)
        text = done.stdout + done.stderr if done.returncode else done.stdout
        result += f"{line}\n{_trimmed(text)}\n"
    return result


def _run(program: list[str], text: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(program, input=text, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _trimmed(text: str) -> str:
    """Without the margin that all lines share, spaces at their ends, and empty lines around."""
    lines = [line.rstrip() for line in text.splitlines()]
    margin = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    return "\n".join(line[margin:] for line in lines).strip("\n")


def alike(pasted: str, printed: str) -> bool:
    """Whether a page has what was printed; `...` alone on a line stands for any lines."""
    parts = re.split(r"^\.\.\.\n", pasted.rstrip("\n") + "\n", flags=re.MULTILINE)
    return re.fullmatch(r"(?:.*\n)*?".join(map(re.escape, parts)), printed.rstrip("\n") + "\n") is not None


def refreshed(block: Block, folder: Path, environment: dict[str, str]) -> str:
    """A console block with what its commands print now, cut off where the page cuts it off."""
    printed = shown(block, folder, environment)
    kept, cut, _ = block.text.partition("\n...\n")
    return printed if not cut else "\n".join([*printed.splitlines()[: kept.count("\n") + 1], "...", ""])


def main() -> None:
    """Writes what commands print now into the console blocks of all pages."""
    for page in pages():
        chosen = [block for block in blocks(page) if block.language == "console" and not block.mark]
        if not chosen:
            continue
        text = page.read_text(encoding="utf-8")
        with TemporaryDirectory() as name:
            environment = clone(Path(name))
            for block in chosen:
                text = text.replace(block.text, refreshed(block, Path(name), environment))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
