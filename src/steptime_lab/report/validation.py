"""What validations found, as text and as JSON with stable keys."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from steptime._notices import Notices
from steptime._report.json import SCHEMA_VERSION, Document
from steptime._report.layout import literal, print_heading, print_line, print_notices, print_numbers, print_section
from steptime_lab.validate.engine import Group, Summary, Validation
from steptime_lab.validate.sharding.estimates import ABLATIONS
from steptime_lab.validate.sharding.measured import Score, picked
from steptime_lab.validate.sharding.sharding import CHANCE, GivenPlan, ShardingGroup, ShardingValidation, TaskOutcome
from steptime_lab.validate.steps.predict import CaseOutcome, Split, mean_splits

_HEADS = ("", "rows", "GMAE", "median\nerror", "MAPE", "p90", "max", "inside\n90 %", "half\nwidth", "noise\nfloor")
_ERRORS = 7  # of them, without intervals and noise
_WORST = 8  # cases that are named
# A fact that is larger counts something.
_COUNTS = 2.0
_BESIDE = 2  # baselines that fit beside the errors; more have a table of their own
_SPLITS_SHOWN = 20  # cases that are named
_PARTS = ("error", "device", "host", "communication", "synchronisation", "measured_parts")
_BLUNT = (
    "a profiler slows the host, and with it what collectives need of the host: in steps of few milliseconds, host, "
    "communication and synchronisation are told apart only roughly"
)
_SPLIT_HEADS = ("error", "device", "host", "commu-\nnication", "synchro-\nnisation", "parts as\nmeasured")
_PICKS_SHOWN = 6
# As the tasks' bars have it: a fixed rule counts where its regret is beyond so many noise floors.
_FLOORS = 3.0
_WIDTH = 40


def validation_document(validation: Validation) -> Document:
    """What `validate --json` writes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "set": validation.name,
        "summary": _summary(validation.whole.summary),
        "baselines": {name: _summary(item) for name, item in validation.whole.baselines.items()},
        "parts": {  # the name that groups have had in the JSON from the first
            name: {**_summary(group.summary), "baselines": {other: _summary(item) for other, item in group.baselines.items()}}
            for name, group in validation.groups.items()
        },
        "facts": dict(validation.facts),
        "cases": [
            {key: getattr(case, key) for key in ("name", "predicted", "measured", "error", "spread")}
            for case in validation.cases
        ],
        "warnings": list(validation.warnings),
    }


def print_validation(console: Console, validation: Validation, *, full: bool = False) -> None:
    """The report of `steptime validate`: every group of the cases, or only those that are no groups of groups."""
    print_heading(console, f"validate {validation.name}", validation.title)
    baselines = list(validation.whole.baselines)
    beside = baselines if len(baselines) <= _BESIDE else []
    heads = (*_HEADS, *(f"GMAE of\n{name}" for name in beside))
    shown = {name: group for name, group in validation.groups.items() if full or "," not in name}
    rows = [_row("all", validation.whole, beside), *(_row(name, group, beside) for name, group in shown.items())]
    print_section(console, "Errors", "predicted against measured; GMAE is a geometric mean")
    shown_columns = [index for index in range(len(heads)) if index == 0 or any(row[index] for row in rows)]
    print_numbers(console, [heads[index] for index in shown_columns], [[row[index] for index in shown_columns] for row in rows])
    if not beside and baselines:
        print_section(console, "Instead", "other forms on the same cases")
        others = [(name, Group(item)) for name, item in validation.whole.baselines.items()]
        print_numbers(console, _HEADS[:_ERRORS], [_row(name, group, [])[:_ERRORS] for name, group in others])
        _print_instead(console, shown, baselines)
    _print_worst(console, validation.groups)
    for name, value in validation.facts.items():
        if "/" not in name:
            print_line(console, name.replace("_", " "), _fact(name, value), spaced=False)
    for note in validation.notes:
        print_line(console, "Note", note, style="dim", spaced=False)
    print_notices(console, Notices.of(validation.warnings))


