"""`search`: the plan of a task with the shortest predicted step, and the runners-up.

First tables stay whole where they may; every strategy has its turn. Then tables that are large beside a rank's load are divided
further, in the ways the task allows, and the search is repeated on the shards; a division is kept where its step is shorter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np

from steptime.build.dlrm import Dlrm
from steptime.errors import InputError
from steptime.platforms.platform import Platform
from steptime.sharding.evaluation import Evaluator
from steptime.sharding.kinds import COLUMN_WISE, DATA_PARALLEL, EVERYWHERE, ROW_WISE, TABLE_WISE
from steptime.sharding.kinds_analytic import everywhere_ns
from steptime.sharding.plan_evaluation import analytic_ns
from steptime.sharding.plan_kinds import QUAD, Division, MixedPlan
from steptime.sharding.rules import rules
from steptime.sharding.search_loads import of_log
from steptime.sharding.search_state import Budget, Evaluate, Floats, Search
from steptime.sharding.strategies import strategies
from steptime.sharding.strategies.rules import plan_of_rule
from steptime.sharding.task import Task
from steptime.sharding.task_memory import memory_of, rank_limit
from steptime.sharding.task_shortage import packed, pinned_of, shortage
from steptime.sim.modelled.step import UNCALIBRATED, Calibration

RUNNERS_UP = 5
EVALUATIONS = 40_000
# With one lookup per table every plan is played, a few in a second.
_PLAYED_EVALUATIONS = 120
# Shares of a rank's mean load above which a table is divided, one attempt each.
_DIVIDED_ABOVE = (0.5, 1.0, 0.25)
# Divisions that are tried: as many as this over the number of tables, for each asks the lookup models about its shards anew.
_DIVISIONS = 400
# Slices narrower than this are not tried: lookups of such rows were not measured.
_LEAST_COLUMNS = 16
# Parts of a rank's room that tables are cut down to where they do not fit, one attempt after the other.
_CUT_TO_FIT = (1, 2, 4, 8)
# A plan that divides tables further has to be this much faster: it is more to run and to keep.
_WORTH_DIVIDING = 1.001
# What the search over whole tables may spend of all evaluations; the divisions share the rest.
_WHOLE_SHARE = 0.5

Make = Callable[[Dlrm, int], Evaluate]


@dataclass(frozen=True, slots=True)
class Option:
    """A plan and its predicted step."""

    plan: MixedPlan
    step_ns: float
    by: str


@dataclass(frozen=True)
class Searched:
    """What a search found: plans, best first; what each usual rule would give; and what it took."""

    task: Task
    options: tuple[Option, ...]
    rules: Mapping[str, Option | None]  # None: the rule finds no room
    searched_plans: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Option:
        """The plan with the shortest predicted step."""
        return self.options[0]

    @property
    def best_rule(self) -> tuple[str, Option] | None:
        """The usual rule whose plan is fastest; None where no rule's plan fits."""
        there = [(name, option) for name, option in self.rules.items() if option is not None]
        return min(there, key=lambda one: one[1].step_ns, default=None)


