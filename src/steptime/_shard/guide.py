"""The guide to good plans: what each shard adds to its rank's loads, and the changes of a plan that promise most by that.

A step waits for the slowest rank three times: for its lookups forward, for what it sends and receives, and for its lookups
backward. So the guide is the sum over these parts of the largest rank's load, with loads of shards that add up, learned from
evaluated plans. They nearly do: what does not add up (launches, caches) is left to the evaluation, which has the last word on
every plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from steptime._build.dlrm.model import Table
from steptime._shard.search_state import Floats, Search
from steptime._shard.task import FREE, Places

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
        """Per part and rank, [parts, ranks]."""
        return np.stack([np.bincount(rank_of, weights=part, minlength=ranks) for part in self.of.T])

    @property
    def size(self) -> Floats:
        """Of every shard, all parts together."""
        result: Floats = self.of.sum(axis=1)
        return result


def learn(search: Search) -> Loads:
    """Asks for as many plans as it takes, and learns the loads from all that were asked so far."""
    plans = samples(search)
    if len(plans):
        search.ask(plans)
    return of_log(search)


def samples(search: Search, others: int = 0) -> Places:
    """Plans that tell shards apart, as many as it takes beside those asked for and others that will be.

    Half of them anyhow, half with lookups about balanced, as good plans are.
    """
    draws = np.random.default_rng(len(search.shards))
    shards, ranks = len(search.shards), search.ranks
    wanted = math.ceil(_EQUATIONS * shards / ranks) + _MORE_PLANS
    count = max(wanted - others - sum(len(plans) for plans, _ in search.log), 0)
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
    forward, exchange, backward = (
        np.concatenate([getattr(result, f"{part}_ns") for _, result in search.log])[-most:] for part in PARTS
    )
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


# Changes of the guide that differ by less than this share are as good as each other.
_ROUNDING = 1e-9
# Gains below this share are not worth a round by themselves, nor is a plan this near to loads that are all equal; so many
# rounds may go without a gain, for loads that become more even.
_GAIN, _EVEN, _LEVEL_ROUNDS = 2e-5, 5e-4, 24
# Ranks that have least to do, which shards may go to: of all parts together, and of each.
_TARGETS = 6


@dataclass(frozen=True, eq=False)
class Moves:
    """Changes of one plan: a shard to another rank, or two in each other's place; [changes]."""

    guide_ns: Floats  # infinite where a rank has no room
    unevenness: Floats  # of the loads afterwards: sum of squares less what it was
    blocks: tuple[tuple[Places, Places, Places], ...]  # shards that go, each against all that come back (or FREE), and where to

    def applied(self, rank_of: Places, chosen: Places) -> Places:
        """The plans after some of the changes, each by itself."""
        plans = np.repeat(rank_of[None, :], len(chosen), axis=0)
        ends = np.cumsum([len(shards) * len(back) for shards, back, _ in self.blocks])
        for plan, change, block in zip(plans, chosen.tolist(), np.searchsorted(ends, chosen, "right").tolist(), strict=True):
            shards, back, to = self.blocks[block]
            goes, comes = divmod(change - (int(ends[block - 1]) if block else 0), len(back))
            if back[comes] != FREE:
                plan[back[comes]] = rank_of[shards[goes]]
            plan[shards[goes]] = to[comes]
        return plans


