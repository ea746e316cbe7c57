"""Predicted against measured: cases, groups of them by name, baselines beside, and bars that errors have to keep.

A set declares its cases with the names of their groups; the rest is the same for all sets.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

import steptime_lab
from steptime._models.error import gmae
from steptime._processes import workers
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]
Result = TypeVar("Result")

SHIPPED_BARS = Path(steptime_lab.__file__).parent / "data" / "bars.toml"
SCHEMA_VERSION = 1
SAMPLE = "sample"
ALL = "all"
# What a bar can be set for: the summary's field; none may be larger. `coverage` has a least and a largest value.
_MEASURES = {"geomean": "gmae", "mape": "mape", "p90": "p90", "max": "max"}
_COVERAGE = "coverage"
_REFUSED_SHOWN = 20


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """One question with its measured answer, in any unit of time."""

    name: str
    predicted: float
    measured: float
    spread: float | None = None  # of the repeats, (90th - 10th percentile) / median
    interval: tuple[float, float] | None = None  # that should hold nine of ten measured times, where one is predicted
    repeat_errors: tuple[float, ...] = ()  # of each repeat against the mean of the others

    @property
    def error(self) -> float:
        """Relative, signed."""
        return (self.predicted - self.measured) / self.measured

    @property
    def covered(self) -> bool | None:
        """Whether the predicted interval holds the measured time; None without an interval."""
        return None if self.interval is None else self.interval[0] <= self.measured <= self.interval[1]

    @property
    def half_width(self) -> float | None:
        """Of the interval, relative to the prediction."""
        if self.interval is None or not self.predicted:  # what launches nothing
            return None
        return (self.interval[1] - self.interval[0]) / (2.0 * self.predicted)

    def by(self, predicted: float) -> MeasuredCase:
        """The same case as somebody else predicts it, who says nothing of intervals or repeats."""
        return replace(self, predicted=predicted, interval=None, repeat_errors=())


@dataclass(frozen=True, slots=True)
class Summary:
    """Errors of many cases, as fractions."""

    rows: int
    gmae: float
    mape: float
    p90: float
    max: float
    worst: str  # the case with the largest error
    bias: float  # of the sum: predicted / measured - 1
    median_error: float  # signed
    interval_coverage: float | None
    sharpness: float | None  # median half-width of the intervals, relative to the prediction
    noise_floor: float | None  # the same geometric mean, of one repeat against the mean of the others


@dataclass(frozen=True)
class Group:
    """Cases under a name, with the baselines on the same ones."""

    summary: Summary
    baselines: Mapping[str, Summary] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compared:
    """A case, the same case as each baseline has it, and the groups it belongs to.

    Groups are shown in the order of their places here, those of one place by name; None where it belongs to none of a place.
    """

    case: MeasuredCase
    groups: tuple[str | None, ...] = ()
    baselines: Mapping[str, MeasuredCase] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """What `steptime validate` found for one set."""

    name: str
    title: str
    cases: Sequence[MeasuredCase]
    whole: Group
    groups: Mapping[str, Group]
    facts: Mapping[str, float] = field(default_factory=dict)  # named numbers that are no errors of cases
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        compared: Sequence[Compared],
        *,
        whole: Sequence[Compared] | None = None,
        groups: Mapping[str, Group] | None = None,
        **more: Any,
    ) -> Validation:
        """All cases of a set; the whole may be some of them, and groups others than theirs."""
        of_all = group(compared if whole is None else whole)
        return cls(
            name, title, [each.case for each in compared], of_all, grouped(compared) if groups is None else groups, **more
        )


def group(compared: Sequence[Compared]) -> Group:
    """At least one case, with the baselines that know all of them."""
    common = [name for name in compared[0].baselines if all(name in each.baselines for each in compared)]
    return Group(
        summary([each.case for each in compared]),
        {name: summary([each.baselines[name] for each in compared]) for name in common},
    )


def grouped(compared: Iterable[Compared], suffix: str = "", *, order: Callable[[str], Any] | None = None) -> dict[str, Group]:
    """The groups of cases by name, with a suffix; by place and name, or in an order of names."""
    members: dict[str, list[Compared]] = defaultdict(list)
    places: dict[str, int] = {}
    for each in compared:
        for place, name in enumerate(each.groups):
            if name is not None:
                members[name].append(each)
                places[name] = place
    names = sorted(members, key=order or (lambda name: (places[name], _by_number(name))))
    return {name + suffix: group(members[name]) for name in names}


def _by_number(name: str) -> list[Any]:
    """Names that differ in a number, in the order of the numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def summary(cases: Sequence[MeasuredCase]) -> Summary:
    """The errors of at least one case."""
    errors = np.abs([case.error for case in cases])
    repeats = [error for case in cases for error in case.repeat_errors]
    covered = [case.covered for case in cases if case.covered is not None]
    widths = [case.half_width for case in cases if case.half_width is not None]
    worst = cases[int(np.argmax(errors))]
    return Summary(
        rows=len(cases),
        gmae=gmae(errors.tolist()),
        mape=float(errors.mean()),
        p90=float(np.quantile(errors, 0.9)),
        max=float(errors.max()),
        worst=f"{worst.name}: {worst.error:+.0%}",
        bias=sum(case.predicted for case in cases) / sum(case.measured for case in cases) - 1,
        median_error=float(np.median([case.error for case in cases])),
        interval_coverage=float(np.mean(covered)) if covered else None,
        sharpness=float(np.median(widths)) if widths else None,
        noise_floor=gmae(repeats) if repeats else None,
    )


