"""Every plan there is, where there are few: the true optimum, for small tasks and for testing the other strategies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product

import numpy as np

from steptime._shard.search.state import FREE, Search
from steptime._shard.strategies import Strategy

MOST_PLANS = 12_000
_BATCH = 1_000


def _run(search: Search) -> None:
    if plans_at_most(search) > min(MOST_PLANS, search.left):
        return
    plans = every_plan(search)
    while batch := list(islice(plans, _BATCH)):
        search.ask(np.array(batch, dtype=np.intp))


def plans_at_most(search: Search) -> int:
    """How many plans there are; those that number ranks differently count once where nothing is pinned."""
    free = int((search.pinned == FREE).sum())
    if not search.symmetric:
        return int(search.ranks**free)
    # Into how many groups, at most as many as ranks: Stirling numbers of the second kind, row by row.
    row = [1] + [0] * search.ranks
    for _ in range(free):
        row = [0, *(k * row[k] + row[k - 1] for k in range(1, search.ranks + 1))]
    return sum(row)


def every_plan(search: Search) -> Iterator[tuple[int, ...]]:
    """All of them, each once."""
    if search.symmetric:
        yield from _grown((), len(search.shards), search.ranks)
        return
    yield from product(*(range(search.ranks) if rank == FREE else (int(rank),) for rank in search.pinned))


def _grown(begin: tuple[int, ...], shards: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Ranks are numbered in the order in which they first come."""
    if len(begin) == shards:
        yield begin
        return
    for rank in range(min(max(begin, default=-1) + 2, ranks)):
        yield from _grown((*begin, rank), shards, ranks)


STRATEGY = Strategy("exact", f"every plan, where there are at most {MOST_PLANS:,}", 5, _run)