class Divided:
    """A task on a platform: divisions of its tables, and searches among the plans of each."""

    def __init__(self, task: Task, platform: Platform, budget: Budget, make: Make) -> None:
        self.task, self.platform, self.budget = task, platform, budget
        self._make = make
        self.limit, self.outside_bytes = rank_limit(platform.device.limits, task.ranks, task.constraints.memory_bytes)

    def search(self, division: Division, evaluations: int) -> Search | None:
        """A search among the plans of a division; None where none fits."""
        task = self.task
        shards = division.shard_tables(task.tables)
        memory = memory_of(task.model, division, task.ranks, self.limit, self.outside_bytes)
        pinned = pinned_of(task, division)
        start = packed(memory, pinned, task.ranks) if shards else None
        if start is None:
            return None
        added = analytic_ns(task.model, division, self.platform, task.ranks)
        evaluate = self._make(replace(task.model, tables=shards), task.ranks)
        found = Search(shards, task.ranks, memory, pinned, evaluate, self.budget.with_evaluations(evaluations), added)
        found.by = "packed"
        found.ask(start, beyond=True)
        return found

    def first(self) -> Division:
        """Tables whole where they may be and fit, else cut as far as it takes; where nothing packs, the least cut."""
        tried = [self._cut_to_fit(parts) for parts in _CUT_TO_FIT]
        return next((one for one in tried if self._packs(one)), tried[0])

    def _packs(self, division: Division) -> bool:
        task = self.task
        memory = memory_of(task.model, division, task.ranks, self.limit, self.outside_bytes)
        return packed(memory, pinned_of(task, division), task.ranks) is not None

    def _cut_to_fit(self, parts: int) -> Division:
        """Every table that takes more than such a part of a rank is cut, where it may be."""
        task, division = self.task, Division.whole(len(self.task.tables))
        memory = memory_of(task.model, division, task.ranks, self.limit, self.outside_bytes)
        room = max(memory.room // parts, 1)
        for place, size in enumerate(memory.shard_bytes.tolist()):
            allowed = task.allowed(place)
            if TABLE_WISE in allowed and size <= room:
                continue
            kind = next((kind for kind in (COLUMN_WISE, ROW_WISE, DATA_PARALLEL) if kind in allowed), None)
            if kind is not None:
                most = max(task.tables[place].dim // QUAD, 1)
                division = division.with_table(place, kind, max(min(most, math.ceil(size / room)), min(most, 2)))
        return division

    def further(self, division: Division, loads: Floats) -> Iterator[Division]:
        """Divisions with the tables cut whose loads, [tables], are large beside the mean of a rank."""
        mean = float(loads.sum()) / self.task.ranks
        seen = {division}
        for share in _DIVIDED_ABOVE:
            for kind in (COLUMN_WISE, ROW_WISE):
                found = self._cut(division, loads, share * mean, kind)
                if found not in seen:
                    seen.add(found)
                    yield found
        copied = self._copied(division, loads)
        if copied not in seen:
            yield copied

    def _cut(self, division: Division, loads: Floats, above: float, kind: str) -> Division:
        for place in np.flatnonzero(loads > above).tolist():
            table = self.task.tables[place]
            if kind not in self.task.allowed(place) or division.kinds[place] != TABLE_WISE:
                continue
            most = min(table.dim // max(_LEAST_COLUMNS, QUAD), self.task.ranks)
            slices = min(most, math.ceil(loads[place] / max(above, 1e-9)))
            if kind in EVERYWHERE or slices > 1:
                division = division.with_table(place, kind, slices)
        return division

    def _copied(self, division: Division, loads: Floats) -> Division:
        """Copies of the tables whose lookups and gradients on every rank cost less than their share of a rank's load."""
        task = self.task
        for place, table in enumerate(task.tables):
            if DATA_PARALLEL in task.allowed(place) and division.kinds[place] == TABLE_WISE:
                ns = everywhere_ns(task.model, table, DATA_PARALLEL, self.platform, task.ranks)
                if ns < loads[place] / task.ranks:
                    division = division.with_table(place, DATA_PARALLEL)
        return division if any(division.slices) else Division.whole(len(task.tables))


def evaluators(platform: Platform, calibration: Calibration = UNCALIBRATED) -> Make:
    """Evaluation of the whole step on a platform."""
    return lambda model, ranks: Evaluator.of(model, platform, ranks, calibration=calibration).evaluate


def search(
    task: Task,
    platform: Platform,
    budget: Budget | None = None,
    *,
    make: Make | None = None,
    only: Sequence[str] | None = None,
) -> Searched:
    """The best plans of a task on a platform; `only` names strategies, `make` replaces the evaluation."""
    began = time.monotonic()
    budget = budget or Budget(usual_evaluations(task.model))
    check_ranks(task, platform)
    divided = Divided(task, platform, budget, make or evaluators(platform))
    base = divided.first()
    first = divided.search(base, int(budget.evaluations * _WHOLE_SHARE))
    if first is None:
        memory = memory_of(task.model, base, task.ranks, divided.limit, divided.outside_bytes)
        raise shortage(task, base, memory, divided.outside_bytes)
    _strategies(first, only)
    searches = [(base, first)]
    left = budget.evaluations - first.asked
    most = max(_DIVISIONS // len(task.tables), 1)
    others = list(divided.further(base, table_loads(task, base, first)))[:most]
    for number, division in enumerate(others):
        if left <= 0 or budget.out_of_time():
            break
        found = divided.search(division, left // (len(others) - number))
        if found is not None:
            _strategies(found, only)
            left -= found.asked
            searches.append((division, found))
    return Searched(
        task=task,
        options=_options(task, searches),
        rules=_rules(task, *searches[0]),
        searched_plans=sum(one.asked for _, one in searches),
        seconds=time.monotonic() - began,
        notes=task.notes,
    )


def search_many(tasks: Sequence[Task], platform: Platform, executor: Executor, budget: Budget | None = None) -> list[Searched]:
    """Many tasks at once, in the order given; any executor does: threads, processes, a cluster's."""
    seconds = None if budget is None else budget.seconds
    running = [
        executor.submit(_search_one, task, platform, budget.evaluations if budget else usual_evaluations(task.model), seconds)
        for task in tasks
    ]
    return [one.result() for one in running]


def _search_one(task: Task, platform: Platform, evaluations: int, seconds: float | None) -> Searched:
    return search(task, platform, Budget(evaluations, seconds))  # the clock begins where the work does


def usual_evaluations(model: Dlrm) -> int:
    """Plans that a search may ask for where nobody says: some seconds of them."""
    return EVALUATIONS if model.lookup == "table_batched" else _PLAYED_EVALUATIONS


def check_ranks(task: Task, platform: Platform) -> None:
    """Refuses more ranks than the platform has."""
    if task.ranks > platform.ranks:
        raise InputError(
            f"{task.model.name} on {task.ranks} ranks: platform {platform.name} joins {platform.ranks}; choose one that joins "
            f"{task.ranks} or more, as `steptime platforms` lists them, or --ranks {platform.ranks}"
        )


def table_loads(task: Task, division: Division, found: Search) -> Floats:
    """What every table adds to the loads of its ranks, [tables]; 0 for one that every rank has a part of."""
    sizes = of_log(found).size
    places = [shard.table for shard in division.shards(task.tables)]
    return np.bincount(places, weights=sizes, minlength=len(task.tables)).astype(np.float64)


def _strategies(found: Search, only: Sequence[str] | None) -> None:
    for strategy in strategies().values():
        if (only is None or strategy.name in only) and found.left:
            found.by = strategy.name
            strategy.run(found)


def _options(task: Task, searches: Sequence[tuple[Division, Search]]) -> tuple[Option, ...]:
    """Best first: of every division what each strategy found, rather than the many plans that hardly differ from the best."""
    every = [(one, division) for division, each in searches for one in each.best_by.values()]
    first, _ = searches[0]
    found: dict[str, Option] = {}
    for one, division in sorted(
        every, key=lambda pair: (pair[0].score * (1.0 if pair[1] == first else _WORTH_DIVIDING), pair[0].rank_of)
    ):
        plan = division.plan(task.tables, one.rank_of, task.ranks)
        found.setdefault(plan.to_json(), Option(plan, one.step_ns, one.by))
    return tuple(found.values())[: RUNNERS_UP + 1]


def _rules(task: Task, division: Division, found: Search) -> dict[str, Option | None]:
    """What each usual rule makes of whole tables, or of what they had to be cut into."""
    options: dict[str, Option | None] = {}
    for name in rules():
        plan = plan_of_rule(found, name)
        step = np.inf if plan is None else found.step_ns(plan)
        if plan is None or not np.isfinite(step):
            options[name] = None
        else:
            options[name] = Option(division.plan(task.tables, plan.tolist(), task.ranks), step, name)
    return options
