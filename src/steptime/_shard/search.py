"""`search`: the plan of a task with the shortest predicted step, and the runners-up.

First tables stay whole where they may; every strategy has its turn. Then tables that are large beside a rank's load are divided
further, in the ways the task allows, and the search is repeated on the shards; a division is kept where its step is shorter.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import Plan
from steptime._platforms.names import joining
from steptime._platforms.platform import Platform
from steptime._shard.divisions import TaskDivisions
from steptime._shard.evaluator import Evaluator, is_played
from steptime._shard.guide import of_log
from steptime._shard.rules import RULES
from steptime._shard.search_state import Evaluates, Floats, Search, SearchBudget
from steptime._shard.shortage import shortage
from steptime._shard.strategies import CHEAP, MOST_PLANS, STRATEGIES, count_plans, plan_of_rule, plans_at_most, propose
from steptime._shard.task import Task
from steptime.errors import InputError

RUNNERS_UP = 5

MOST_TABLES = 4096
"""Matrices of tables by tables say what each adds to a rank: beyond, they take gigabytes, and minutes to solve."""

# Plans whose lookups are asked for anew before one is chosen, at most: as many as this over tables times ranks, and a few.
# Of those, only plans within this factor of the best of all divisions: curves are hardly further off.
_ASKED_EXACTLY, _LEAST_EXACT, _MOST_EXACT, _NEAR_BEST = 200_000, 4, 32, 1.03
# At most, and for every table and rank that it may be on: few tables have few plans worth a look.
EVALUATIONS, _EVALUATIONS_OF_A_PLACE = 150_000, 100
# With one lookup per table every plan is played, a few in a second.
_PLAYED_EVALUATIONS = 120
# Of a division in which nodes share rows, a plan is played in the time in which hundreds are evaluated.
_LEAST_PLAYED, _PLAYED_ON_ALL_RANKS = 3, 160
# Divisions that are tried of each kind: as many as this over the number of tables, for each asks the lookup models anew.
_DIVISIONS = 400
# A division gets other strategies than cheap ones unless it would stay this much longer than the best of all if they gained as
# much as among whole tables.
_PROMISING = 1.02
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

    @property
    def best(self) -> Option:
        """The plan with the shortest predicted step."""
        return self.options[0]

    @property
    def best_rule(self) -> tuple[str, Option] | None:
        """The usual rule whose plan is fastest; None where no rule's plan fits."""
        there = [(name, option) for name, option in self.rules.items() if option is not None]
        return min(there, key=lambda one: one[1].step_ns, default=None)


def search(
    task: Task,
    platform: Platform,
    budget: SearchBudget | None = None,
    *,
    evaluator: Evaluates | None = None,
    only: Sequence[str] | None = None,
) -> Searched:
    """The best plans of a task on a platform; `only` names strategies, `evaluator` replaces the evaluation of the step."""
    began = time.monotonic()
    budget = budget or SearchBudget(usual_evaluations(task.model, task.ranks))
    check_ranks(task, platform)
    if len(task.tables) > MOST_TABLES:
        raise InputError(
            f"{len(task.tables)} tables; at most {MOST_TABLES} can be placed; join small ones of equal width and lookups"
        )
    divisions = TaskDivisions(task, platform, budget, evaluator or Evaluator(task.model, platform, task.ranks))
    base = divisions.first()
    first = divisions.search(base, int(budget.evaluations * (_WHOLE_SHARE if divisions.divisible else 1.0)))
    if first is None:
        raise shortage(task, base, divisions.memory(base), divisions.outside_bytes)
    if first.shards:
        propose(first, only or CHEAP)
    proposed = first.best.score
    if plans_at_most(first) <= min(MOST_PLANS, budget.evaluations - first.asked):
        first.budget = budget  # every plan is asked for, and the search among them ends
    _run_strategies(first, (only or STRATEGIES) if first.shards else ())
    searches = [first, *_further(divisions, first, first.best.score / proposed, only)] if first.shards else [first]
    searched_plans = sum(item.asked for item in searches)
    near = _NEAR_BEST * min(item.best.score for item in searches)
    searches = [_exactly(item, near) for item in searches]
    return Searched(
        task=task,
        options=_options(task, searches),
        rules=_rules(task, searches[0]),  # which may be better than what was found, where time ran out
        searched_plans=searched_plans,
        seconds=time.monotonic() - began,
    )