def _print_instead(console: Console, groups: Mapping[str, Group], baselines: Sequence[str]) -> None:
    """GMAE of every other form on the parts of which they all know all cases."""
    known = {name: group for name, group in groups.items() if set(baselines) <= set(group.baselines)}
    if known:
        heads = ("GMAE", "this", *(name.replace(" ", "\n", 1) for name in baselines))
        rows = [
            [name, *(_percent(item.gmae) for item in (group.summary, *(group.baselines[other] for other in baselines)))]
            for name, group in known.items()
        ]
        print_numbers(console, heads, rows)


def _summary(one: Summary) -> Document:
    return {**asdict(one), "geomean": one.gmae}


def _row(name: str, group: Group, baselines: Sequence[str]) -> list[str]:
    item = group.summary
    figures = (item.mape, item.p90, item.max, item.interval_coverage, item.sharpness, item.noise_floor)
    beside = (group.baselines[other].gmae if other in group.baselines else None for other in baselines)
    median = f"{100 * item.median_error:+.1f} %" if item.median_error < _COUNTS else _percent(item.median_error)
    return [name, f"{item.rows:,}", _percent(item.gmae), median, *(_percent(value) for value in (*figures, *beside))]


def _fact(name: str, value: float) -> str:
    """A ratio where its name says so; else a share, or a count where it is far more than all."""
    if name.startswith("times_"):
        return f"{value:.2f} x"
    return f"{100 * value:.2f} %" if value < _COUNTS else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    if value is None:
        return ""
    return f"{100 * value:.1f} %" if value < 10 else f"{1 + value:,.0f} x"


def _print_worst(console: Console, groups: Mapping[str, Group]) -> None:
    """The largest error of each of the groups that have the largest ones."""
    order = sorted(groups.items(), key=lambda item: -item[1].summary.max)
    text = list(dict.fromkeys(group.summary.worst for _, group in order))[:_WORST]
    if text:
        print_section(console, "Worst", "the largest errors, by op and shapes", Text("\n").join(literal(line) for line in text))


# --- whose error a step's is -----------------------------------------------------------------------------------------------


def split_document(outcomes: Sequence[CaseOutcome]) -> Document:
    """What `validate steps --explain --json` adds."""
    return {
        "cases": [
            {"name": outcome.name, "process": visit.visit.process, "regime": outcome.regime, **asdict(visit.split)}
            for outcome in outcomes
            for visit in outcome.visits
            if visit.split is not None
        ],
        "groups": mean_splits(split_groups(outcomes)),
    }


def split_groups(outcomes: Sequence[CaseOutcome]) -> dict[str, list[Split]]:
    """The splits of all cases, by workload and ranks, then by regime."""
    by_workload: dict[str, list[Split]] = defaultdict(list)
    by_regime: dict[str, list[Split]] = defaultdict(list)
    for outcome, item in _splits(outcomes):
        by_workload[f"{outcome.workload} {outcome.ranks} rank{'s' * (outcome.ranks > 1)}"].append(item)
        by_regime[outcome.regime].append(item)
    return {**dict(sorted(by_workload.items())), **dict(sorted(by_regime.items()))}


def _splits(outcomes: Sequence[CaseOutcome]) -> list[tuple[CaseOutcome, Split]]:
    return [(outcome, visit.split) for outcome in outcomes for visit in outcome.visits if visit.split is not None]


def print_splits(console: Console, outcomes: Sequence[CaseOutcome]) -> None:
    """The tables of `validate steps --explain`: percent of the measured step."""
    means = mean_splits(split_groups(outcomes))
    print_section(console, "Whose error", "mean of absolute values, % of the step; each part in turn as profiled")
    rows = [
        [name, f"{entry['rows']:.0f}", *(f"{100 * entry[f'absolute_{part}']:.1f}" for part in _PARTS)]
        for name, entry in means.items()
    ]
    print_numbers(console, ("", "rows", *_SPLIT_HEADS), rows)
    print_section(console, "Bias", "mean with its sign, % of the step")
    rows = [[name, f"{entry['rows']:.0f}", *(f"{100 * entry[part]:+.1f}" for part in _PARTS)] for name, entry in means.items()]
    print_numbers(console, ("", "rows", *_SPLIT_HEADS), rows)
    print_line(console, "Note", _BLUNT, style="dim")
    largest = sorted(_splits(outcomes), key=lambda pair: -abs(pair[1].error))
    print_section(console, "Worst", f"the {min(_SPLITS_SHOWN, len(largest))} largest errors, % of the step")
    worst = [[entry.name, *(f"{100 * getattr(item, part):+.1f}" for part in _PARTS)] for entry, item in largest[:_SPLITS_SHOWN]]
    print_numbers(console, ("", *_SPLIT_HEADS), worst)


