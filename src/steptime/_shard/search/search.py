"""`search`: the plan of a task with the shortest predicted step, and the runners-up.

First tables stay whole where they may; every strategy has its turn. Then tables that are large beside a rank's load are divided
further, in the ways the task allows, and the search is repeated on the shards; a division is kept where its step is shorter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import Division, Plan
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluate.divided import check_shards
from steptime._shard.evaluate.evaluator import Evaluator
from steptime._shard.evaluate.simulated import played_ns
from steptime._shard.rules import rules
from steptime._shard.search.divisions import Divided, Make
from steptime._shard.search.loads import of_log
from steptime._shard.search.state import Budget, Floats, Search
from steptime._shard.strategies import strategies
from steptime._shard.strategies.rules import plan_of_rule
from steptime._shard.task.memory import memory_of
from steptime._shard.task.shortage import shortage
from steptime._shard.task.task import Task
from steptime._sim.composed import ComposedStep
from steptime.errors import InputError

RUNNERS_UP = 5
# Plans whose lookups are asked for anew before one is chosen, at most: as many as this over tables times ranks, and a few.
# Of those, only plans within this factor of the best of all divisions: curves are hardly further off.
_ASKED_EXACTLY, _LEAST_EXACT, _MOST_EXACT, _NEAR_BEST = 50_000, 4, 32, 1.03
# At most, and for every table and rank that it may be on: few tables have few plans worth a look.
EVALUATIONS, _EVALUATIONS_OF_A_PLACE = 150_000, 100
# With one lookup per table every plan is played, a few in a second.
_PLAYED_EVALUATIONS = 120
# Divisions that are tried of each kind: as many as this over the number of tables, for each asks the lookup models anew.
_DIVISIONS = 400
# Strategies up to this turn are cheap: every division gets them; the others not where copies or rows make it this much longer.
_CHEAP, _LAST, _PROMISING = 2, 99, 1.1
# A plan that divides tables further has to be this much faster: it is more to run and to keep.
_WORTH_DIVIDING = 1.001
# What the search over whole tables may spend of all evaluations; the divisions share the rest.
_WHOLE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Option:
    """A plan and its predicted step."""

    plan: Plan
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
    step: ComposedStep | None = None  # what plans were evaluated with, where that was the whole step

    @property
    def best(self) -> Option:
        """The plan with the shortest predicted step."""
        return self.options[0]

    @property
    def best_rule(self) -> tuple[str, Option] | None:
        """The usual rule whose plan is fastest; None where no rule's plan fits."""
        there = [(name, option) for name, option in self.rules.items() if option is not None]
        return min(there, key=lambda one: one[1].step_ns, default=None)


