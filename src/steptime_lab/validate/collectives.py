"""Models of collectives against messages they were never fitted to, beside a line and the published curve on the same rows.

Besides the test rows, which are few per kind and rank count, every row is asked once of a model that was fitted without its
fifth of the messages; rank counts are left out wholly; and uneven exchanges go by every rule that turns them into even ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from steptime._models.collectives.fitting import Points, Swept, fit_curves, reduced
from steptime._models.collectives.message import KINDS, Floats, Messages
from steptime._models.collectives.tier import TierModel
from steptime._models.engine.splits import FIT, TEST, VALIDATION
from steptime.errors import InputError
from steptime_lab.baselines.collectives import RULES, as_published, fit_line, fit_published
from steptime_lab.fit.fabrics import FittedFabric
from steptime_lab.validate.engine import Compared, Group, MeasuredCase, Validation, grouped, repeat_errors, summary

# Where tables of different sites begin to agree; below, latency differs by up to 6 times.
LARGE_BYTES = 1 << 20
_LINE, _PUBLISHED = "line", "published"
_EXCHANGE = "all_to_all"  # the one kind whose messages may be uneven
_LOAD_AND_PAIRS = "load and pairs"
_SEVERAL = "rank counts were measured in several runs on different boxes: those left out say more about boxes than about ranks"


def validate_collectives(
    fabric: str, fitted: FittedFabric, *, elsewhere: Sequence[Swept] = (), split: str = TEST
) -> Validation:
    """The rows of the split on one fabric; `elsewhere` are all its rows, of which those of other runs are asked as well."""
    points = fitted.points.with_curves(fitted.model)
    tested = points.of(split)
    if not len(tested):
        raise InputError(f"{fabric}: no collectives of the split {split} that the model answers")
    compared = _asked(tested, fitted.model, points.of(FIT, VALIDATION), _noise(tested, fitted.reduction.quantile))
    uneven, facts = _uneven(points, fitted.model)
    return Validation.of(
        f"collectives {fabric}",
        f"collectives on {fabric}, wait-free, {split} rows",
        compared,
        groups=grouped(compared) | _in_fifths(points, fitted) | uneven | _left_out(points) | _other_boxes(elsewhere, fitted),
        facts=facts,
        notes=(
            f"a message's time is {fitted.reduction}, chosen on validation rows",
            "noise floor: half of what every other repeat of a message differs from the rest, both reduced like all of them",
            "in fifths: every message asked of a model fitted without its fifth of the messages",
            *([_SEVERAL] if len(fitted.runs) > 1 else []),
            "rank counts left out: all rows of them from 1 MiB; rules: all uneven exchanges, with the curve of the even ones",
        ),
    )


def _noise(points: Points, quantile: float) -> list[tuple[float, ...]]:
    """Per row, about how far off its own time is: half of what two halves of the repeats differ by."""
    results: list[tuple[float, ...]] = []
    for times in points.repeats or [()] * len(points):
        if len(times) < 4:
            results.append(repeat_errors(times)[:1])
            continue
        halves = [float(np.quantile(times[start::2], quantile)) for start in (0, 1)]
        results.append(((halves[0] / halves[1] - 1) / 2,))
    return results


def _asked(points: Points, model: TierModel, seen: Points, noise: Sequence[tuple[float, ...]]) -> list[Compared]:
    cases = _cases(points, model, noise)
    line, published = fit_line(seen), fit_published(seen)
    beside = {_LINE: line.times(points.messages).ns.tolist()}
    if all(pair in published.curves for pair in zip(points.kind, points.ranks.tolist(), strict=True)):
        beside[_PUBLISHED] = published.times(as_published(points)).ns.tolist()
    return [
        Compared(case, _groups(points, index), {name: case.by(times[index]) for name, times in beside.items()})
        for index, case in enumerate(cases)
    ]


def _cases(points: Points, model: TierModel, noise: Sequence[tuple[float, ...]] | None = None) -> list[MeasuredCase]:
    times = model.times(points.messages)
    known = bool(model.residuals)
    return [
        MeasuredCase(
            _name(points, index),
            float(times.ns[index]),
            float(points.ns[index]),
            interval=(float(times.low_ns[index]), float(times.high_ns[index])) if known else None,
            repeat_errors=noise[index] if noise else (),
        )
        for index in range(len(points))
    ]


def _name(points: Points, index: int) -> str:
    uneven = "uneven " if points.uneven[index] else ""
    return f"{uneven}{points.kind[index]} of {points.ranks[index]} ranks, {points.bytes[index]:,.0f} bytes"


def _others(cases: Sequence[MeasuredCase], predicted: Floats) -> list[MeasuredCase]:
    return [case.by(time) for case, time in zip(cases, predicted.tolist(), strict=True)]


def _groups(points: Points, index: int) -> tuple[str | None, ...]:
    """By kind, then by rank count, then by size."""
    kind = points.kind[index]
    uneven = kind == _EXCHANGE and bool(points.uneven[index])
    label = f"{kind} {'uneven' if uneven else 'even'}" if kind == _EXCHANGE else kind
    size = "from 1 MiB" if points.bytes[index] >= LARGE_BYTES else "below 1 MiB"
    first = 3 * (2 * KINDS.index(kind) + uneven)
    return (None,) * first + (label, f"{label}, {points.ranks[index]} ranks", f"{label} {size}")


def _in_fifths(points: Points, fitted: FittedFabric) -> dict[str, Group]:
    """Every row once, by models and baselines that did not see its fifth."""
    results: list[tuple[int, Compared]] = []
    for fold in points.folds():
        seen, tested = points.take(~fold), points.take(fold)
        curves = fit_curves(seen, idle_power=fitted.model.idle_power, ragged=fitted.model.ragged)
        model = replace(curves, residuals=fitted.model.residuals)
        compared = _asked(tested, model, seen, _noise(tested, fitted.reduction.quantile))
        results += zip(np.flatnonzero(fold).tolist(), compared, strict=True)
    in_order = [replace(each, groups=each.groups[:-1]) for _, each in sorted(results, key=lambda pair: pair[0])]
    return grouped(in_order, ", in fifths")


# --- uneven exchanges ------------------------------------------------------------------------------------------------------


def _uneven(points: Points, model: TierModel) -> tuple[dict[str, Group], dict[str, float]]:
    """Every uneven exchange by every rule, all with one curve: that of the even ones."""
    even = points.take(~points.uneven & np.array([kind == _EXCHANGE for kind in points.kind]))
    if not len(even) or not points.uneven.any():
        return {}, {}
    curves = replace(fit_curves(even, idle_power=0.0, ragged=model.ragged), residuals={})
    compared = points.take(points.uneven).with_curves(curves)
    result = {f"uneven by {rule}": summary(_by_rule(compared, curves, rule)) for rule in RULES}
    best = summary(_cases(compared, replace(curves, idle_power=model.idle_power)))
    others = {rule: item.gmae for rule, item in result.items()}
    nearest = min(others, key=lambda rule: others[rule])
    facts = {
        "uneven_exchanges_asked_by_every_rule": float(best.rows),
        f"times_the_error_{nearest} against {_LOAD_AND_PAIRS}".replace(" ", "_"): others[nearest] / best.gmae,
        "times_the_error_uneven_by_max_of_max_as_published_against_load_and_pairs": others["uneven by max of max"] / best.gmae,
    }
    by_rule = {name: Group(item) for name, item in result.items()} | {f"uneven by {_LOAD_AND_PAIRS}": Group(best)}
    for count in sorted(set(compared.ranks.tolist())):
        same = compared.take(compared.ranks == count)
        cases = _cases(same, replace(curves, idle_power=model.idle_power))
        beside = {rule: summary(_by_rule(same, curves, rule)) for rule in RULES}
        by_rule[f"uneven by {_LOAD_AND_PAIRS}, {count} ranks"] = Group(summary(cases), beside)
    return by_rule, facts


def _by_rule(points: Points, curves: TierModel, rule: str) -> list[MeasuredCase]:
    sizes = np.array([RULES[rule](points.sent(index))[0] for index in range(len(points))])
    compared = Messages(points.messages.kind, points.messages.ranks, sizes, sizes, sizes)
    return _others(_cases(points, curves), curves.times(compared).ns)


# --- rank counts and boxes -------------------------------------------------------------------------------------------------


def _left_out(points: Points) -> dict[str, Group]:
    """Large even messages of a rank count by models that saw the others, or those below it where it is the largest."""
    even = points.take(~points.uneven & (points.bytes >= LARGE_BYTES))
    seen = points.take(~points.uneven)
    counts = sorted(set(points.ranks.tolist()))
    result: dict[str, Group] = {}
    for count in counts[1:] if len(counts) > 2 else []:
        others = [other for other in counts if other != count]
        model = fit_curves(seen.take(np.isin(seen.ranks, others)), idle_power=0.0)
        compared = even.take(even.ranks == count)
        known = np.array([len(model.measured_ranks(kind)) > 1 for kind in compared.kind], dtype=np.bool_)
        cases = _cases(compared.take(known), model)
        if not cases:
            continue
        label = f"{count} ranks from {' and '.join(map(str, others))}"
        result[label] = Group(summary(cases))
        kinds = np.array(compared.kind)[known]
        for kind in [kind for kind in KINDS if (kinds == kind).any()]:
            result[f"{kind}, {label}"] = Group(summary([case for case, item in zip(cases, kinds == kind, strict=True) if item]))
    return result


def _other_boxes(rows: Sequence[Swept], fitted: FittedFabric) -> dict[str, Group]:
    """Rows of other runs, each process's times over what its all_reduce of 1 MiB says of its speed, and as they are."""
    same = set(fitted.runs)
    speeds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    others = [row for row in rows if row.run not in same]
    for row in others:
        speed_ns = row.reference_ns or (
            row.times_ns if row.message.kind == "all_reduce" and row.message.bytes == LARGE_BYTES else ()
        )
        if speed_ns:
            speeds[row.run, row.process, row.message.ranks] += speed_ns
    chosen = [row for row in others if (row.run, row.process, row.message.ranks) in speeds]
    chosen = [row for row in chosen if (row.message.kind, row.message.ranks) in fitted.model.curves]
    if not chosen:
        return {}
    usual = fitted.model.times(Messages.even("all_reduce", [row.message.ranks for row in chosen], float(LARGE_BYTES))).ns
    quantile = fitted.reduction.quantile
    speed = np.array([float(np.quantile(speeds[row.run, row.process, row.message.ranks], quantile)) for row in chosen])
    points = reduced(chosen, fitted.reduction, joined=False)
    as_is = _cases(points, replace(fitted.model, residuals={}))
    scaled = _others(as_is, np.array([case.predicted for case in as_is]) * speed / usual)
    return {
        "other runs and boxes": Group(summary(as_is)),
        "other runs and boxes, each at the speed of its all_reduce of 1 MiB": Group(summary(scaled)),
    }
