"""What `validate sharding` found, as plain values with stable keys and as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from steptime_lab.validate.sharding.estimates import ABLATIONS
from steptime_lab.validate.sharding.given import GivenPlan
from steptime_lab.validate.sharding.scores import Score, picked
from steptime_lab.validate.sharding.sharding import CHANCE, ShardingGroup, ShardingValidation, TaskOutcome

_SCHEMA_VERSION = 1
_WORST = 6
# As the tasks' bars have it: a fixed rule counts where its regret is beyond so many noise floors.
_FLOORS = 3.0
_WIDTH = 40


def sharding_document(found: ShardingValidation) -> dict[str, Any]:
    """What `validate sharding --json` writes."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "set": "sharding",
        **_part(found.whole),
        "parts": {name: _part(part) for name, part in found.groups.items()},
        "steps": asdict(found.steps.whole.summary),
        "cases": [_task(item) for item in found.outcomes],
        "given": [{**asdict(item), "faster": item.faster, "slower": item.slower} for item in found.given],
        "warnings": list(found.steps.warnings),
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


def sharding_lines(found: ShardingValidation, *, full: bool = False) -> list[str]:
    """The report as text: every way to pick on all tasks, ours on parts of them, and where it went wrong."""
    whole = found.whole
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
        *(_score(f"{name} ({part.ours.tasks})", part.ours) for name, part in found.groups.items()),
    ]
    if full:
        for name, part in found.groups.items():
            lines += ["", f"Parts: {name}", *(_score(other, item) for other, item in part.others.items())]
    return [*lines, "", *_notes(found), *_given(found.given, full=full), "", "Worst picks", *_worst(found.outcomes)]


def _given(plans: Sequence[GivenPlan], *, full: bool) -> list[str]:
    """Plans that were timed beside the rules', against the best of those; without `full` the least favourable ones."""
    if not plans:
        return []
    shown = plans if full else sorted(plans, key=lambda one: -one.ratio)[:_WORST]
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


def _notes(found: ShardingValidation) -> list[str]:
    whole, steps = found.whole, found.steps.whole.summary
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
    return [line for one in rows[:_WORST] for line in _explained(one)]


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