# --- sharding --------------------------------------------------------------------------------------------------------------


def sharding_document(validation: ShardingValidation) -> dict[str, Any]:
    """What `validate sharding --json` writes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "set": "sharding",
        **_part(validation.whole),
        "parts": {name: _part(part) for name, part in validation.groups.items()},
        "steps": asdict(validation.steps.whole.summary),
        "cases": [_task(item) for item in validation.outcomes],
        "given": [{**asdict(item), "faster": item.faster, "slower": item.slower} for item in validation.given],
        "warnings": list(validation.steps.warnings),
    }


def _part(part: ShardingGroup) -> dict[str, Any]:
    ours = {**asdict(part.ours), "chance": part.others[CHANCE].success_10}
    others = {name: asdict(item) for name, item in part.others.items() if name not in ABLATIONS}
    left_out = {name: asdict(item) for name, item in part.others.items() if name in ABLATIONS}
    return {"summary": ours, "baselines": others, "ablations": left_out, "ceiling": asdict(part.ceiling)}


def _task(one: TaskOutcome) -> dict[str, Any]:
    task, judged = one.task, one.judged
    pick = int(np.argmax(picked(one.found.step_ns)))
    return {
        "name": task.name,
        "pick": next(rule for rule, index in task.rules.items() if index == pick),
        "regret": float(judged.regret[pick]),
        "tied_with_fastest": bool(judged.tied[pick]),
        "plans": [
            {
                "rules": [rule for rule, item in task.rules.items() if item == index],
                "predicted": float(one.found.step_ns[index]),
                "measured": float(task.measured_ns[index]),
                "error": float(one.found.step_ns[index] / task.measured_ns[index] - 1.0),
                "regret": float(judged.regret[index]),
                "lookups_ns": one.found.lookups_ns[index].tolist(),
                "exchange_ns": float(one.found.exchange_ns[index].max()),
            }
            for index in range(len(task.rank_of))
        ],
    }


def sharding_lines(validation: ShardingValidation, *, full: bool = False) -> list[str]:
    """The report as text: every way to pick on all tasks, ours on parts of them, and where it went wrong."""
    whole = validation.whole
    lines = [
        f"steptime validate sharding · picks among the plans of {whole.ours.tasks} measured tasks",
        "",
        _line("", ("mean regret", "(95 %)", "max", "tied", "within 10 %", "top 1", "Spearman")),
        _score("predicted step", whole.ours),
        *(_score(name, item) for name, item in whole.others.items() if name not in ABLATIONS),
        "",
        "Left out of the prediction",
        *(_score(name, item) for name, item in whole.others.items() if name in ABLATIONS),
        "",
        "Parts",
        *(_score(f"{name} ({part.ours.tasks})", part.ours) for name, part in validation.groups.items()),
    ]
    if full:
        for name, part in validation.groups.items():
            lines += ["", f"Parts: {name}", *(_score(other, item) for other, item in part.others.items())]
    return [
        *lines,
        "",
        *_notes(validation),
        *_given(validation.given, full=full),
        "",
        "Worst picks",
        *_worst(validation.outcomes),
    ]


def _given(plans: Sequence[GivenPlan], *, full: bool) -> list[str]:
    """Plans that were timed beside the rules', against the best of those; without `full` the least favourable ones."""
    if not plans:
        return []
    shown = plans if full else sorted(plans, key=lambda one: -one.ratio)[:_PICKS_SHOWN]
    groups = {
        "all": plans,
        "first": [one for one in plans if not one.further],
        "further": [one for one in plans if one.further],
    }
    return [
        "",
        "Searched plans against the best rule in hindsight",
        *(f"  {name} {len(item)} tasks: {_compared(item)}" for name, item in groups.items() if item),
        *(
            f"    {one.task} {one.name}: {one.ratio - 1:+.1%} ({one.low - 1:+.1%} to {one.high - 1:+.1%}) of {one.best_rule}, "
            f"predicted {one.predicted_ns / one.best_rule_predicted_ns - 1:+.1%}"
            for one in shown
        ),
    ]


