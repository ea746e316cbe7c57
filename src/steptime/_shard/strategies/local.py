"""Local search: moves and swaps from several starts. The guide proposes, the full step decides.

Descents by the guide from the best plans so far, and from these with a few shards shuffled; then the evaluation of whole
batches of neighbours of the best plan, in the order of the guide, until none of them is faster; and again, with what was
learned.
"""

from __future__ import annotations

import numpy as np

from steptime._shard.search.loads import Loads, learn, of_log
from steptime._shard.search.moves import Neighbourhood, descended
from steptime._shard.search.state import FREE, Places, Search
from steptime._shard.strategies import Strategy

# Descents of a cycle: as many as this over the number of shards, within limits; a third from the best plans as they are, the
# others from shuffled copies. And changes that a descent may make.
DESCENTS, FEWEST, MOST, ROUNDS = 1_600, 3, 24, 2_000
# Neighbours evaluated in one call, and batches of them before the best plan counts as the best of its neighbours. Where
# there are fewer in all, changes of ranks that nobody waits for are tried too.
BATCH, BATCHES, FEW = 64, 2, 3_000
# The least share that a round of evaluated neighbours has to gain where there are many.
GAIN = 1e-4
# Times that all of it is done, and without a gain before it ends: later rounds know the loads near the best plan better. Where
# plans have few neighbours, more often, and neighbours of several ends of descents are evaluated.
CYCLES, IDLE_CYCLES, ENDS = 5, 1, 1
CYCLES_OF_FEW, IDLE_CYCLES_OF_FEW, ENDS_OF_FEW = 12, 3, 5


def _run(search: Search) -> None:
    draws = np.random.default_rng(len(search.shards) * search.ranks)
    loads = learn(search)
    few = len(search.shards) * (len(search.shards) + search.ranks) <= FEW
    idle = 0
    for cycle in range(CYCLES_OF_FEW if few else CYCLES):
        before = search.best
        if before is None or not search.left or idle > (IDLE_CYCLES_OF_FEW if few else IDLE_CYCLES):
            return
        starts = _starts(search, draws, cycle)
        ends = np.unique(np.stack([descended(search, loads, start, rounds=ROUNDS) for start in starts]), axis=0)
        scores = search.ask(ends)
        for index in np.argsort(scores, kind="stable")[: ENDS_OF_FEW if few else ENDS]:
            _refined(search, loads, ends[index], float(scores[index]), few=few)
        now = search.best
        idle = idle + 1 if now is not None and now.score >= before.score else 0
        loads = of_log(search, loads)


def _starts(search: Search, draws: np.random.Generator, cycle: int) -> list[Places]:
    count = min(max(DESCENTS // max(len(search.shards), 1), FEWEST), MOST)
    best = [np.array(item.rank_of, dtype=np.intp) for item in search.found[: -(-count // 3)]]
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
    size = FEW if few else BATCH
    while search.left:
        moves = around.moves(here, around.measured(here), every=few)
        order = np.lexsort((moves.unevenness, moves.guide_ns))[: max(FEW if few else 0, BATCH * BATCHES)]
        for begin in range(0, len(order), size):
            plans = moves.applied(here, order[begin : begin + size])
            scores = search.ask(plans)
            best = int(np.argmin(scores))
            if scores[best] < score * (1 - (0.0 if few else GAIN)):
                here, score = plans[best], float(scores[best])
                break
        else:
            return


STRATEGY = Strategy("local", "moves and swaps from several starts, the full step decides", 3, _run)
