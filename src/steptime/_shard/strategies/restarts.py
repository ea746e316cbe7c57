"""Restarts: plans drawn at random, each changed to the fastest of all its neighbours as long as one is faster.

Where plans have few neighbours. Local search goes where its guide and the best plans lead; this one knows neither.
"""

from __future__ import annotations

import numpy as np

from steptime._shard.search.state import FREE, Places, Search
from steptime._shard.strategies import Strategy

# Shards times shards and ranks, as local search counts few neighbours.
FEW = 3_000
# About what all descents may evaluate, about how many changes one makes, and descents at least and at most.
EVALUATIONS, CHANGES, FEWEST, MOST = 60_000, 15, 2, 24


def _run(search: Search) -> None:
    shards = len(search.shards)
    if shards * (shards + search.ranks) > FEW or search.ranks == 1:
        return
    around = shards * (search.ranks - 1) + shards * (shards - 1) // 2
    count = min(max(EVALUATIONS // (around * CHANGES), FEWEST), MOST)
    draws = np.random.default_rng(shards + search.ranks)
    plans = draws.integers(0, search.ranks, (count, shards))
    plans = np.where(search.pinned == FREE, plans, search.pinned).astype(np.intp)
    scores = search.ask(plans)
    while len(plans) and search.left:
        beside = [_neighbours(search, plan) for plan in plans]
        asked = np.split(search.ask(np.concatenate(beside)), np.cumsum([len(item) for item in beside])[:-1])
        best = [int(np.argmin(item)) if len(item) else -1 for item in asked]
        better = [at for at, index in enumerate(best) if index >= 0 and asked[at][index] < scores[at]]
        plans = np.array([beside[at][best[at]] for at in better], dtype=np.intp).reshape(len(better), shards)
        scores = np.array([asked[at][best[at]] for at in better])


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


STRATEGY = Strategy("restarts", "random plans, each followed to the fastest of its neighbours", 4, _run)
