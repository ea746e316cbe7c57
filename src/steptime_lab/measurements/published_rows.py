"""Rows of CSV files that others publish, each value checked as it is taken: what is wrong is one line with the file, the line
of it, the column and the way out.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from steptime._build.config_values import shortened
from steptime.errors import InputError, SteptimeError

MOST = 1 << 24
"""Of counts and times where no column says less: what claims to be more comes from a slip of the keyboard."""

_MOST_ROWS = 100_000
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row of a table and where it stands, for messages."""

    cells: Mapping[str, str]
    file: str
    line: int

    def text(self, column: str) -> str:
        """What a column says, in one line; empty where the row or the whole table has no such column."""
        return self.cells.get(column, "")

    def whole(self, column: str, least: int = 1, most: int = MOST) -> int:
        """A whole number in a range."""
        try:
            value = int(self.text(column))
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise self.wrong(column, f"a whole number from {least} to {most:,}")
        return value

    def number(self, column: str, below: float = MOST) -> float:
        """A number above 0, neither NaN nor infinite."""
        try:
            value = float(self.text(column))
        except ValueError:
            value = 0.0
        if not 0 < value < below:
            raise self.wrong(column, f"a number above 0 and below {below:,.0f}")
        return value

    def wrong(self, column: str, expected: str) -> InputError:
        """That a column does not say what was expected."""
        return InputError(f"{column} is {shortened(self.text(column))}; expected {expected}")


def rows_of_csv(file: Path, what: str, columns: Collection[str]) -> list[TableRow]:
    """The rows of a table; `what` it should be one of is said where it is none."""
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            read = [(reader.line_num, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{file}: not readable as a table of {what} ({error})") from error
    missing = [name for name in columns if not read or name not in read[0][1]]
    if missing:
        raise InputError(f"{file}: no column {missing[0]!r}; a table of {what} has {', '.join(columns)}")
    if len(read) > _MOST_ROWS:
        raise InputError(f"{file}: {len(read):,} rows; expected at most {_MOST_ROWS:,}")
    return [
        TableRow({str(key): " ".join(value.split()) for key, value in cells.items() if isinstance(value, str)}, file.name, line)
        for line, cells in read
    ]


def made_of(rows: Sequence[TableRow], make: Callable[[TableRow], _Made]) -> tuple[list[_Made], list[str]]:
    """What can be made of rows, and a line for each other."""
    made, refused = [], []
    for row in rows:
        try:
            made.append(make(row))
        except SteptimeError as error:
            refused.append(f"{row.file}, line {row.line}: {error}")
    return made, refused
