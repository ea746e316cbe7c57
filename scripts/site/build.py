"""Builds the site of the documentation: `python scripts/site/build.py [FOLDER]`, by default into out/site.

Warnings are errors: a page that no list of contents has, a link or an anchor that leads nowhere, a code block in an unknown
language.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pages import ROOT, write_sources
from sphinx.cmd.build import main as sphinx


def build(target: Path) -> int:
    sources = target.with_name(f"{target.name}-sources")
    write_sources(sources)
    settings = str(Path(__file__).parent)
    made = sphinx(["-q", "-W", "--keep-going", "-E", "-d", f"{sources}-cache", "-c", settings, str(sources), str(target)])
    if made == 0:
        print(f"{target / 'index.html'}")
    return made


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "out" / "site"))