def repeat_errors(times: Sequence[float]) -> tuple[float, ...]:
    """Of each repeat against the mean of the others; none where there is one repeat only."""
    total, count = sum(times), len(times)
    return tuple(time * (count - 1) / (total - time) - 1 for time in times) if count > 1 and min(times) > 0 else ()


def rank_correlation(first: Floats, second: Floats) -> float:
    """Spearman's, ties sharing their ranks; 0 where all of one side are equal."""
    ranks = [_ranks(values) for values in (first, second)]
    spreads = [float(rank.std()) for rank in ranks]
    if min(spreads) == 0:
        return 0.0
    return float(((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())).mean() / (spreads[0] * spreads[1]))


def _ranks(values: Floats) -> Floats:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    result: Floats = (np.cumsum(counts) - (counts - 1) / 2.0)[places.reshape(-1)]
    return result


def in_processes(
    function: Callable[..., Result], *columns: Iterable[Any], executor: Executor | None = None
) -> Iterator[Result]:
    """What `map` gives, by two processes unless an executor is given."""
    with workers(2) if executor is None else nullcontext(executor) as running:
        yield from running.map(function, *columns)


def said_of_refused(refused: Sequence[str]) -> list[str]:
    """What a report says of rows that cannot be predicted: the first of their lines, and how many more there are."""
    more = len(refused) - _REFUSED_SHOWN
    return [*refused[:_REFUSED_SHOWN], *([f"{more} more rows cannot be predicted"] if more > 0 else [])]


# --- bars ------------------------------------------------------------------------------------------------------------------


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
        summed: Summary = group.summary
        value = summed.interval_coverage if self.measure == _COVERAGE else float(getattr(summed, _MEASURES[self.measure]))
        if value is None:
            return f"{self.group}: no {self.measure} was found; the bar cannot be checked"
        if self.least <= value <= self.most:
            return ""
        span = f"{self.least:.1%} to {self.most:.1%}" if self.least else f"at most {self.most:.1%}"
        return f"{self.group}: {self.measure} is {value:.2%}, the bar is {span} (worst: {group.summary.worst})"


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
    wrong = next((group for group, figures in groups.items() if not isinstance(figures, dict)), None)
    if wrong is not None:
        raise InputError(f"{file}: {wrong!r} is {groups[wrong]!r}; expected a table of figures, as in geomean = 0.05")
    return [_bar(file, group, name, value) for group, figures in groups.items() for name, value in figures.items()]


def bars_left(validation: Validation, bars: list[Bar]) -> list[str]:
    """A line for every bar that is not kept."""
    return [line for line in (bar.left_by(validation) for bar in bars) if line]


def _bar(file: Path, group: str, measure: str, value: object) -> Bar:
    if measure == _COVERAGE and isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)):
        return Bar(group, measure, float(value[0]), float(value[1]))
    if measure in _MEASURES and _is_number(value):
        return Bar(group, measure, 0.0, float(value))  # type: ignore[arg-type]
    expected = f"one of {', '.join(_MEASURES)} with a number, or {_COVERAGE} with two"
    raise InputError(f"{file}: {group!r} has {measure} = {value!r}; expected {expected}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