class Neighbourhood:
    """The changes of a plan, with loads that add up: whatever touches none of a step's slowest ranks cannot help it."""

    def __init__(self, search: Search, loads: Loads) -> None:
        self._search, self._loads = search, loads
        self._of_part = np.ascontiguousarray(loads.of.T)  # [parts, shards]
        self._movable = search.pinned == FREE
        self._bytes = search.memory.shard_bytes
        self._room = search.memory.room

    def measured(self, rank_of: Places) -> Floats:
        """What the ranks of a plan do as evaluated, not as loads add up, [parts, ranks]."""
        result = self._loads.totals(rank_of, self._search.ranks)
        evaluated = self._search.result(rank_of)
        result[FORWARD], result[BACKWARD] = evaluated.forward_ns[0], evaluated.backward_ns[0]
        return result

    def moves(self, rank_of: Places, totals: Floats | None = None, *, every: bool = False) -> Moves:
        """From the slowest rank of every part, or from every rank; `totals` where more is known than loads."""
        totals = self._loads.totals(rank_of, self._search.ranks) if totals is None else totals
        used: Floats = np.bincount(rank_of, weights=self._bytes, minlength=self._search.ranks).astype(np.float64)
        idle = np.argsort(np.concatenate([totals.sum(axis=0)[None], totals]), axis=1, kind="stable")[:, :_TARGETS].ravel()
        begins = range(len(used)) if every else dict.fromkeys(np.argmax(totals, axis=1).tolist())
        guides, uneven, blocks = zip(*(self._from(rank, idle, rank_of, totals, used) for rank in begins), strict=True)
        return Moves(np.concatenate(guides), np.concatenate(uneven), blocks)

    def _from(
        self, rank: int, idle: Places, rank_of: Places, totals: Floats, used: Floats
    ) -> tuple[Floats, Floats, tuple[Places, Places, Places]]:
        """Every shard of a rank to each of the idle ranks, and against each shard of these."""
        is_target = np.zeros(len(used), dtype=np.bool_)
        is_target[idle] = True
        is_target[rank] = False
        shards, targets = np.flatnonzero((rank_of == rank) & self._movable), np.flatnonzero(is_target)
        others = np.flatnonzero(is_target[rank_of] & self._movable)
        # First as if a shard of no load came back. [parts, shards that go, shards that come back]
        back, to = np.concatenate([np.full(len(targets), FREE), others]), np.concatenate([targets, rank_of[others]])
        back_loads, back_bytes = self._of_part[:, back], self._bytes[back]
        back_loads[:, : len(targets)], back_bytes[: len(targets)] = 0.0, 0
        less = self._of_part[:, shards, None] - back_loads[:, None, :]
        here, there = totals[:, rank, None, None], totals[:, None, to]
        largest = np.maximum(_largest_without(totals, rank)[:, None, to], np.maximum(here - less, there + less))
        guide = largest.sum(axis=0)
        moved = self._bytes[shards, None] - back_bytes
        if (moved.max(initial=0) > self._room - used.max()) or (-moved.min(initial=0) > self._room - used[rank]):
            guide[(used[to] + moved > self._room) | (used[rank] - moved > self._room)] = np.inf
        uneven = 2.0 * (less * (less - here + there)).sum(axis=0)
        return guide.ravel(), uneven.ravel(), (shards, back, to)


def descended(search: Search, loads: Loads, rank_of: Places, *, rounds: int) -> Places:
    """The plan after the best change by the guide, again and again, while that makes it shorter or as short and more even."""
    around = Neighbourhood(search, loads)
    here = rank_of.copy()
    now = float(loads.totals(here, search.ranks).max(axis=1).sum())
    enough = float(loads.of.sum()) / search.ranks * (1 + _EVEN)
    level = 0
    for _ in range(rounds):
        if now <= enough or level > _LEVEL_ROUNDS or search.budget.out_of_time():
            break
        moves = around.moves(here)
        shortest = float(moves.guide_ns.min(initial=np.inf))
        if shortest > now:
            break
        best = int(np.argmin(np.where(moves.guide_ns <= shortest * (1 + _ROUNDING), moves.unevenness, np.inf)))
        level = level + 1 if shortest > now * (1 - _GAIN) else 0
        if level and moves.unevenness[best] >= 0:
            break
        here = moves.applied(here, np.array([best]))[0]
        now = shortest
    return here


def _largest_without(totals: Floats, rank: int) -> Floats:
    """Per part and other rank, the largest load of ranks that are neither, [parts, ranks]."""
    left, parts = totals.copy(), np.arange(len(totals))
    left[:, rank] = -np.inf
    first = left.argmax(axis=1)
    result = np.repeat(left[parts, first, None], left.shape[1], axis=1)
    left[parts, first] = -np.inf
    result[parts, first] = left.max(axis=1)
    return np.maximum(result, 0.0)
