"""Predicted against measured. A set is its cases, each with the same case as every baseline has it, and groups by name.

What a set declares: `Compared` items, and for every group which items belong to it. The rest is the same for all sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from steptime._models.error import gmae

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Case:
    """One question with its measured answer, in any unit of time."""

    name: str
    predicted: float
    measured: float
    spread: float | None = None  # of the repeats, (90th - 10th percentile) / median
    covered: bool | None = None  # whether the predicted interval holds the measured time; None without an interval
    repeat_errors: tuple[float, ...] = ()  # of each repeat against the mean of the others

    @property
    def error(self) -> float:
        """Relative, signed."""
        return (self.predicted - self.measured) / self.measured

    def by(self, predicted: float) -> Case:
        """The same case as somebody else predicts it, who says nothing of intervals or repeats."""
        return replace(self, predicted=predicted, covered=None, repeat_errors=())


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
    interval_coverage: float | None
    noise_floor: float | None  # the same geometric mean, of one repeat against the mean of the others


@dataclass(frozen=True)
class Group:
    """Cases under a name, with the baselines on the same ones."""

    summary: Summary
    baselines: Mapping[str, Summary] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """What `steptime validate` found for one set."""

    name: str
    title: str
    cases: Sequence[Case]
    whole: Group
    groups: Mapping[str, Group]
    facts: Mapping[str, float] = field(default_factory=dict)  # named numbers that are no errors of cases
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Compared(Generic[Item]):
    """One item of a set with its case, and the same case as each baseline has it."""

    item: Item
    case: Case
    baselines: Mapping[str, Case] = field(default_factory=dict)


def group(compared: Sequence[Compared[Item]]) -> Group:
    """At least one item, with the baselines that know all of them."""
    common = [name for name in compared[0].baselines if all(name in item.baselines for item in compared)]
    return Group(
        summary([item.case for item in compared]),
        {name: summary([item.baselines[name] for item in compared]) for name in common},
    )


def groups(compared: Sequence[Compared[Item]], named: Iterable[tuple[str, Callable[[Item], bool]]]) -> dict[str, Group]:
    """By name, those items that belong; none without any."""
    chosen = ((name, [item for item in compared if belongs(item.item)]) for name, belongs in named)
    return {name: group(entry) for name, entry in chosen if entry}


def summary(cases: Sequence[Case]) -> Summary:
    """The errors of at least one case."""
    errors = np.abs([case.error for case in cases])
    repeats = [error for case in cases for error in case.repeat_errors]
    covered = [case.covered for case in cases if case.covered is not None]
    worst = cases[int(np.argmax(errors))]
    return Summary(
        rows=len(cases),
        gmae=gmae(errors.tolist()),
        mape=float(errors.mean()),
        p90=float(np.quantile(errors, 0.9)),
        max=float(errors.max()),
        worst=f"{worst.name}: {worst.error:+.0%}",
        bias=sum(case.predicted for case in cases) / sum(case.measured for case in cases) - 1,
        interval_coverage=float(np.mean(covered)) if covered else None,
        noise_floor=gmae(repeats) if repeats else None,
    )


def repeat_errors(times: Sequence[float]) -> tuple[float, ...]:
    """Of each repeat against the mean of the others; none where there is one repeat only."""
    total, count = sum(times), len(times)
    return tuple(time * (count - 1) / (total - time) - 1 for time in times) if count > 1 and min(times) > 0 else ()
