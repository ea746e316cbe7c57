"""Picks among sharding plans against measured ones: the shipped tasks, each with its plans timed in the same blocks.

No constant of the prediction was fitted on these tasks. That ranks reach and leave exchanges one by one and slow each other's
lookups (docs/sharding.md) was seen in profiles of 14 of the first 40 and measured on tables and exchanges of none.
Beside it: a rule drawn at random, every rule by itself, sums of table costs, what planners use, and the prediction with parts
of it left out. Plans that were searched for were timed beside those of the rules in the same blocks: is the search worth it?
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._platforms.platform import Platform
from steptime._shard.evaluator import Evaluator
from steptime._shard.rules import RULES
from steptime._sim.composed import Evaluation
from steptime.errors import InputError
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, in_processes, repeat_errors
from steptime_lab.validate.sharding.estimates import OURS, chance_pick, estimates, rule_picks
from steptime_lab.validate.sharding.measured import (
    Ceiling,
    Judged,
    MeasuredTask,
    Score,
    ceiling,
    levels,
    picked,
    ratio_interval,
    score,
    shipped_tasks,
)
from steptime_lab.validate.steps.cases import platform_of

Floats = npt.NDArray[np.float64]

CHANCE = "random pick"
HEAVY, ORDINARY, EQUAL, UNEQUAL = "heavy", "ordinary", "equal tables", "unequal tables"
FIRST, FURTHER = "first tasks", "further tasks"
# A plan may be slower than the best rule's by so much, or by the noise where that is more.
ALLOWED = 0.02


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """One plan against the best of the rules' of its task, as measured: ratios below 1 are faster."""

    task: str
    further: bool  # the task
    name: str
    predicted_ns: float
    measured_ns: float
    best_rule: str  # by measured times, in hindsight
    best_rule_predicted_ns: float
    best_rule_ns: float
    ratio: float  # of the means over the same blocks
    low: float  # ends of the paired 95 % interval
    high: float

    @property
    def faster(self) -> bool:
        """By more than the noise."""
        return self.high < 1.0

    @property
    def slower(self) -> bool:
        """By more than is allowed and by more than the noise."""
        return self.ratio > 1.0 + ALLOWED and self.low > 1.0


def given_plans(tasks: Sequence[MeasuredTask], platform: Platform) -> list[GivenPlan]:
    """Of tasks with plans beside the rules'."""
    return [item for task in tasks for item in _of_task(task, platform)]


def _of_task(task: MeasuredTask, platform: Platform) -> Iterator[GivenPlan]:
    by_rule = {rule: plan for rule, plan in task.rules.items() if rule in RULES}
    level = levels(task.paired)
    rule = min(by_rule, key=lambda rule: float(level[by_rule[rule]]))
    best = by_rule[rule]
    result = Evaluator(task.model, platform, task.ranks, calibration=task.calibration).evaluate(task.rank_of, exact=True)
    predicted, measured = result.step_ns.tolist(), task.measured_ns.tolist()
    for name, plan in task.rules.items():
        if name not in by_rule:
            ratio, low, high = ratio_interval(np.log(task.paired[plan] / task.paired[best]))
            times_ns = (predicted[plan], measured[plan], rule, predicted[best], measured[best])
            yield GivenPlan(task.name, task.further, name, *times_ns, ratio, low, high)


@dataclass(frozen=True, eq=False)
class TaskOutcome:
    """A task with its plans judged and estimated."""

    judged: Judged
    found: Evaluation
    estimates: Mapping[str, Floats]  # way -> [plans]

    @property
    def task(self) -> MeasuredTask:
        """As measured."""
        return self.judged.task


@dataclass(frozen=True)
class ShardingGroup:
    """Some of the tasks: what ours reaches, what all others do, and what the data allow."""

    ours: Score
    others: Mapping[str, Score]
    ceiling: Ceiling

    @property
    def best_rule(self) -> tuple[str, Score]:
        """The fixed rule with the least mean regret."""
        rules = {name: item for name, item in self.others.items() if item.spearman is None and name != CHANCE}
        name = min(rules, key=lambda rule: rules[rule].mean_regret)
        return name, rules[name]


