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
        "cases": [_task(one) for one in found.outcomes],
        "given": [{**asdict(one), "faster": one.faster, "slower": one.slower} for one in found.given],
        "warnings": list(found.steps.warnings),
    }


def _part(part: ShardingGroup) -> dict[str, Any]:
    ours = {**asdict(part.ours), "chance": part.others[CHANCE].success_10}
    others = {name: asdict(one) for name, one in part.others.items() if name not in ABLATIONS}
    left_out = {name: asdict(one) for name, one in part.others.items() if name in ABLATIONS}
    return {"summary": ours, "baselines": others, "ablations": left_out, "ceiling": asdict(part.ceiling)}


def _task(one: TaskOutcome) -> dict[str, Any]:
    task, judged = one.task, one.judged
    pick = int(np.argmax(picked(one.found.step_ns)))
    return {
        "name": task.name,
        "pick": next(rule for rule, place in task.rules.items() if place == pick),
        "regret": float(judged.regret[pick]),
        "tied_with_fastest": bool(judged.tied[pick]),
        "plans": [
            {
                "rules": [rule for rule, own in task.rules.items() if own == place],
                "predicted": float(one.found.step_ns[place]),
                "measured": float(task.measured_ns[place]),
                "error": float(one.found.step_ns[place] / task.measured_ns[place] - 1.0),
                "regret": float(judged.regret[place]),
                "lookups_ns": one.found.lookups_ns[place].tolist(),
                "exchange_ns": float(one.found.exchange_ns[place].max()),
            }
            for place in range(len(task.rank_of))
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
        *(_score(name, one) for name, one in whole.others.items() if name not in ABLATIONS),
        "",
        "Left out of the prediction",
        *(_score(name, one) for name, one in whole.others.items() if name in ABLATIONS),
        "",
        "Parts",
        *(_score(f"{name} ({part.ours.tasks})", part.ours) for name, part in found.groups.items()),
    ]
    if full:
        for name, part in found.groups.items():
            lines += ["", f"Parts: {name}", *(_score(other, one) for other, one in part.others.items())]
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
        *(f"  {name} {len(some)} tasks: {_compared(some)}" for name, some in groups.items() if some),
        *(
            f"    {one.task} {one.name}: {one.ratio - 1:+.1%} ({one.low - 1:+.1%} to {one.high - 1:+.1%}) of {one.best_rule}, "
            f"predicted {one.predicted_ns / one.best_rule_predicted_ns - 1:+.1%}"
            for one in shown
        ),
    ]


def _compared(plans: Sequence[GivenPlan]) -> str:
    measured = float(np.mean([one.ratio - 1 for one in plans]))
    predicted = float(np.mean([one.predicted_ns / one.best_rule_predicted_ns - 1 for one in plans]))
    return (
        f"{sum(one.faster for one in plans)} faster beyond the noise, {sum(one.slower for one in plans)} slower by more than "
        f"2 % and the noise; {measured:+.1%} on average, predicted {predicted:+.1%}"
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
    for name, place in (("picked", pick), ("fastest", best)):
        rule = next(rule for rule, own in one.task.rules.items() if own == place)
        lookups = ", ".join(f"{time / 1e6:.1f}" for time in one.found.lookups_ns[place])
        lines.append(
            f"    {name} {rule}: measured {one.task.measured_ns[place] / 1e6:.2f} ms, predicted "
            f"{one.found.step_ns[place] / 1e6:.2f}; lookups by rank {lookups}; exchanges "
            f"{one.found.exchange_ns[place].max() / 1e6:.2f}"
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
    return f"{name:<{_WIDTH}}" + "".join(f"{value:>16}" if place == 1 else f"{value:>12}" for place, value in enumerate(values))
