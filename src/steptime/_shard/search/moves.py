"""Changes of a plan by the guide: a shard to another rank, or two in each other's place, from the ranks a step waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._shard.search.loads import BACKWARD, FORWARD, Loads
from steptime._shard.search.state import FREE, Floats, Places, Search

# Changes of the guide that differ by less than this share are as good as each other.
_ROUNDING = 1e-9
# Gains below this share are not worth a round by themselves, nor is a plan this near to loads that are all equal; so many
# rounds may go without a gain, for loads that become more even.
_GAIN, _EVEN, _LEVEL_ROUNDS = 2e-5, 5e-4, 24
# Ranks that have least to do, which shards may go to: of all parts together, and of each.
_TARGETS = 6


@dataclass(frozen=True, eq=False)
class Moves:
    """Changes of one plan: shard `first` to rank `to`, and where `second` is a shard, that one back to where `first` was."""

    first: Places
    second: Places  # FREE: a move without return
    to: Places
    guide_ns: Floats
    unevenness: Floats  # of the loads afterwards: sum of squares less what it was

    def applied(self, rank_of: Places, chosen: Places) -> Places:
        """The plans after some of the changes, each by itself."""
        plans = np.repeat(rank_of[None, :], len(chosen), axis=0)
        rows = np.arange(len(chosen))
        first, second, to = self.first[chosen], self.second[chosen], self.to[chosen]
        swapped = second != FREE
        plans[rows[swapped], second[swapped]] = rank_of[first[swapped]]
        plans[rows, first] = to
        return plans


class Neighbourhood:
    """The changes of a plan, with loads that add up: whatever touches none of a step's slowest ranks cannot help it."""

    def __init__(self, search: Search, loads: Loads) -> None:
        self._search, self._loads = search, loads
        self._movable = search.pinned == FREE
        self._bytes = search.memory.shard_bytes
        self._room = search.memory.room

    def measured(self, rank_of: Places) -> Floats:
        """What the ranks of a plan do as evaluated, not as loads add up, [ranks, parts]."""
        result = self._loads.totals(rank_of, self._search.ranks)
        answer = self._search.parts(rank_of)
        result[:, FORWARD], result[:, BACKWARD] = answer.forward_ns[0], answer.backward_ns[0]
        return result

    def moves(self, rank_of: Places, totals: Floats | None = None, *, every: bool = False) -> Moves:
        """From the slowest rank of every part, or from every rank; `totals` where more is known than loads."""
        totals = self._loads.totals(rank_of, self._search.ranks) if totals is None else totals
        used: Floats = np.bincount(rank_of, weights=self._bytes, minlength=self._search.ranks).astype(np.float64)
        begins = range(len(totals)) if every else dict.fromkeys(np.argmax(totals, axis=0).tolist())
        parts = [self._from(rank, rank_of, totals, used) for rank in begins]
        return Moves(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _from(self, rank: int, rank_of: Places, totals: Floats, used: Floats) -> tuple[Places, Places, Places, Floats, Floats]:
        loads, own = self._loads.of, np.flatnonzero((rank_of == rank) & self._movable)
        targets = _idlest(totals, rank)
        is_target = np.zeros(len(totals), dtype=np.bool_)
        is_target[targets] = True
        others = np.flatnonzero(is_target[rank_of] & self._movable)
        first = np.concatenate([np.repeat(own, len(targets)), np.repeat(own, len(others))])
        second = np.concatenate([np.full(len(own) * len(targets), FREE), np.tile(others, len(own))])
        to = np.concatenate([np.tile(targets, len(own)), rank_of[np.tile(others, len(own))]])
        swapped = second != FREE
        back = np.where(swapped[:, None], loads[second], 0.0)
        back_bytes = np.where(swapped, self._bytes[second], 0)
        difference, moved = loads[first] - back, self._bytes[first] - back_bytes
        fits = (used[to] + moved <= self._room) & (used[rank] - moved <= self._room)
        first, second, to, difference = first[fits], second[fits], to[fits], difference[fits]
        after_own, after_other = totals[rank] - difference, totals[to] + difference
        guide = np.maximum(_largest_without(totals, rank)[to], np.maximum(after_own, after_other)).sum(axis=1)
        squares = after_own**2 + after_other**2 - totals[rank] ** 2 - totals[to] ** 2
        return first, second, to, guide, squares.sum(axis=1)


def descended(search: Search, loads: Loads, rank_of: Places, *, rounds: int) -> Places:
    """The plan after the best change by the guide, again and again, while that makes it shorter or as short and more even."""
    around = Neighbourhood(search, loads)
    here = rank_of.copy()
    now = float(loads.totals(here, search.ranks).max(axis=0).sum())
    enough = float(loads.of.sum()) / search.ranks * (1 + _EVEN)
    level = 0
    for _ in range(rounds):
        if now <= enough or level > _LEVEL_ROUNDS or search.budget.out_of_time():
            break
        moves = around.moves(here)
        if not len(moves.first):
            break
        shortest = float(moves.guide_ns.min())
        if shortest > now:
            break
        best = int(np.argmin(np.where(moves.guide_ns <= shortest * (1 + _ROUNDING), moves.unevenness, np.inf)))
        level = level + 1 if shortest > now * (1 - _GAIN) else 0
        if level and moves.unevenness[best] >= 0:
            break
        here = moves.applied(here, np.array([best]))[0]
        now = shortest
    return here


def _idlest(totals: Floats, rank: int) -> Places:
    """The ranks, other than this one, that have least to do, in all and in each part."""
    columns = (totals.sum(axis=1), *totals.T)
    results = {int(item) for column in columns for item in np.argsort(column, kind="stable")[:_TARGETS]}
    return np.array(sorted(results - {rank}), dtype=np.intp)


def _largest_without(totals: Floats, rank: int) -> Floats:
    """Per other rank and part, the largest load of ranks that are neither, [ranks, parts]."""
    left = totals.copy()
    left[rank] = -np.inf
    order = np.argsort(-left, axis=0, kind="stable")
    parts = np.arange(totals.shape[1])
    largest, second = left[order[0], parts], left[order[min(1, len(left) - 1)], parts]
    result: Floats = np.where(order[0] == np.arange(len(left))[:, None], second, largest)
    return np.maximum(result, 0.0)