def _compared(plans: Sequence[GivenPlan]) -> str:
    measured = float(np.mean([plan.ratio - 1 for plan in plans]))
    predicted = float(np.mean([plan.predicted_ns / plan.best_rule_predicted_ns - 1 for plan in plans]))
    return (
        f"{sum(plan.faster for plan in plans)} faster beyond the noise, {sum(plan.slower for plan in plans)} slower by more "
        f"than 2 % and the noise; {measured:+.1%} on average, predicted {predicted:+.1%}"
    )


def _notes(validation: ShardingValidation) -> list[str]:
    whole, steps = validation.whole, validation.steps.whole.summary
    floor = whole.ceiling.mean_regret
    rule, best = whole.best_rule
    beyond = "beyond" if best.mean_regret > _FLOORS * floor else "within"
    return [
        f"Picking by half of the blocks: regret {floor:.2%} on the other half (the noise floor), tied in "
        f"{whole.ceiling.tied_with_fastest:.0%}, top 1 in {whole.ceiling.top1:.0%}",
        f"Best fixed rule: {rule}, mean regret {best.mean_regret:.2%}, {beyond} three noise floors; ours is "
        f"{whole.ours.mean_regret / max(best.mean_regret, 1e-12):.0%} of it",
        f"Step times of {steps.rows} plans: GMAE {steps.gmae:.1%}, MAPE {steps.mape:.1%}, p90 {steps.p90:.1%}, bias "
        f"{steps.bias:+.1%}, worst {steps.worst}",
        "No constant was fitted on these tasks; what ranks do to each other was measured on tables and exchanges of no task",
    ]


def _worst(outcomes: Sequence[TaskOutcome]) -> list[str]:
    """The picks that cost most, with the lookups and exchanges that were predicted of the pick and of the fastest."""
    rows = sorted(outcomes, key=lambda one: -float(one.judged.regret @ picked(one.found.step_ns)))
    return [line for one in rows[:_PICKS_SHOWN] for line in _explained(one)]


def _explained(one: TaskOutcome) -> list[str]:
    pick, best = int(np.argmax(picked(one.found.step_ns))), int(np.argmin(one.judged.regret))
    lines = [f"  {one.task.name}: {one.judged.regret[pick]:.1%}{', tied' if one.judged.tied[pick] else ''}"]
    for name, index in (("picked", pick), ("fastest", best)):
        rule = next(rule for rule, item in one.task.rules.items() if item == index)
        lookups = ", ".join(f"{time / 1e6:.1f}" for time in one.found.lookups_ns[index])
        lines.append(
            f"    {name} {rule}: measured {one.task.measured_ns[index] / 1e6:.2f} ms, predicted "
            f"{one.found.step_ns[index] / 1e6:.2f}; lookups by rank {lookups}; exchanges "
            f"{one.found.exchange_ns[index].max() / 1e6:.2f}"
        )
    return lines


def _score(name: str, one: Score) -> str:
    low, high = one.mean_regret_interval
    values = (
        f"{one.mean_regret:.2%}",
        f"({low:.1%} to {high:.1%})",
        f"{one.max_regret:.1%}",
        f"{one.tied_with_fastest:.0%}",
        f"{one.success_10:.0%}",
        f"{one.top1:.0%}",
        "" if one.spearman is None else f"{one.spearman:.2f}",
    )
    return _line(name, values)


def _line(name: str, values: Sequence[str]) -> str:
    return f"{name:<{_WIDTH}}" + "".join(f"{value:>16}" if index == 1 else f"{value:>12}" for index, value in enumerate(values))