@dataclass(frozen=True)
class ShardingValidation:
    """What `steptime validate sharding` found."""

    outcomes: tuple[TaskOutcome, ...]
    whole: ShardingGroup
    groups: Mapping[str, ShardingGroup]
    steps: Validation  # predicted step times of all plans against measured ones
    given: tuple[GivenPlan, ...] = ()  # plans that were searched for and timed beside the rules'


def validate_sharding(names: Sequence[str] | None = None, *, executor: Executor | None = None) -> ShardingValidation:
    """The shipped tasks, or those of some names, by two processes unless an executor is given."""
    tasks, beside = shipped_tasks(names)
    if not tasks:
        raise InputError("no shipped sharding task has such a name; `sharding` in the measurements names them")
    outcomes = list(in_processes(outcome_of, tasks, executor=executor))
    return validation_of(outcomes, given_plans(beside, platform_of(beside[0].ranks)) if beside else ())


def outcome_of(task: MeasuredTask) -> TaskOutcome:
    """One task."""
    result, built = estimates(task, platform_of(task.ranks))
    return TaskOutcome(Judged.of(task), result, built)


def validation_of(outcomes: Sequence[TaskOutcome], given: Sequence[GivenPlan] = ()) -> ShardingValidation:
    """All tasks and groups of them; `given` are plans that were timed beside the rules'."""
    members: dict[str, list[TaskOutcome]] = {name: [] for name in (FIRST, FURTHER, HEAVY, ORDINARY, EQUAL, UNEQUAL)}
    for outcome in outcomes:
        for name in _groups(outcome.task):
            members[name].append(outcome)
    scored = {name: score_group(chosen) for name, chosen in members.items() if chosen}
    places = list(members)
    compared = [
        Compared(case, tuple(name if name in _groups(outcome.task) else None for name in places))
        for outcome in outcomes
        for case in _cases(outcome)
    ]
    steps = Validation.of("sharding", "steps of sharding plans, never run", compared)
    return ShardingValidation(tuple(outcomes), score_group(outcomes), scored, steps, tuple(given))


def _groups(task: MeasuredTask) -> tuple[str, str, str]:
    return FURTHER if task.further else FIRST, HEAVY if task.heavy else ORDINARY, EQUAL if task.equal else UNEQUAL


def score_group(outcomes: Sequence[TaskOutcome]) -> ShardingGroup:
    """What every way to pick reaches on some tasks."""
    judged = [outcome.judged for outcome in outcomes]
    result = {
        way: score(
            judged, [picked(outcome.estimates[way]) for outcome in outcomes], [outcome.estimates[way] for outcome in outcomes]
        )
        for way in outcomes[0].estimates
    }
    rules = {
        rule: score(judged, [rule_picks(outcome.task)[rule] for outcome in outcomes])
        for rule in outcomes[0].task.rules
        if all(rule in outcome.task.rules for outcome in outcomes)
    }
    chance = score(judged, [chance_pick(outcome.task) for outcome in outcomes])
    ours = result.pop(OURS)
    return ShardingGroup(ours, {CHANCE: chance, **rules, **result}, ceiling([outcome.task for outcome in outcomes]))


def _cases(one: TaskOutcome) -> list[MeasuredCase]:
    task = one.task
    names = {index: rule for rule, index in reversed(list(task.rules.items()))}
    return [
        MeasuredCase(
            name=f"{task.name} {names[index]}",
            predicted=float(one.found.step_ns[index]),
            measured=float(task.measured_ns[index]),
            spread=_spread(task.paired[index]),
            repeat_errors=repeat_errors(task.times_ns[index].tolist()),
        )
        for index in range(len(task.rank_of))
    ]


def _spread(values: Floats) -> float:
    low, high = np.quantile(values, (0.1, 0.9))
    return float((high - low) / np.median(values))
