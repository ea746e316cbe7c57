"""Everything steptime raises on purpose.

SteptimeError
├── InputError          a file or an argument is wrong: one line, exit code 2
│   ├── TraceError          a trace that cannot be read at all
│   └── UnsupportedError    strict mode: something that no model covers
└── DeadlockError       ranks that can never meet at a collective
"""

from __future__ import annotations

# Of a message: what a file says may be of any length, and the end says what to do.
_LONGEST, _KEPT = 1600, 700


def one_line(text: str) -> str:
    """A message on one line that a terminal may show, however long what it quotes is: the middle is left out."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[:_KEPT]} ... {line[-_KEPT:]}"


def printable(text: str) -> str:
    """Text from a file as a terminal or a page may show it: what would steer them is replaced."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


class SteptimeError(Exception):
    """Base of every error a user can cause; whatever its message quotes from a file, it is one line."""

    def __str__(self) -> str:
        return one_line(super().__str__())


class InputError(SteptimeError):
    """What was given cannot be used. The message says what, where and what to do."""


class TraceError(InputError):
    """A trace file that holds nothing usable."""


class DeadlockError(SteptimeError):
    """Ranks wait for each other for ever. The message names ranks, collective and who is missing."""


class UnsupportedError(InputError):
    """No model covers an op or a lookup, and `strict` does not allow a labelled guess."""
