"""Search strategies: ways to ask for plans. Whatever is asked for is evaluated in full, and the best is kept.

*Rules*: the usual rules' plans, what there is to beat. *Greedy* on predicted cost: shard by shard, each to the rank where the
predicted step grows least, in several orders. *Beam*: the costliest shards first, keeping several partial plans at a time; the
survivors are evaluated in full. *Local*: moves and swaps from several starts; the guide proposes, the full step decides.
*Restarts*: plans drawn at random, each changed to the fastest of all its neighbours as long as one is faster. *Exact*: every
plan there is, where there are few: the true optimum, for small tasks and for testing the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
import numpy.typing as npt

from steptime._shard.guide import PARTS, Loads, Neighbourhood, descended, learn, of_log, samples
from steptime._shard.rules import RULES, Machine
from steptime._shard.search_state import Floats, Search
from steptime._shard.task import FREE, Places
from steptime.errors import InputError

# Partial plans that beam search keeps, and how much the mean load counts beside the largest: partial plans with the same
# slowest rank are told apart by the others.
_WIDTH, _EVENNESS = 24, 1e-3

# Local search and restarts: of up to so many shards times shards and ranks, all neighbours of a plan are evaluated.
_FEW = 3_000

# Local search. Descents of a cycle: as many as this over the number of shards, within limits; a third from the best plans as
# they are, the others from shuffled copies. And changes that a descent may make.
_DESCENTS, _FEWEST_DESCENTS, _MOST_DESCENTS, _ROUNDS = 1_600, 3, 24, 2_000
# Neighbours evaluated in one call, and batches of them before the best plan counts as the best of its neighbours. Where
# there are few in all, changes of ranks that nobody waits for are tried too.
_BATCH, _BATCHES = 64, 4
# The least share that a round of evaluated neighbours has to gain where there are many.
_GAIN = 1e-4
# Times that all of it is done, and without a gain before it ends: later rounds know the loads near the best plan better. Where
# plans have few neighbours, more often, and neighbours of several ends of descents are evaluated.
_CYCLES, _IDLE_CYCLES, _ENDS = 5, 1, 1
_CYCLES_OF_FEW, _IDLE_CYCLES_OF_FEW, _ENDS_OF_FEW = 12, 3, 5

# Restarts: about what all descents may evaluate, about how many changes one makes, and descents at least and at most.
_RESTART_EVALUATIONS, _CHANGES, _FEWEST_RESTARTS, _MOST_RESTARTS = 60_000, 15, 2, 24

MOST_PLANS = 4_000
"""Every plan is evaluated where there are at most so many."""


def propose(search: Search, names: Collection[str]) -> None:
    """Asks for what the cheap ones of some strategies propose: what is known from the start, then what loads say."""
    rules = [plan for name in RULES if (plan := plan_of_rule(search, name)) is not None] if "rules" in names else []
    learning = next((name for name in ("greedy", "beam") if name in names), None)
    drawn = list(samples(search, len(rules))) if learning else []
    if rules or drawn:
        search.ask(np.stack([*rules, *drawn]), by=["rules"] * len(rules) + [learning or ""] * len(drawn))
    if learning is None or not search.left:
        return
    loads = of_log(search)
    grown = [plan for order in orders(search, loads) if (plan := placed(search, loads, order)) is not None]
    greedy = list(np.unique(np.stack(grown), axis=0)) if grown and "greedy" in names else []
    beam = list(survivors(search, loads, min(_WIDTH, search.left))) if "beam" in names else []
    if greedy or beam:
        search.ask(np.stack([*greedy, *beam]), by=["greedy"] * len(greedy) + ["beam"] * len(beam))


def plan_of_rule(search: Search, name: str) -> Places | None:
    """What a rule makes of the shards, pinned ones put back; None where it finds no room."""
    try:
        plan = RULES[name](search.shards, Machine(search.ranks, search.memory.room))
    except InputError:
        return None
    return np.where(search.pinned == FREE, np.array(plan.rank_of), search.pinned)


def orders(search: Search, loads: Loads) -> list[Places]:
    """Costliest first: by all parts together, by each part, by bytes, and by the largest share of any of these."""
    columns = [loads.size, *(loads.of[:, part] for part in range(len(PARTS))), search.memory.shard_bytes.astype(np.float64)]
    shares = np.stack([column / max(float(column.sum()), 1e-300) for column in columns])
    return [np.argsort(-column, kind="stable") for column in (*columns, shares.max(axis=0))]


def placed(search: Search, loads: Loads, order: Places) -> Places | None:
    """Each shard where the guide grows least, then where least lies; None where one finds no room."""
    totals, used = np.zeros((search.ranks, len(PARTS))), np.zeros(search.ranks)
    result = search.pinned.copy()
    for shard in np.flatnonzero(result != FREE):
        totals[result[shard]] += loads.of[shard]
        used[result[shard]] += search.memory.shard_bytes[shard]
    for shard in order:
        if result[shard] != FREE:
            continue
        over = used + search.memory.shard_bytes[shard] > search.memory.room
        if over.all():
            return None
        rank = _least(totals, loads.of[shard], over)
        result[shard] = rank
        totals[rank] += loads.of[shard]
        used[rank] += search.memory.shard_bytes[shard]
    return result


def _least(totals: Floats, load: Floats, over: npt.NDArray[np.bool_]) -> int:
    after = totals + load
    grown = np.maximum(after, totals.max(axis=0)).sum(axis=1)
    return int(np.lexsort((after.sum(axis=1), np.where(over, np.inf, grown)))[0])


def survivors(search: Search, loads: Loads, width: int) -> Places:
    """Up to so many plans, [plans, shards]; none where a shard finds no room."""
    ranks, shards = search.ranks, len(search.shards)
    plans = np.tile(search.pinned, (1, 1))
    totals, used = np.zeros((1, ranks, len(PARTS))), np.zeros((1, ranks))
    held = np.flatnonzero(search.pinned != FREE)
    np.add.at(totals[0], search.pinned[held], loads.of[held])
    np.add.at(used[0], search.pinned[held], search.memory.shard_bytes[held])
    for shard in np.argsort(-loads.size, kind="stable"):
        if search.pinned[shard] != FREE:
            continue
        over = used + search.memory.shard_bytes[shard] > search.memory.room
        costs = np.where(over | _alike(totals, used), np.inf, _costs(totals, loads.of[shard]))
        order = np.argsort(costs.ravel(), kind="stable")[:width]
        order = order[np.isfinite(costs.ravel()[order])]
        if not len(order):
            return np.empty((0, shards), dtype=np.intp)
        parents, chosen = np.divmod(order, ranks)
        rows = np.arange(len(order))
        plans, totals, used = plans[parents], totals[parents], used[parents]
        plans[rows, shard] = chosen
        totals[rows, chosen] += loads.of[shard]
        used[rows, chosen] += search.memory.shard_bytes[shard]
    return plans


def _costs(totals: Floats, load: Floats) -> Floats:
    """The guide of every partial plan with one more shard on each rank, [plans, ranks], and a little of its unevenness."""
    after = totals + load
    guide = np.maximum(after, totals.max(axis=1, keepdims=True)).sum(axis=2)
    squares = (after**2).sum(axis=2) - (totals**2).sum(axis=2)
    scale = np.maximum(guide.max(axis=1, keepdims=True), 1e-300)
    result: Floats = guide + _EVENNESS * (squares + (totals**2).sum(axis=(1, 2))[:, None]) / scale
    return result


def _alike(totals: Floats, used: Floats) -> npt.NDArray[np.bool_]:
    """Ranks that are as empty as one before them: the same plan with other numbers."""
    empty = (used == 0) & (totals.sum(axis=2) == 0)
    result: npt.NDArray[np.bool_] = empty & (np.cumsum(empty, axis=1) > 1)
    return result


def _local(search: Search) -> None:
    """Descents by the guide from the best plans so far, and from these with a few shards shuffled; then the evaluation of whole
    batches of neighbours of the best plan, in the order of the guide, until none of them is faster; and again, with what was
    learned."""
    draws = np.random.default_rng(len(search.shards) * search.ranks)
    loads = learn(search)
    few = len(search.shards) * (len(search.shards) + search.ranks) <= _FEW
    idle = 0
    for cycle in range(_CYCLES_OF_FEW if few else _CYCLES):
        before = search.best
        if not search.left or idle > (_IDLE_CYCLES_OF_FEW if few else _IDLE_CYCLES):
            return
        starts = _starts(search, draws, cycle)
        ends = np.unique(np.stack([descended(search, loads, start, rounds=_ROUNDS) for start in starts]), axis=0)
        scores = search.ask(ends)
        for index in np.argsort(scores, kind="stable")[: _ENDS_OF_FEW if few else _ENDS]:
            _refined(search, loads, ends[index], float(scores[index]), few=few)
        idle = idle + 1 if search.best.score >= before.score else 0
        loads = of_log(search, loads)


def _starts(search: Search, draws: np.random.Generator, cycle: int) -> list[Places]:
    count = min(max(_DESCENTS // max(len(search.shards), 1), _FEWEST_DESCENTS), _MOST_DESCENTS)
    best = [np.array(item.rank_of, dtype=np.intp) for item in search.ranked[: -(-count // 3)]]
    shuffled = [_shuffled(search, best[index % len(best)], draws, 1 + cycle % 5) for index in range(count - len(best))]
    return [*best, *(plan for plan in shuffled if search.possible(plan[None, :])[0])]


def _shuffled(search: Search, rank_of: Places, draws: np.random.Generator, tenths: int) -> Places:
    """With some tenths of the movable shards in each other's place."""
    movable = np.flatnonzero(search.pinned == FREE)
    count = max(len(movable) * tenths // 10, min(2, len(movable)))
    chosen = draws.choice(movable, count, replace=False)
    result = rank_of.copy()
    result[chosen] = rank_of[draws.permutation(chosen)]
    return result


def _refined(search: Search, loads: Loads, here: Places, score: float, *, few: bool) -> None:
    """Evaluates a plan's neighbours in the order of the guide, batch by batch, and goes on from the first faster one."""
    around = Neighbourhood(search, loads)
    size = _FEW if few else _BATCH
    while search.left:
        moves = around.moves(here, around.measured(here), every=few)
        order = np.lexsort((moves.unevenness, moves.guide_ns))[: max(_FEW if few else 0, _BATCH * _BATCHES)]
        order = order[np.isfinite(moves.guide_ns[order])]
        for begin in range(0, len(order), size):
            plans = moves.applied(here, order[begin : begin + size])
            scores = search.ask(plans)
            best = int(np.argmin(scores))
            if scores[best] < score * (1 - (0.0 if few else _GAIN)):
                here, score = plans[best], float(scores[best])
                break
        else:
            return


def _restarts(search: Search) -> None:
    """Where plans have few neighbours. Local search goes where its guide and the best plans lead; this one knows neither."""
    shards = len(search.shards)
    if shards * (shards + search.ranks) > _FEW or search.ranks == 1:
        return
    around = shards * (search.ranks - 1) + shards * (shards - 1) // 2
    count = min(max(_RESTART_EVALUATIONS // (around * _CHANGES), _FEWEST_RESTARTS), _MOST_RESTARTS)
    draws = np.random.default_rng(shards + search.ranks)
    plans = draws.integers(0, search.ranks, (count, shards))
    plans = np.where(search.pinned == FREE, plans, search.pinned).astype(np.intp)
    scores = search.ask(plans)
    while len(plans) and search.left:
        beside = [_neighbours(search, plan) for plan in plans]
        around_each = np.split(search.ask(np.concatenate(beside)), np.cumsum([len(item) for item in beside])[:-1])
        best = [int(np.argmin(item)) if len(item) else -1 for item in around_each]
        better = [at for at, index in enumerate(best) if index >= 0 and around_each[at][index] < scores[at]]
        plans = np.array([beside[at][best[at]] for at in better], dtype=np.intp).reshape(len(better), shards)
        scores = np.array([around_each[at][best[at]] for at in better])


def _neighbours(search: Search, rank_of: Places) -> Places:
    """All plans with one shard elsewhere, or two in each other's place."""
    movable = np.flatnonzero(search.pinned == FREE)
    shard, rank = np.repeat(movable, search.ranks), np.tile(np.arange(search.ranks), len(movable))
    elsewhere = rank_of[shard] != rank
    shard, rank = shard[elsewhere], rank[elsewhere]
    moved = np.repeat(rank_of[None], len(shard), axis=0)
    moved[np.arange(len(shard)), shard] = rank
    first, second = (movable[side] for side in np.triu_indices(len(movable), 1))
    apart = rank_of[first] != rank_of[second]
    first, second = first[apart], second[apart]
    swapped = np.repeat(rank_of[None], len(first), axis=0)
    every = np.arange(len(first))
    swapped[every, first], swapped[every, second] = rank_of[second], rank_of[first]
    return np.concatenate([moved, swapped])


def every_plan(search: Search) -> None:
    """Asks for all plans, where there are few."""
    if plans_at_most(search) > min(MOST_PLANS, search.left):
        return
    search.ask(np.array(list(plans_of(search)), dtype=np.intp))
    search.complete = True


def plans_at_most(search: Search) -> int:
    """How many plans there are; those that only number differently ranks to which nothing is pinned count once."""
    return count_plans(int((search.pinned == FREE).sum()), search.ranks, len(_named(search)))


def count_plans(shards: int, ranks: int, named: int = 0) -> int:
    """Of shards on ranks, of which so many are told apart by what is pinned to them."""
    # By how many of the others have a shard: Stirling numbers of the second kind, row by row, where none is named.
    row = [1] + [0] * (ranks - named)
    for _ in range(shards):
        row = [(named + used) * count + (row[used - 1] if used else 0) for used, count in enumerate(row)]
    return sum(row)


def plans_of(search: Search) -> Iterator[tuple[int, ...]]:
    """All of them, each once."""
    named = _named(search)
    yield from _grown((), 0, search.pinned.tolist(), named, [rank for rank in range(search.ranks) if rank not in named])


def _named(search: Search) -> list[int]:
    return sorted({int(rank) for rank in search.pinned if rank != FREE})


def _grown(
    begin: tuple[int, ...], used: int, pinned: list[int], named: list[int], others: list[int]
) -> Iterator[tuple[int, ...]]:
    """Plans that begin so and have shards on so many of the other ranks, which are taken in order."""
    if len(begin) == len(pinned):
        yield begin
    elif pinned[len(begin)] != FREE:
        yield from _grown((*begin, pinned[len(begin)]), used, pinned, named, others)
    else:
        for rank in (*named, *others[: used + 1]):
            new = used < len(others) and rank == others[used]
            yield from _grown((*begin, rank), used + new, pinned, named, others)


STRATEGIES: dict[str, Callable[[Search], None]] = {
    "rules": lambda search: propose(search, ("rules",)),
    "greedy": lambda search: propose(search, ("greedy",)),
    "beam": lambda search: propose(search, ("beam",)),
    "exact": every_plan,
    "local": _local,
    "restarts": _restarts,
}
"""By name and in the order of their turns: those that start from others' plans come later."""

CHEAP = ("rules", "greedy", "beam")
"""Strategies that every division gets, together; the others only where that promises something."""
