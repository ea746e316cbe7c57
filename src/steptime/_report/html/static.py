"""A page without a script: one file that needs no network."""

from __future__ import annotations

import re
from collections.abc import Sequence

from steptime import __version__
from steptime._report.html.markup import Markup, digest, join, page_part, tag


def static_page(
    command: str, name: str, kind: str, sections: Sequence[Markup], links: Sequence[str] = (), *, styles: str = ""
) -> str:
    """The page of a command's answer about something that is called so.

    `links` are titles of sections, `styles` are those of its own.
    """
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
            tag("a", "To the answer", class_="skip", href="#summary"),
            tag("header", tag("p", f"steptime {command}", class_="brand"), tag("h1", name), _links(links), _other_colours()),
            tag("main", *sections),
            tag("footer", f"steptime {__version__}"),
        )
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>{body}</body>\n</html>\n'


def section(title: str, note: str, *content: Markup) -> Markup:
    """A part of a page under a title."""
    name = _id(title)
    heading = tag("h2", f"{title} ", tag("small", note), id=f"{name}-title")
    return tag("section", heading, *content, id=name, aria_labelledby=f"{name}-title")


def _id(title: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def _links(titles: Sequence[str]) -> Markup:
    if not titles:
        return Markup()
    return tag("nav", *(tag("a", title, href=f"#{_id(title)}") for title in titles), aria_label="Sections")


def _other_colours() -> Markup:
    """Light where the system is dark and the other way round: by the style sheet, for there is no script."""
    box = tag("input", type="checkbox", id="theme")
    return tag("label", box, tag("span", "Light", class_="if-dark"), tag("span", "Dark", class_="if-light"), class_="buttons")
