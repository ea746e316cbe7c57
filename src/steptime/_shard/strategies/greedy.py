"""Greedy on predicted cost: shard by shard, each to the rank where the predicted step grows least, in several orders."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime._shard.search.loads import PARTS, Loads, learn
from steptime._shard.search.state import FREE, Floats, Places, Search
from steptime._shard.strategies import Strategy


def _run(search: Search) -> None:
    loads = learn(search)
    plans = [plan for order in orders(search, loads) if (plan := placed(search, loads, order)) is not None]
    if plans:
        search.ask(np.unique(np.stack(plans), axis=0))


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


STRATEGY = Strategy("greedy", "each shard to the rank where the predicted step grows least, in several orders", 1, _run)
