"""`search`: the plan of a task with the shortest predicted step, and the runners-up.

First tables stay whole where they may; every strategy has its turn. Then tables that are large beside a rank's load are divided
further, in the ways the task allows, and the search is repeated on the shards; a division is kept where its step is shorter.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
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
from steptime._shard.task import FREE, Task
from steptime.errors import InputError

RUNNERS_UP = 3

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

TOLD_APART = 0.003
"""Steps that differ by less are not told apart, whatever the lookups are.

Plans evaluated together and played differ by 0.3 % at most (benchmarks/sharding_plans.py).
"""

# Plans with more room: rounds, ranks that shards of the fullest one may go to, and plans of a round that are asked for.
_ROOM, _ROOM_ROUNDS, _ROOM_TARGETS, _ROOM_PLANS = "room", 24, 4, 32
# Of the room that the search may fill, where ranks that it filled have too little by the replay: the search's memory is about.
_LESS_ROOM = 0.95
# Plans that are played for an answer: so many over their ranks, each a program of its own, and at least the best and a rule's.
_PLAYED_PROGRAMS, _LEAST_SHOWN = 128, 2


@dataclass(frozen=True, slots=True)
class Option:
    """A plan and its predicted step."""

    plan: Plan
    step_ns: float
    by: str
    played: bool = False  # as `predict` has it; else composed, as in the search


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
    budget.tell(f"what {len(task.tables)} tables take of memory is known")
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
    best = min(item.best.score for item in searches)
    roomy = [_roomy_plan(item, best) if only is None else None for item in searches]
    searches = [_exactly(item, _NEAR_BEST * best, more) for item, more in zip(searches, roomy, strict=True)]
    options, rules = _played(divisions, _options(task, searches), _rules(task, searches[0]))
    result = Searched(task, options, rules, searched_plans, time.monotonic() - began)
    if not divisions.fits(result.best.plan):
        less = replace(task.constraints, headroom=1.0 - _LESS_ROOM * (1.0 - task.constraints.headroom))
        with suppress(InputError):
            tighter = replace(task, constraints=less)
            return replace(search(tighter, platform, budget, evaluator=divisions.evaluator, only=only), task=task)
    return result


def _further(divisions: TaskDivisions, first: Search, gained: float, only: Sequence[str] | None) -> list[Search]:
    """Searches among further divisions: by cheap strategies all of them, by the others the promising ones.

    `gained`: the best step among plans of whole tables over that of cheap strategies.
    """
    task, budget = divisions.task, divisions.budget
    left = budget.evaluations - first.asked
    loads = table_loads(task, first)
    most = max(_DIVISIONS // len(task.tables), 1)
    searches: list[Search] = []
    for division in list(divisions.further(first, loads, table_shares(task, first, loads), most)):
        played = is_played(task.model, division)
        shortest = min(item.best.score for item in (first, *searches))
        if not played and divisions.shortest_ns(first, division) > _WORTH_DIVIDING * shortest:
            continue
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


def _roomy_plan(search: Search, best: float) -> tuple[int, ...] | None:
    """A plan that leaves the fullest rank more room, step by step, as long as it takes no longer than the best one.

    Of a division that has the best plan; of those whose plans are played there are too few.
    """
    if not search.shards or search.best.score > best or search.left == 0:
        return None
    memory, here = search.memory, np.array(search.best.rank_of)
    for _ in range(_ROOM_ROUNDS):
        used = memory.used(here, search.ranks)
        full, free = int(np.argmax(used)), np.argsort(used, kind="stable")[:_ROOM_TARGETS]
        movable = np.flatnonzero((here == full) & (search.pinned == FREE))
        changes = [(shard, rank) for shard in movable for rank in free if rank != full]
        plans = np.repeat(here[None, :], len(changes), axis=0)
        for plan, (shard, rank) in zip(plans, changes, strict=True):
            plan[shard] = rank
        fullest = memory.used(plans, search.ranks).max(axis=1) if changes else np.zeros(0)
        order = [index for index in np.argsort(fullest, kind="stable")[:_ROOM_PLANS] if fullest[index] < used[full]]
        scores = search.ask(plans[order]) if order else np.zeros(0)
        as_short = [index for index, score in zip(order, scores, strict=True) if score <= (1 + TOLD_APART / 2) * best]
        if not as_short:
            break
        here = plans[as_short[0]]
    return tuple(here.tolist())


def _played(
    divisions: TaskDivisions, options: Sequence[Option], rules: Mapping[str, Option | None]
) -> tuple[tuple[Option, ...], dict[str, Option | None]]:
    """Options, the best first, and rules, with the steps that `predict` says of as many as are soon played.

    Of plans that are not told apart the best one leaves the fullest rank most room, by a replay of its memory.
    """
    task, evaluator = divisions.task, divisions.evaluator
    by_rule = sorted((option for option in rules.values() if option is not None), key=lambda option: option.step_ns)
    known: dict[str, Option] = {}
    for option in (options[0], *by_rule[:1], *options[1:], *by_rule):
        if option.plan.to_json() not in known and len(known) < max(_PLAYED_PROGRAMS // task.ranks, _LEAST_SHOWN):
            division, owners = option.plan.divided(task.tables)
            step_ns = float(evaluator.simulate(np.array([owners], dtype=np.intp), division).step_ns[0])
            known[option.plan.to_json()] = replace(option, step_ns=step_ns, played=True)
            divisions.budget.tell(f"plans of the answer played: {len(known)}")

    def shown(option: Option) -> Option:
        return replace(known.get(option.plan.to_json(), option), by=option.by)

    ordered = sorted(known.values(), key=lambda option: option.step_ns)
    tied = [option for option in ordered if option.step_ns <= (1 + TOLD_APART) * ordered[0].step_ns]
    fitting = (
        option
        for option in (*sorted(tied, key=lambda option: divisions.fullest_bytes(option.plan)), *ordered)
        if divisions.fits(option.plan)
    )
    best = next(fitting, ordered[0])
    others = [shown(option) for option in options if option.plan != best.plan][:RUNNERS_UP]
    others.sort(key=lambda option: (not option.played, option.step_ns))
    return (best, *others), {name: None if option is None else shown(option) for name, option in rules.items()}


def _exactly(search: Search, near: float, roomy: tuple[int, ...] | None) -> Search:
    """With lookups asked for anew of plans that score up to `near`, of every strategy's best and of one that leaves room.

    Curves are up to 2 % off, which a search finds.
    """
    if not search.shards or search.division.shares_nodes:
        return search  # played: nothing is more exact
    most = min(max(_ASKED_EXACTLY // (len(search.shards) * search.ranks), _LEAST_EXACT), _MOST_EXACT)
    exact = replace(search, exact=True, ranked=[], best_by={}, log=[], _known={})
    best = [item for item in search.ranked[:most] if item.score <= near]
    chosen = {item.rank_of: item.by for item in [*best, *search.best_by.values()]}
    if roomy is not None:
        chosen[roomy] = chosen.get(roomy, _ROOM)
    exact.ask(np.array(list(chosen)), by=list(chosen.values()), beyond=True)
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
