"""Bars: how large the errors of predicted steps may be, by source and group of cases, in a TOML file that is checked in."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import steptime_lab
from steptime.errors import InputError
from steptime_lab.validate.engine import Group, Summary, Validation

SHIPPED_BARS = Path(steptime_lab.__file__).parent / "data" / "bars.toml"
SCHEMA_VERSION = 1
SAMPLE = "sample"
ALL = "all"
# What a bar can be set for: the summary's field; none may be larger. `coverage` has a least and a largest value.
_MEASURES = {"geomean": "gmae", "mape": "mape", "p90": "p90", "max": "max"}
_COVERAGE = "coverage"


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure of a group of cases and what it may be, as fractions."""

    group: str
    measure: str
    least: float
    most: float

    def left_by(self, validation: Validation) -> str:
        """One line that says how the bar is left; empty where it is kept."""
        group = validation.whole if self.group == ALL else validation.groups.get(self.group)
        if group is None:
            return f"{self.group}: no case; the bar of its {self.measure} cannot be checked"
        value = self._value(group)
        if value is None:
            return f"{self.group}: no {self.measure} was found; the bar cannot be checked"
        if self.least <= value <= self.most:
            return ""
        span = f"{self.least:.1%} to {self.most:.1%}" if self.least else f"at most {self.most:.1%}"
        return f"{self.group}: {self.measure} is {value:.2%}, the bar is {span} (worst: {group.summary.worst})"

    def _value(self, group: Group) -> float | None:
        item: Summary = group.summary
        if self.measure == _COVERAGE:
            return item.interval_coverage
        return float(getattr(item, _MEASURES[self.measure]))


def read_bars(file: Path, section: str) -> list[Bar]:
    """The bars of a section: a source of steps, or `sample`; groups and figures are named as in the report."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{file}: not a readable file of bars ({error}); expected TOML like the shipped bars.toml") from error
    if document.get("schema_version") != SCHEMA_VERSION:
        result = document.get("schema_version")
        raise InputError(f"{file}: bars of version {result}, this steptime reads {SCHEMA_VERSION}; set schema_version")
    groups = document.get(section)
    if not isinstance(groups, dict):
        raise InputError(f"{file}: no bars for {section!r}; add a section [{section}.all]")
    return [
        _bar(file, group, measure, value)
        for group, figures in groups.items()
        for measure, value in _figures(file, group, figures)
    ]


def bars_left(validation: Validation, bars: list[Bar]) -> list[str]:
    """A line for every bar that is not kept."""
    return [line for line in (bar.left_by(validation) for bar in bars) if line]


def _figures(file: Path, group: str, figures: object) -> list[tuple[str, object]]:
    if not isinstance(figures, Mapping):
        raise InputError(f"{file}: {group!r} is {figures!r}; expected a table of figures, as in geomean = 0.05")
    return list(figures.items())


def _bar(file: Path, group: str, measure: str, value: object) -> Bar:
    if measure == _COVERAGE and isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)):
        return Bar(group, measure, float(value[0]), float(value[1]))
    if measure in _MEASURES and _is_number(value):
        return Bar(group, measure, 0.0, float(value))  # type: ignore[arg-type]
    expected = f"one of {', '.join(_MEASURES)} with a number, or {_COVERAGE} with two"
    raise InputError(f"{file}: {group!r} has {measure} = {value!r}; expected {expected}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
