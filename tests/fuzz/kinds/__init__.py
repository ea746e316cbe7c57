"""All kinds of inputs that are damaged, by name: what every module of this folder has in its `KINDS`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from tests.fuzz.case import Case, Kind, draw_of

_FOLDER = Path(__file__).parent


def _found() -> dict[str, Kind]:
    kinds: dict[str, Kind] = {}
    for module in sorted(each.name for each in iter_modules([str(_FOLDER)])):
        kinds |= import_module(f"{__name__}.{module}").KINDS
    return kinds


KINDS: Mapping[str, Kind] = _found()


def case_of(kind: str, number: int) -> Case:
    """One case; the same number is the same case."""
    return KINDS[kind](draw_of(kind, number))


def place_of(index: int) -> tuple[str, int]:
    """The kind and number of the case with this index among all: kinds take turns."""
    names = list(KINDS)
    return names[index % len(names)], index // len(names)
