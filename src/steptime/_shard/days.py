"""Lookups of several days: a model for each of them, and the plan that is best on their worst or on their mean.

A day is a file as `steptime predict --lookups` reads it, or the steps of one rank alone: statistics of tables by their names.
Of several iterations that with the middle number of lookups stands for the day, table by table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import Division, Plan
from steptime._build.dlrm.workload import generator_like
from steptime._lookups import saved
from steptime._lookups.table import TableStatistics
from steptime._lookups.workload import RankLookups, StepLookups, WorkloadLookups
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluator import Evaluator
from steptime._shard.search import Option, Searched, search
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Places, Task
from steptime._sim.composed import Evaluation
from steptime.errors import InputError

WORST, MEAN = OBJECTIVES = ("worst", "mean")
ROBUST = "robust"


@dataclass(frozen=True, slots=True)
class DayPlan:
    """A plan, what its step takes on every day, and what that is by the objective."""

    name: str  # the day that it is best on, or `ROBUST`
    plan: Plan
    steps_ns: tuple[float, ...]
    objective_ns: float


@dataclass(frozen=True, slots=True)
class Days:
    """Plans that are best on single days and the one that is best on all of them, on every day."""

    objective: str
    names: tuple[str, ...]
    plans: tuple[DayPlan, ...]  # the robust one last

    def losses(self, plan: DayPlan) -> tuple[float, ...]:
        """How much longer its steps are than the shortest known of each day, as shares."""
        best = [min(each.steps_ns[day] for each in self.plans) for day in range(len(self.names))]
        return tuple(step / least - 1 for step, least in zip(plan.steps_ns, best, strict=True))


@dataclass(frozen=True)
class SearchedDays:
    """What was found, with the task and the evaluator of the day on which the robust plan takes longest."""

    days: Days
    searched: Searched  # among plans for all days
    longest: Evaluator


def day_models(files: Sequence[Path], model: Dlrm) -> dict[str, Dlrm]:
    """The model with the lookups of every file, by the name of the file."""
    stems = [file.name.partition(".")[0] for file in files]
    names = [stem if stems.count(stem) == 1 and stem != ROBUST else str(file) for stem, file in zip(stems, files, strict=True)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--lookups: {twice} is given twice; expected every file once")
    return {name: _of_day(file, model) for name, file in zip(names, files, strict=True)}


def _of_day(file: Path, model: Dlrm) -> Dlrm:
    found = _statistics(file)
    missing = next((table.name for table in model.tables if table.name not in found), None)
    if missing is not None:
        raise InputError(f"{file}: no statistics of table {missing!r}; expected those of every table of the task")
    tables = []
    for index, table in enumerate(model.tables):
        counted = found[table.name]
        if counted.rows != table.rows:
            raise InputError(
                f"{file}: table {table.name!r} has {counted.rows} rows, in the task {table.rows}; expected the same"
            )
        tables.append(_with(table, counted, index))
    return replace(model, tables=tuple(tables))


def _with(table: Table, counted: TableStatistics, index: int) -> Table:
    factor = counted.lookups / counted.batch
    like = generator_like(table.rows, factor, counted.batch, counted.unique, index)
    return replace(table, generator=like, statistics=replace(counted, table=table.name, dim=table.dim))


def _statistics(file: Path) -> dict[str, TableStatistics]:
    """By table: of the iteration with the middle number of lookups."""
    values = saved.read_json(file)
    if isinstance(values, dict) and "steps" in values:
        groups = [StepLookups.from_dict(values, str(file))]
    else:
        ranks = WorkloadLookups.from_dict(values, str(file)).ranks
        groups = [group for _, rank in sorted(ranks.items()) for group in _groups(rank)]
    found: dict[str, TableStatistics] = {}
    for group in groups:
        for iterations in zip(*group.steps, strict=True):
            name = iterations[0].table
            if name in found:
                raise InputError(f"{file}: table {name!r} is there on several ranks; expected every table once, whole")
            found[name] = sorted(iterations, key=lambda each: each.lookups)[len(iterations) // 2]
    return found


def _groups(rank: RankLookups) -> list[StepLookups]:
    return [rank.steps, *(steps for group in rank.then for steps in _groups(group))]


@dataclass(frozen=True)
class DaysEvaluator:
    """Evaluates plans on every day: their steps on the worst or on the mean of them, and what their ranks do then."""

    evaluators: Mapping[str, Evaluator]
    objective: str

    def evaluate(self, rank_of: Places, division: Division, *, exact: bool = False) -> Evaluation:
        """Plans of a division's shards, [plans, shards]."""
        return self._over_days([one.evaluate(rank_of, division, exact=exact) for one in self.evaluators.values()])

    def simulate(self, rank_of: Places, division: Division) -> Evaluation:
        """The same, each day played."""
        return self._over_days([one.simulate(rank_of, division) for one in self.evaluators.values()])

    def _over_days(self, found: Sequence[Evaluation]) -> Evaluation:
        steps = np.stack([each.step_ns for each in found])
        worst, plans = steps.argmax(axis=0), np.arange(steps.shape[1])
        columns = {}
        for field in fields(Evaluation):
            stacked = np.stack([getattr(each, field.name) for each in found])
            # Plans that are alike on the worst day are told apart by what devices take on the mean one.
            of_mean = stacked.dtype != np.bool_ and (self.objective == MEAN or field.name == "device_ns")
            columns[field.name] = stacked.mean(axis=0) if of_mean else stacked[worst, plans]
        return Evaluation(**columns)


