"""Lookup models against measured lookups they were never fitted to, and the same forms on lookups unlike any they saw."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.engine.splits import TEST
from steptime._models.kernels.question import OTHERS
from steptime._models.lookups.fitted import Kind, LookupModels, group_of
from steptime._models.lookups.forms import LookupForm
from steptime._models.lookups.question import BACKWARD, DIRECTIONS, DTYPES, OPTIMIZERS
from steptime.errors import InputError
from steptime_lab.fit.lookups import HELD_OUT, MOST_TABLES_FITTED, skew_of
from steptime_lab.measurements.lookups import MeasuredLookups
from steptime_lab.validate.engine import (
    Compared,
    Group,
    MeasuredCase,
    Validation,
    grouped,
    rank_correlation,
    repeat_errors,
    summary,
)

Flags = npt.NDArray[np.bool_]
Forms = Mapping[Kind, LookupForm]

# Upper ends of ranges.
_TABLES = (1, 5, MOST_TABLES_FITTED, 60)
_DIMS = (16, 64, 128, 1024)
_WHOLE = "whole GPU"
_QUARTERS = ("least skewed quarter", "second quarter", "third quarter", "most skewed quarter")
# Series in which times differ by less say little about which order is right.
_APART = 2.0
# Lookups of a series are alike but for what chance does to bag lengths; one row of one series is not.
_ALIKE = 1.05
# A series of fewer has no rank correlation to speak of.
_LEAST = 4
_COMPANY = {"idle": "idle parts", "same": "parts that do the same", "streaming": "parts that stream memory"}
_NAMES = {
    "table counts": f"{MOST_TABLES_FITTED + 1} to 60 tables unseen",
    "distributions": "most skewed quarter unseen",
    "series": "series unseen",
}


def validate_lookups(
    measured: Mapping[Kind, MeasuredLookups],
    models: LookupModels,
    baselines: Mapping[str, Forms],
    held_out: Mapping[str, Forms],
    *,
    split: str = TEST,
) -> Validation:
    """Every row of the split, on a whole GPU and on parts; then the tests on unseen lookups, each with forms of its own."""
    by_kind = {
        kind: _asked(kind, item.of(split), models, {name: forms[kind] for name, forms in baselines.items() if kind in forms})
        for kind, item in measured.items()
        if kind in models.forms and (item.split == split).any()
    }
    if not by_kind:
        raise InputError(f"no lookups of the split {split} that these models answer")
    compared = [item for entry in by_kind.values() for item in entry]
    result = grouped(compared, order=_order)
    if _WHOLE not in result:
        raise InputError("these models answer no lookup of a whole GPU; fit them to lookups that were measured on one")
    whole = result.pop(_WHOLE)
    facts: dict[str, float] = {}
    for test, forms in held_out.items():
        unseen = {kind: measured[kind].take(HELD_OUT[test](measured[kind])) for kind in forms if kind in measured}
        of_test, test_facts = _unseen(test, unseen, forms, split)
        result |= of_test
        facts |= test_facts
    return Validation(
        name="lookups",
        title=f"device time of embedding lookups, {split} rows",
        cases=[item.case for item in compared],
        whole=whole,
        groups=result,
        facts=facts,
        notes=(
            "noise floor: one repeat against the mean of the others; a median of three repeats has about half of it",
            "'unseen' are forms fitted without such lookups, asked about those of the test rows; series: about all of them",
        ),
    )


def compared_lookups(measured: Mapping[Kind, MeasuredLookups], models: LookupModels, *, split: str = TEST) -> list[Compared]:
    """Rows of the split that the models answer, each in the group of its implementation and direction alone."""
    kinds = {kind: item.of(split) for kind, item in measured.items() if kind in models.forms and (item.split == split).any()}
    compared = ((group_of(kind), each) for kind, item in kinds.items() for each in _asked(kind, item, models, {}))
    return [Compared(each.case, (name,)) for name, each in compared]


def _asked(kind: Kind, measured: MeasuredLookups, models: LookupModels, baselines: Mapping[str, LookupForm]) -> list[Compared]:
    """Every lookup, with the names of the groups that it belongs to."""
    predicted = models.form(*kind).times(measured.lookups)
    cases = []
    for index, time_ns in enumerate(predicted.time_ns.tolist()):
        actual = float(measured.time_ns[index])
        share, inside = round(float(measured.lookups.share[index])), bool(predicted.inside[index])
        estimate = models.estimate(kind, time_ns, inside, share)
        interval, repeats = (estimate.low_ns, estimate.high_ns), repeat_errors(measured.times_ns[index])
        cases.append(
            MeasuredCase(_name(kind, measured, index), time_ns, actual, float(measured.spread[index]), interval, repeats)
        )
    beside = {name: form.times(measured.lookups).time_ns.tolist() for name, form in baselines.items()}
    return [
        Compared(case, labels, {name: case.by(times[index]) for name, times in beside.items()})
        for index, (labels, case) in enumerate(zip(_labels(kind, measured), cases, strict=True))
    ]


def _name(kind: Kind, measured: MeasuredLookups, index: int) -> str:
    """Enough to find the row again."""
    lookups = measured.lookups
    tables_of = lookups.member[lookups.starts[index] : lookups.starts[index + 1]]
    tables = lookups.pool.tables
    dims = sorted({int(dim) for dim in tables.dim[tables_of]})
    update = OPTIMIZERS[lookups.optimizer[index]]
    text = [
        group_of(kind),
        f"{len(tables_of)} tables" if len(tables_of) > 1 else f"{int(tables.rows[tables_of[0]]):,} rows",
        f"dim {dims[0]}" + (f"-{dims[-1]}" if len(dims) > 1 else ""),
        f"batch {int(tables.batch[tables_of[0]])}",
        f"{tables.lookups[tables_of].sum():,.0f} lookups",
        DTYPES[lookups.dtype[index]],
        *([update] if update != "none" else []),
        "warm" if lookups.warm[index] else "cold",
    ]
    return " ".join(text)


def _labels(kind: Kind, measured: MeasuredLookups) -> list[tuple[str, ...]]:
    """Of every lookup, the groups it belongs to; what has a comma in its name is a group of a group."""
    lookups, direction = measured.lookups, kind[1]
    quarters = np.searchsorted(np.quantile(skew_of(lookups), (0.25, 0.5, 0.75)), skew_of(lookups))
    widest = lookups.maxima(lookups.pool.tables.dim)
    results: list[tuple[str, ...]] = []
    for index in range(len(measured)):
        share = round(float(lookups.share[index]))
        if share > 1:
            results.append((f"1/{share} of the GPU beside {_COMPANY[OTHERS[lookups.others[index]]]}",))
            continue
        labels = [
            f"{direction}, {_QUARTERS[quarters[index]]} of streams",
            f"{direction}, {_range(lookups.counts[index], _TABLES)} tables",
            f"{direction}, widest table of dim {_range(widest[index], _DIMS)}",
            f"{direction}, {DTYPES[lookups.dtype[index]]}",
        ]
        if direction == BACKWARD:
            labels.append(f"{direction}, {OPTIMIZERS[lookups.optimizer[index]]}")
        results.append((_WHOLE, direction, group_of(kind), *labels))
    return results


def _range(value: float, ends: Sequence[int]) -> str:
    """Which of the ranges up to these ends a number lies in."""
    index = bisect_left(ends[:-1], value)
    low = ends[index - 1] + 1 if index else 1
    return f"{low} to {ends[index]}" if low < ends[index] else str(low)


def _order(label: str) -> tuple[int, str, int, str]:
    """Directions, then kinds, parts of the GPU, and parts of parts by their numbers."""
    quarter = next((index for index, name in enumerate(_QUARTERS) if name in label), -1)
    number = re.search(r"\d+", label.partition(",")[2])
    kind = label.rpartition(" ")[2] in DIRECTIONS
    rank = 0 if label in DIRECTIONS else 1 if kind else 2 if "," not in label else 3
    size = quarter if quarter >= 0 else int(number[0]) if number else 0
    stem = re.sub(r"[\d/]+", "", label.partition(",")[2]) if quarter < 0 and rank == 3 else ""
    return rank, label.partition(",")[0] + stem, size, label


def _whole(measured: MeasuredLookups) -> Flags:
    result: Flags = measured.lookups.share == 1
    return result


def _unseen(
    test: str, unseen: Mapping[Kind, MeasuredLookups], forms: Forms, split: str
) -> tuple[dict[str, Group], dict[str, float]]:
    """Errors by direction; of series the rank correlations as well, over all splits, since the forms saw none of them."""
    parts: dict[str, Group] = {}
    facts: dict[str, float] = {}
    for direction in DIRECTIONS:
        cases: list[MeasuredCase] = []
        ranks = Ranks()
        for kind, item in unseen.items():
            if kind[1] != direction:
                continue
            whole = item.take(_whole(item) & ((item.split == split) | (test == "series")))
            if not len(whole):
                continue
            predicted = forms[kind].times(whole.lookups).time_ns
            cases += [
                MeasuredCase(_name(kind, whole, index), float(predicted[index]), float(whole.time_ns[index]))
                for index in range(len(whole))
            ]
            if test == "series":
                ranks += ranks_of(whole, predicted)
        if cases:
            parts[f"{direction}: {_NAMES[test]}"] = Group(summary(cases))
        facts |= ranks.facts(direction)
    return parts, facts


def _series(measured: MeasuredLookups) -> list[list[int]]:
    """Places of every series, caches and optimisers apart, whose times differ by a factor of `_APART` or more."""
    groups: dict[tuple[str, bool, int], list[int]] = defaultdict(list)
    lookups = measured.lookups
    number = lookups.sums(lookups.pool.tables.lookups)
    for index, name in enumerate(measured.series.tolist()):
        groups[name, bool(lookups.warm[index]), int(lookups.optimizer[index])].append(index)
    results = []
    for places in groups.values():
        times, sizes = measured.time_ns[places], number[places]
        alike = sizes.max() <= _ALIKE * sizes.min()
        if len(places) >= _LEAST and alike and times.max() >= _APART * times.min():
            results.append(places)
    return results


@dataclass(frozen=True)
class Ranks:
    """How well the order within series is told: by series, and pair by pair where times differ by a factor of `_APART`."""

    correlations: tuple[float, ...] = ()
    pairs: int = 0
    right: int = 0

    def __add__(self, other: Ranks) -> Ranks:
        """Of both lots of series."""
        return Ranks(self.correlations + other.correlations, self.pairs + other.pairs, self.right + other.right)

    def facts(self, direction: str) -> dict[str, float]:
        """Named numbers; none without series."""
        if not self.correlations:
            return {}
        return {
            f"rank_correlation_{direction}": float(np.mean(self.correlations)),
            f"rank_correlation_{direction}_of_the_worst_series": min(self.correlations),
            f"pairs_of_a_series_{_APART:.0f}x_apart_in_the_right_order_{direction}": self.right / self.pairs,
            f"series_{direction}": float(len(self.correlations)),
        }


def ranks_of(measured: MeasuredLookups, predicted: npt.NDArray[np.float64]) -> Ranks:
    """Of predictions of measured lookups."""
    result = Ranks()
    for places in _series(measured):
        times, text = measured.time_ns[places], predicted[places]
        apart = times[:, None] >= _APART * times[None, :]
        right = apart & (text[:, None] > text[None, :])
        result += Ranks((rank_correlation(times, text),), int(apart.sum()), int(right.sum()))
    return result
