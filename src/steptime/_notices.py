"""What answers say besides numbers, by where they say it.

A plain text is a warning: something that a user can act on, or has to know of this very step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_NUMBERS = re.compile(r"\d+")


class Caveat(str):
    """What changes the meaning of a headline, and stands with it: another program is predicted than the one that runs."""

    __slots__ = ()


class Basis(str):
    """A standing fact that an answer rests on, and no warning: which devices were measured, what cuDNN may choose."""

    __slots__ = ()


_NAMES: dict[str, type[str]] = {"warning": str, "caveat": Caveat, "basis": Basis}


def saved(texts: Iterable[str]) -> list[str | dict[str, str]]:
    """Texts as JSON has them: a warning as it is, others with the name of their kind."""
    names = {kind: name for name, kind in _NAMES.items()}
    return [text if type(text) is str else {names[type(text)]: str(text)} for text in texts]


def restored(plain: Iterable[str | dict[str, str]]) -> tuple[str, ...]:
    """The same texts again."""
    pairs = (each.items() if isinstance(each, dict) else [("warning", each)] for each in plain)
    return tuple(_NAMES[kind](text) for each in pairs for kind, text in each)


class Notices(NamedTuple):
    """Texts by where they stand."""

    caveats: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    basis: tuple[str, ...] = ()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Notices:
        """Every text once; those that differ in numbers only, as one."""
        alike: dict[tuple[type[str], str], list[str]] = {}
        for text in dict.fromkeys(texts):
            alike.setdefault((type(text), _NUMBERS.sub("#", text)), []).append(text)
        found: dict[type[str], list[str]] = {Caveat: [], str: [], Basis: []}
        for (kind, _), each in alike.items():
            found[kind].append(kind(each[0] + (f" (and {len(each) - 1} more like this)" if len(each) > 1 else "")))
        return cls(tuple(found[Caveat]), tuple(found[str]), tuple(found[Basis]))

    @property
    def without_headline(self) -> Notices:
        """Where no headline says caveats, they are warnings."""
        return Notices((), (*self.caveats, *self.warnings), self.basis)

    def to_dict(self) -> dict[str, list[str]]:
        """Their keys in JSON; `verdict` has the caveats."""
        return {"warnings": list(self.warnings), "basis": list(self.basis)}

    def after(self, *texts: str) -> Notices:
        """The same behind others."""
        return Notices.of((*texts, *self.caveats, *self.warnings, *self.basis))