def evaluators(platform: Platform, calibration: Calibration = UNCALIBRATED) -> Make:
    """Evaluation of the whole step on a platform; all divisions of a model's tables share what is composed once."""
    composed: list[ComposedStep] = []

    def make(model: Dlrm, ranks: int) -> Evaluator:
        result = Evaluator.of(model, platform, ranks, calibration=calibration, step=composed[0] if composed else None)
        if result.together is not None and not composed:
            composed.append(result.together.step)
        return result

    return make


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
    budget = budget or Budget(usual_evaluations(task.model, task.ranks))
    check_ranks(task, platform)
    divided = Divided(task, platform, budget, make or evaluators(platform))
    base = divided.first()
    check_shards(base)
    first = divided.search(base, int(budget.evaluations * (_WHOLE_SHARE if divided.divisible else 1.0)))
    if first is None:
        memory = memory_of(task.model, base, task.ranks, divided.limit, divided.outside_bytes)
        raise shortage(task, base, memory, divided.outside_bytes)
    _strategies(first, only)
    searches = [(base, first)]
    left = budget.evaluations - first.asked
    most = max(_DIVISIONS // len(task.tables), 1)
    loads = table_loads(task, base, first)
    others = list(divided.further(base, first, loads, table_shares(task, first, loads), most))
    tried = []
    for division in others:
        result = None if left <= 0 or budget.out_of_time() else divided.search(division, left)
        if result is not None:
            _strategies(result, only, last=_CHEAP)
            left -= result.asked
            tried.append((division, result))
    promising = _promising(tried) if only is None else tried
    for number, (_, result) in enumerate(promising):
        before = result.asked
        result.budget = budget.with_evaluations(before + max(left, 0) // (len(promising) - number))
        _strategies(result, only, first=_CHEAP + 1)
        left -= result.asked - before
    searches += tried
    searched_plans = sum(item.asked for _, item in searches)
    near = _NEAR_BEST * min(item.found[0].score for _, item in searches)
    searches = [(division, _exactly(item, near)) for division, item in searches]
    options = [_played(task, platform, option, first) for option in _options(task, searches)]
    rules_made = {
        name: None if option is None else _played(task, platform, option, first)
        for name, option in _rules(task, *searches[0]).items()
    }  # which may be better than what was found, where time ran out
    return Searched(
        task=task,
        options=tuple(sorted(options, key=lambda option: option.step_ns)),
        rules=rules_made,
        searched_plans=searched_plans,
        seconds=time.monotonic() - began,
        notes=task.notes,
        step=first.evaluate.together.step if isinstance(first.evaluate, Evaluator) and first.evaluate.together else None,
    )


def search_many(tasks: Sequence[Task], platform: Platform, executor: Executor, budget: Budget | None = None) -> list[Searched]:
    """Many tasks at once, in the order given; any executor does: threads, processes, a cluster's."""
    seconds = None if budget is None else budget.seconds
    running = [
        executor.submit(
            _search_one, task, platform, budget.evaluations if budget else usual_evaluations(task.model, task.ranks), seconds
        )
        for task in tasks
    ]
    return [item.result() for item in running]


def _search_one(task: Task, platform: Platform, evaluations: int, seconds: float | None) -> Searched:
    return search(task, platform, Budget(evaluations, seconds))  # the clock begins where the work does


def usual_evaluations(model: Dlrm, ranks: int) -> int:
    """Plans that a search may ask for where nobody says: some seconds of them."""
    if model.lookup != "table_batched":
        return _PLAYED_EVALUATIONS
    return min(EVALUATIONS, _EVALUATIONS_OF_A_PLACE * len(model.tables) * ranks)


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


def table_shares(task: Task, found: Search, loads: Floats) -> Floats:
    """About what the best plan's step would take less without each table, [tables]: its shares of lookups and of exchanges."""
    assert found.best is not None, "a search begins with a plan"
    best = found.parts(np.array(found.best.rank_of))
    columns = np.array([table.dim for table in task.tables], dtype=np.float64)
    lookups, exchanges = float((best.forward_ns + best.backward_ns).max()), float(best.exchange_ns.max())
    found_ns: Floats = lookups * loads / max(float(loads.sum()), 1.0) + exchanges * columns / columns.sum()
    return found_ns


def _strategies(found: Search, only: Sequence[str] | None, *, first: int = 0, last: int = _LAST) -> None:
    for strategy in strategies().values():
        if (only is None or strategy.name in only) and first <= strategy.order <= last and found.left:
            found.by = strategy.name
            strategy.run(found)


def _promising(tried: Sequence[tuple[Division, Search]]) -> list[tuple[Division, Search]]:
    """Those with tables that every rank has a part of only where they are not far behind, by what cheap strategies found."""
    best = min((item.found[0].score for _, item in tried), default=0.0)
    return [pair for pair in tried if not pair[0].everywhere() or pair[1].found[0].score <= _PROMISING * best]


def _exactly(found: Search, near: float) -> Search:
    """With lookups asked for anew of plans that score up to `near` and of every strategy's best.

    Curves are up to 2 % off, which a search finds.
    """
    if not isinstance(found.evaluate, Evaluator):
        return found  # somebody's own evaluation
    most = min(max(_ASKED_EXACTLY // (len(found.shards) * found.ranks), _LEAST_EXACT), _MOST_EXACT)
    exact = replace(found, evaluate=found.evaluate.exactly(), found=[], best_by={}, log=[], _known={}, _rows={})
    best = [item for item in found.found[:most] if item.score <= near]
    asked = dict.fromkeys([*best, *found.best_by.values()])
    for strategy in dict.fromkeys(item.by for item in asked):
        exact.by = strategy
        exact.ask(np.array([item.rank_of for item in asked if item.by == strategy]), beyond=True)
    return exact


def _options(task: Task, searches: Sequence[tuple[Division, Search]]) -> tuple[Option, ...]:
    """Best first: of every division what each strategy found, rather than the many plans that hardly differ from the best."""
    every = [(item, division) for division, each in searches for item in each.best_by.values()]
    first, _ = searches[0]
    result: dict[str, Option] = {}
    for item, division in sorted(
        every, key=lambda pair: (pair[0].score * (1.0 if pair[1] == first else _WORTH_DIVIDING), pair[0].rank_of)
    ):
        plan = division.plan(task.tables, item.rank_of, task.ranks)
        result.setdefault(plan.to_json(), Option(plan, item.step_ns, item.by))
    return tuple(result.values())[: RUNNERS_UP + 1]


def _played(task: Task, platform: Platform, option: Option, found: Search) -> Option:
    """A plan with tables that every rank has a part of has the step that `predict` says."""
    if not isinstance(found.evaluate, Evaluator) or not option.plan.divided(task.tables)[0].everywhere():
        return option
    return replace(option, step_ns=played_ns(task.model, platform, option.plan, found.evaluate.calibration))


def _rules(task: Task, division: Division, found: Search) -> dict[str, Option | None]:
    """What each usual rule makes of whole tables, or of what they had to be cut into."""
    options: dict[str, Option | None] = {}
    found.by = "rules"
    for name in rules():
        plan = plan_of_rule(found, name)
        step = np.inf if plan is None else found.step_ns(plan)
        if plan is None or not np.isfinite(step):
            options[name] = None
        else:
            options[name] = Option(division.plan(task.tables, plan.tolist(), task.ranks), step, name)
    return options
