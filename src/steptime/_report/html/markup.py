"""HTML that cannot be broken by what traces call things: text is escaped unless it was made here.

Widths of bars are attributes of SVG shapes: the page's content policy forbids styles on elements, and shapes are printed where
backgrounds are not.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib import resources

from steptime.errors import printable

# Kernels' names are templates of any length; a person reads the beginning.
NAME_AT_MOST = 600

# Tables with no more columns than these are not as wide as a page: an eye loses the row.
_FEW_COLUMNS = 3
_EMPTY = ("rect", "input", "col")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def clean(text: str) -> str:
    """Text from a file as it is shown: what would steer a page is unknown, what nobody reads is left out."""
    shown = text if len(text) <= NAME_AT_MOST else text[: NAME_AT_MOST - 1] + "…"
    return printable(shown)


def escape(text: str) -> Markup:
    """Text as HTML; what is HTML already stays as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(clean(text)))


def tag(name: str, *children: str, **attributes: str | None) -> Markup:
    """An element. A trailing underscore of an attribute's name is dropped, others become dashes; None leaves it out."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items() if value is not None
    )
    if name in _EMPTY:
        return Markup(f"<{name}{text}>" if name != "rect" else f"<rect{text}/>")
    return Markup(f"<{name}{text}>{join(children)}</{name}>")


def join(parts: Sequence[str], between: str = "") -> Markup:
    """Parts one after another."""
    return Markup(escape(between).join(escape(part) for part in parts))


def swatch(style: str) -> Markup:
    """A small square in the colour of a class."""
    return tag("svg", tag("rect", width="10", height="10", rx="2", class_=style), class_="swatch", aria_hidden="true")


def bar(parts: Sequence[tuple[float, str]], label: str) -> Markup:
    """A bar of parts one after another: shares of its whole width, and the class that colours each."""
    shapes, begin = [], 0.0
    for share, style in parts:
        width = min(max(share, 0.0), max(1.0 - begin, 0.0))
        shapes.append(tag("rect", x=_percent(begin), width=_percent(width), height="100%", class_=style))
        begin += width
    return tag("svg", *shapes, class_="bar", role="img", aria_label=label)


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,)) -> Markup:
    """A table with a head; columns are numbers, aligned right, but for those of `words`. The first cell of a row names it."""

    def cell(kind: str, column: int, content: str, **attributes: str) -> Markup:
        return tag(kind, content, class_=None if column in words else "number", **attributes)

    head = tag("tr", *(cell("th", column, name, scope="col") for column, name in enumerate(heads)))
    body = [
        tag("tr", cell("th", 0, row[0], scope="row"), *(cell("td", column, item) for column, item in enumerate(row) if column))
        for row in rows
    ]
    text = tag("caption", caption, class_="spoken")
    whole = tag("table", text, tag("thead", head), tag("tbody", *body))
    # On a narrow screen it scrolls, which those without a pointer do by focusing it.
    style = "scroll few" if len(heads) <= _FEW_COLUMNS else "scroll"
    return tag("div", whole, class_=style, tabindex="0", role="region", aria_label=caption)


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"


def page_part(name: str) -> str:
    """A file that pages are made of."""
    return resources.files("steptime._report").joinpath("page", name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """How a content policy names an element's text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