def _further(divisions: TaskDivisions, first: Search, gained: float, only: Sequence[str] | None) -> list[Search]:
    """Searches among further divisions: by cheap strategies all of them, by the others the promising ones.

    `gained`: the best step among plans of whole tables over that of cheap strategies.
    """
    task, budget = divisions.task, divisions.budget
    left = budget.evaluations - first.asked
    loads = table_loads(task, first)
    most = max(_DIVISIONS // len(task.tables), 1)
    searches = []
    for division in list(divisions.further(first, loads, table_shares(task, first, loads), most)):
        played = is_played(task.model, division)
        result = (
            None if left <= 0 or budget.out_of_time() else divisions.search(division, _most_played(task) if played else left)
        )
        if result is not None:
            if division.nodes:
                result.by = "nodes"
                result.ask(divisions.kept(first, division))
            if result.shards:
                propose(result, only or CHEAP)
            left -= result.asked
            searches.append(result)
    best = min(item.best.score for item in (first, *searches))
    others = [item for item in searches if not item.division.shares_nodes]
    promising = [item for item in others if only is not None or gained * item.best.score <= _PROMISING * best]
    for number, result in enumerate(promising):
        before = result.asked
        result.budget = budget.with_evaluations(before + max(left, 0) // (len(promising) - number))
        _run_strategies(result, only or STRATEGIES)
        left -= result.asked - before
    return searches


def _most_played(task: Task) -> int:
    """Plans of a division that is played: a second or two of them."""
    return max(_LEAST_PLAYED, _PLAYED_ON_ALL_RANKS // task.ranks)


def usual_evaluations(model: Dlrm, ranks: int) -> int:
    """Plans that a search may ask for where nobody says: some seconds of them."""
    if not model.composable:
        return _PLAYED_EVALUATIONS
    usual = min(EVALUATIONS, _EVALUATIONS_OF_A_PLACE * len(model.tables) * ranks)
    every = count_plans(len(model.tables), ranks)
    return usual if every > MOST_PLANS else every + int(usual * (1 - _WHOLE_SHARE))


def check_ranks(task: Task, platform: Platform) -> None:
    """Refuses more ranks than the platform has."""
    if task.ranks > platform.ranks:
        raise InputError(
            f"{task.model.name} on {task.ranks} ranks: platform {platform.name} joins {platform.ranks}; choose one that joins "
            f"{task.ranks} or more, as {joining(task.ranks, platform.parts.device) or '`steptime platforms` lists them'}, or "
            f"--ranks {platform.ranks}"
        )


def table_loads(task: Task, search: Search) -> Floats:
    """What every table adds to the loads of its ranks, [tables]; 0 for one that every rank has a part of."""
    tables = [shard.table for shard in search.division.shards(task.tables)]
    return np.bincount(tables, weights=of_log(search).size, minlength=len(task.tables)).astype(np.float64)


def table_shares(task: Task, search: Search, loads: Floats) -> Floats:
    """About what the best plan's step would take less without each table, [tables]: its shares of lookups and of exchanges."""
    best = search.result(np.array(search.best.rank_of))
    columns = np.array([table.dim for table in task.tables], dtype=np.float64)
    lookups, exchanges = float(best.lookups_ns.max()), float(best.exchange_ns.max())
    result: Floats = lookups * loads / max(float(loads.sum()), 1.0) + exchanges * columns / columns.sum()
    return result


def _run_strategies(search: Search, names: Collection[str]) -> None:
    """All but the cheap ones, until every plan is known."""
    for name, strategy in STRATEGIES.items():
        if name in names and name not in CHEAP and search.left and not search.complete:
            search.by = name
            strategy(search)


def _exactly(search: Search, near: float) -> Search:
    """With lookups asked for anew of plans that score up to `near` and of every strategy's best.

    Curves are up to 2 % off, which a search finds.
    """
    if not search.shards or search.division.shares_nodes:
        return search  # played: nothing is more exact
    most = min(max(_ASKED_EXACTLY // (len(search.shards) * search.ranks), _LEAST_EXACT), _MOST_EXACT)
    exact = replace(search, exact=True, ranked=[], best_by={}, log=[], _known={})
    best = [item for item in search.ranked[:most] if item.score <= near]
    chosen = list(dict.fromkeys([*best, *search.best_by.values()]))
    exact.ask(np.array([item.rank_of for item in chosen]), by=[item.by for item in chosen], beyond=True)
    return exact


def _options(task: Task, searches: Sequence[Search]) -> tuple[Option, ...]:
    """Best first: of every division what each strategy found, rather than the many plans that hardly differ from the best."""
    every = [(item, search.division) for search in searches for item in search.best_by.values()]
    first = searches[0].division
    result: dict[str, Option] = {}
    for item, division in sorted(
        every, key=lambda pair: (pair[0].score * (1.0 if pair[1] == first else _WORTH_DIVIDING), pair[0].rank_of)
    ):
        plan = division.plan(task.tables, item.rank_of, task.ranks)
        result.setdefault(plan.to_json(), Option(plan, item.step_ns, item.by))
    return tuple(sorted(list(result.values())[: RUNNERS_UP + 1], key=lambda option: option.step_ns))


def _rules(task: Task, search: Search) -> dict[str, Option | None]:
    """What each usual rule makes of whole tables, or of what they had to be cut into; None where it finds no room."""
    plans = {name: plan for name in RULES if (plan := plan_of_rule(search, name)) is not None}
    options: dict[str, Option | None] = dict.fromkeys(RULES)
    scores = search.ask(np.stack(list(plans.values())), beyond=True) if plans else ()
    for (name, plan), score in zip(plans.items(), scores, strict=True):
        if np.isfinite(score):
            step_ns = float(search.result(plan).step_ns[0])
            options[name] = Option(search.division.plan(task.tables, plan.tolist(), task.ranks), step_ns, name)
    return options
