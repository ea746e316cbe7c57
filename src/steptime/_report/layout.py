"""How answers are laid out on a terminal: titled sections, lines, tables whose numbers are never cut, text taken literally."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from steptime._notices import Notices
from steptime.errors import printable

_INDENT = 2
_BODY_INDENT = 2 * _INDENT
_GAP = 2  # between columns
_TITLE_WIDTH = 10
_UNITS = re.compile(r"(?<=\d) (?=%|x\b|ms\b)")
_HELD = "\ue000"  # one column wide and no space: lines do not break here


def literal(text: str, style: str = "") -> Text:
    """Text from a file as it is: brackets are no markup, and what would steer the terminal is shown as unknown."""
    return Text(text if text.isprintable() else printable(text), style=style)


@dataclass(frozen=True)
class Paragraph:
    """Text in lines that never part a number from its unit."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The lines."""
        held = self.text.copy()
        held.plain = _UNITS.sub(_HELD, held.plain)
        for line in held.wrap(console, options.max_width, overflow="fold"):
            line.plain = line.plain.replace(_HELD, " ")
            yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """How narrow and how wide it can be."""
        return Measurement.get(console, options, self.text)


def body_width(console: Console) -> int:
    """Columns that the body of a section may fill."""
    return console.width - _BODY_INDENT - _INDENT


def grid(*justified: str) -> Table:
    """A table without head; columns are `left` or `right`, and keep their width."""
    table = Table.grid(padding=(0, _GAP))
    for justify in justified:
        table.add_column(justify="right" if justify == "right" else "left", no_wrap=True)
    return table


def width_of(rows: Sequence[Sequence[Text]]) -> int:
    """Columns that rows of a grid need, with a gap to one more column."""
    return sum(max(cell.cell_len for cell in column) + _GAP for column in zip(*rows, strict=True))


def print_title(console: Console, title: Text) -> None:
    """A line by itself, after an empty one."""
    console.print()
    console.print(Padding(Paragraph(title), (0, _INDENT), expand=False))


def print_heading(console: Console, command: str, *parts: str) -> None:
    """The first line of an answer: the command, and what it is about."""
    line = Text().append(f"steptime {command}", style="bold")
    for part in filter(None, parts):
        line.append(" · ", style="dim").append_text(literal(part))
    print_title(console, line)


def print_section(console: Console, title: str, note: str, body: RenderableType | None = None) -> None:
    """A title with a note, and what is set in under it."""
    print_title(console, Text().append(title, style="bold").append_text(literal(f"  {note}" if note else "", "dim")))
    if body is not None:
        print_body(console, body)


def print_body(console: Console, body: RenderableType) -> None:
    """What belongs to the section above, set in."""
    console.print(Padding(body, (0, _INDENT, 0, _BODY_INDENT), expand=False))


def print_numbers(console: Console, heads: Sequence[str], rows: Sequence[Sequence[Text | str]]) -> None:
    """A table of right-aligned cells under two-line heads; one below another, the first column again, where it is too wide.

    Names of the first column go on in the next line where they would leave no room for numbers.
    """
    widths = [max(_width(head), *(_width(row[i]) for row in rows), 0) for i, head in enumerate(heads)]
    room = body_width(console)
    widths[0] = _of_names(widths, room)
    for number, columns in enumerate(_parts(widths, room)):
        if number:
            console.print()
        table = Table(box=None, padding=(0, _GAP, 0, 0), show_edge=False, header_style="dim", pad_edge=False)
        for i in columns:
            table.add_column(
                heads[i], justify="right", no_wrap=bool(i), vertical="bottom", min_width=widths[i],
                max_width=None if i else widths[i], overflow="ellipsis" if i else "fold",
            )  # fmt: skip
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else literal(cell) for cell in (row[i] for i in columns)))
        print_body(console, table)


def _of_names(widths: Sequence[int], room: int) -> int:
    """Of the first column: its own width, or what leaves room for numbers, in one table if names have half of it then."""
    others = [width + _GAP for width in widths[1:]]
    if not others or widths[0] + max(others) <= room:
        return widths[0]
    beside = sum(others) if 2 * sum(others) <= room else max(others)
    return max(room - beside, 1)


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns in as few parts of about the same size as fit; every part begins with the first column."""
    others = range(1, len(widths))
    for count in range(1, len(others) + 1):
        size = -(-len(others) // count)
        parts = [[0, *others[begin : begin + size]] for begin in range(0, len(others), size)]
        if all(sum(widths[i] + _GAP for i in part) - _GAP <= room for part in parts):
            return parts
    return [[0, i] for i in others]


def _width(cell: Text | str) -> int:
    """Of the longest line."""
    return max((Text(line).cell_len for line in str(cell).split("\n")), default=0)


def print_line(console: Console, title: str, text: str, *, style: str = "", spaced: bool = True) -> None:
    """A title and what belongs to it, on one line where it fits."""
    table = Table.grid(padding=(0, _GAP))
    table.add_column(style="bold", no_wrap=True, min_width=_TITLE_WIDTH)
    table.add_column(style=style, overflow="fold")
    table.add_row(title, Paragraph(literal(text)))
    if spaced:
        console.print()
    console.print(Padding(table, (0, _INDENT), expand=False))


def print_notices(console: Console, notices: Notices) -> None:
    """Warnings, and in one line what the answer is based on; caveats stand with the headline."""
    if notices.warnings:
        table = Table.grid(padding=(0, 1))
        table.add_column(style="yellow")
        table.add_column(overflow="fold")
        for warning in notices.warnings:
            table.add_row("!", literal(warning))
        print_section(console, "Warnings", "", table)
    if notices.basis:
        print_line(console, "Based on", "; ".join(notices.basis), style="dim")
