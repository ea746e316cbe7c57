"""A page without a script: one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence

from steptime import __version__
from steptime._report.html.markup import Markup, digest, join, page_part, tag


def static_page(command: str, name: str, kind: str, sections: Sequence[Markup], *, styles: str = "") -> str:
    """The page of a command's answer about something that is called so; `styles` are those of its own."""
    style = page_part("style.css") + styles
    policy = f"default-src 'none'; img-src data:; style-src {digest(style)}"
    head = join(
        (
            Markup('<meta charset="utf-8">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
            Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Markup('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
            tag("title", f"{name} · {kind} · steptime"),
            Markup(f"<style>{style}</style>"),
        )
    )
    body = join(
        (
            tag("header", tag("p", f"steptime {command}", class_="brand"), tag("h1", name)),
            tag("main", *sections),
            tag("footer", f"steptime {__version__}"),
        )
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{body}</body>\n</html>\n'


def section(title: str, note: str, *content: Markup) -> Markup:
    """A part of a page under a title."""
    return tag("section", tag("h2", f"{title} ", tag("small", note)), *content)