def search_days(
    task: Task,
    platform: Platform,
    models: Mapping[str, Dlrm],
    objective: str,
    budget: SearchBudget,
    calibration: Calibration = UNCALIBRATED,
) -> SearchedDays:
    """The best plan of every day, and the one that is best on all of them by the objective."""
    evaluators = {name: Evaluator(model, platform, task.ranks, calibration=calibration) for name, model in models.items()}
    seconds = None if budget.seconds is None else budget.seconds / (len(models) + 1)
    alone = {}
    for name, one in evaluators.items():
        own = replace(task, model=models[name])
        alone[name] = search(own, platform, SearchBudget(budget.evaluations, seconds, progress=budget.progress), evaluator=one)
    together = DaysEvaluator(evaluators, objective)
    most = replace(task, model=_most_lookups(task.model, list(models.values())))
    robust = search(most, platform, SearchBudget(budget.evaluations, seconds, progress=budget.progress), evaluator=together)
    # What is best on a single day may be best on all of them, where the search for these found less.
    options = [*robust.options, *(replace(one.best, by=f"best of {name}") for name, one in alone.items())]
    steps = {option.plan.to_json(): _steps_ns(task, option.plan, evaluators) for option in options}
    scored = [Option(one.plan, _by(objective, steps[one.plan.to_json()]), one.by, played=True) for one in options]
    distinct = {one.plan.to_json(): one for one in sorted(scored, key=lambda one: -one.step_ns)}
    ordered = tuple(sorted(distinct.values(), key=lambda one: (one.step_ns, sum(steps[one.plan.to_json()]))))
    named = {**{name: one.best.plan for name, one in alone.items()}, ROBUST: ordered[0].plan}
    plans = [DayPlan(name, plan, steps[key := plan.to_json()], _by(objective, steps[key])) for name, plan in named.items()]
    worst = list(models)[int(np.argmax(plans[-1].steps_ns))]
    searched = replace(
        robust,
        task=replace(task, model=models[worst]),
        options=ordered[: len(robust.options)],
        searched_plans=robust.searched_plans + sum(one.searched_plans for one in alone.values()),
        seconds=robust.seconds + sum(one.seconds for one in alone.values()),
    )
    return SearchedDays(Days(objective, tuple(models), tuple(plans)), searched, evaluators[worst])


def _most_lookups(model: Dlrm, days: Sequence[Dlrm]) -> Dlrm:
    """Every table as on the day on which most is looked up in it: what has to fit, and what rules go by."""
    columns = zip(*(day.tables for day in days), strict=True)
    return replace(model, tables=tuple(max(tables, key=lambda table: table.pooling_factor) for tables in columns))


def _steps_ns(task: Task, plan: Plan, evaluators: Mapping[str, Evaluator]) -> tuple[float, ...]:
    division, owners = plan.divided(task.tables)
    rank_of: npt.NDArray[np.intp] = np.array([owners], dtype=np.intp)
    return tuple(float(one.simulate(rank_of, division).step_ns[0]) for one in evaluators.values())


def _by(objective: str, steps_ns: Sequence[float]) -> float:
    return max(steps_ns) if objective == WORST else float(np.mean(steps_ns))
