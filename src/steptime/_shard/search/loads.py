"""`Loads`: what each shard adds to its rank's lookups and exchange, learned from evaluated plans: a guide to good plans.

A step waits for the slowest rank three times: for its lookups forward, for what it sends and receives, and for its lookups
backward. So the guide is the sum over these parts of the largest rank's load, with loads of shards that add up. They
nearly do: what does not add up (launches, caches) is left to the evaluation, which has the last word on every plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steptime._build.dlrm.model import Table
from steptime._shard.search.state import FREE, Floats, Places, Search

PARTS = ("forward", "exchange", "backward")
FORWARD, EXCHANGE, BACKWARD = range(len(PARTS))
# Equations per unknown, a rank of an evaluated plan being one: at least, and at most of the last plans, which lie nearest to
# the best.
_EQUATIONS, _MOST_EQUATIONS = 3, 8
_MORE_PLANS = 8
# How much loads are held to what sizes alone say, beside the evidence of one plan.
_HELD = 0.3


@dataclass(frozen=True, eq=False)
class Loads:
    """Nanoseconds per shard and part, [shards, parts]."""

    of: Floats

    def totals(self, rank_of: Places, ranks: int) -> Floats:
        """Per rank and part, [ranks, parts]."""
        result = np.zeros((ranks, self.of.shape[1]))
        np.add.at(result, rank_of, self.of)
        return result

    @property
    def size(self) -> Floats:
        """Of every shard, all parts together."""
        result: Floats = self.of.sum(axis=1)
        return result


def guide_ns(totals: Floats) -> Floats:
    """What a step has to wait for, of [..., ranks, parts]."""
    result: Floats = totals.max(axis=-2).sum(axis=-1)
    return result


def learn(search: Search) -> Loads:
    """Asks for as many plans as it takes, and learns the loads from all that were asked so far."""
    shards, ranks = len(search.shards), search.ranks
    wanted = math.ceil(_EQUATIONS * shards / ranks) + _MORE_PLANS
    have = sum(len(plans) for plans, _ in search.log)
    if have < wanted:
        search.ask(samples(search, wanted - have))
    return of_log(search)


def samples(search: Search, count: int) -> Places:
    """Plans that tell shards apart: half of them anyhow, half with lookups about balanced, as good plans are."""
    draws = np.random.default_rng(len(search.shards))
    shards, ranks = len(search.shards), search.ranks
    costs = _sizes(search.shards)[:, 1]
    result = draws.integers(0, ranks, (count, shards))
    for plan in result[count // 2 :]:
        noisy = costs * draws.lognormal(0.0, 0.3, shards)
        load, used = np.zeros(ranks), np.zeros(ranks)
        for shard in np.argsort(-noisy, kind="stable"):
            over = used + search.memory.shard_bytes[shard] > search.memory.room
            rank = int(np.argmin(np.where(over, np.inf, load)))
            plan[shard] = rank
            load[rank] += noisy[shard]
            used[rank] += search.memory.shard_bytes[shard]
    return np.where(search.pinned == FREE, result, search.pinned).astype(np.intp)


def of_log(search: Search, known: Loads | None = None) -> Loads:
    """Loads that explain the ranks of the plans asked so far best, the last ones of them; held to what is `known`."""
    most = math.ceil(_MOST_EQUATIONS * len(search.shards) / search.ranks) + _MORE_PLANS
    plans = np.concatenate([plans for plans, _ in search.log])[-most:]
    answers = [answer for _, answer in search.log]
    forward = np.concatenate([item.forward_ns for item in answers])[-most:]
    backward = np.concatenate([item.backward_ns for item in answers])[-most:]
    exchange = np.concatenate([item.exchange_ns for item in answers])[-most:]
    columns = np.array([float(shard.dim) for shard in search.shards])
    parts = (
        _solved(search, plans, forward, None if known is None else known.of[:, FORWARD]),
        _per_column(plans, exchange, columns, search.ranks) * columns,
        _solved(search, plans, backward, None if known is None else known.of[:, BACKWARD]),
    )
    return Loads(np.stack(parts, axis=1))


def _sizes(shards: tuple[Table, ...]) -> Floats:
    """What loads grow with, before anything was asked: one each, lookups, and elements looked up."""
    return np.array([(1.0, table.pooling_factor, table.pooling_factor * table.dim) for table in shards])


def _solved(search: Search, plans: Places, times: Floats, known: Floats | None) -> Floats:
    """Least squares over all ranks of all plans, held to what is known, or to a line in the shards' sizes."""
    ranks, shards = search.ranks, len(search.shards)
    held = np.zeros((len(plans) * ranks, shards))
    held[(plans + ranks * np.arange(len(plans))[:, None]).ravel(), np.tile(np.arange(shards), len(plans))] = 1.0
    there = held.any(axis=1)
    equations = np.column_stack([held[there], np.ones(int(there.sum()))])
    values = times.ravel()[there]
    line = np.append(_line(search, equations, values) if known is None else known, 0.0)
    left = values - equations @ line
    normal = equations.T @ equations
    weight = _HELD * len(plans) / ranks
    normal[np.diag_indices(shards)] += weight  # the common constant is free
    normal[-1, -1] += 1e-9 * len(values) + 1e-9
    result: Floats = np.maximum(line + np.linalg.solve(normal, equations.T @ left), 0.0)[:-1]
    return result


def _line(search: Search, equations: Floats, values: Floats) -> Floats:
    """Loads that are a line in the shards' sizes."""
    sizes = _sizes(search.shards)
    scaled = sizes / np.maximum(sizes.max(axis=0), 1e-300)
    first, *_ = np.linalg.lstsq(np.column_stack([equations[:, :-1] @ scaled, equations[:, -1]]), values, rcond=None)
    result: Floats = np.maximum(scaled @ first[:-1], 0.0)
    return result


def _per_column(plans: Places, exchange: Floats, columns: Floats, ranks: int) -> float:
    """How much longer the exchange is for one more column of the rank that has most."""
    widest = np.array([np.bincount(plan, weights=columns, minlength=ranks).max() for plan in plans])
    slowest = exchange.max(axis=1)
    spread = float(((widest - widest.mean()) ** 2).sum())
    if spread <= 0:
        return 0.0
    return max(float(((widest - widest.mean()) * (slowest - slowest.mean())).sum()) / spread, 0.0)
