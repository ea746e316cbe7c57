"""Beam search: the costliest shards first, keeping several partial plans at a time; the survivors are evaluated in full."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime._shard.search.loads import PARTS, Loads, learn
from steptime._shard.search.state import FREE, Floats, Places, Search
from steptime._shard.strategies import Strategy

WIDTH = 24
# How much the mean load counts beside the largest: partial plans with the same slowest rank are told apart by the others.
_EVENNESS = 1e-3


def _run(search: Search) -> None:
    loads = learn(search)
    plans = survivors(search, loads, min(WIDTH, max(search.left, 1)))
    if len(plans):
        search.ask(plans)


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


STRATEGY = Strategy("beam", f"the {WIDTH} most promising partial plans, costliest shards first", 2, _run)
