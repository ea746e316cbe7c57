"""`Search`: what strategies share: the shards to place, who says how long a plan takes, what was asked and found so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Division
from steptime._shard.memory import Memory
from steptime._shard.task import FREE, Places
from steptime._sim.composed import Evaluation

Floats = npt.NDArray[np.float64]

KEPT = 32
"""Plans that are remembered: the best, its runners-up, and starts for the next strategy."""

# Plans whose steps are alike because hosts hide the tables are told apart by what their devices take.
_DEVICE_SHARE = 1e-4


class Evaluates(Protocol):
    """Who says how long plans take: `Evaluator`, or somebody's own."""

    def evaluate(self, rank_of: Places, division: Division, *, exact: bool = False) -> Evaluation:
        """Plans of a division's shards, [plans, shards]; `exact` where there are few of them."""

    def simulate(self, rank_of: Places, division: Division) -> Evaluation:
        """The same as `predict` has it, which takes a hundred times as long."""


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """What a search may spend. Evaluations decide what is found, on any machine; seconds only end it earlier."""

    evaluations: int
    seconds: float | None = None
    began_s: float = field(default_factory=time.monotonic)
    progress: Callable[[str], None] | None = field(default=None, compare=False)  # is told how far the search is

    def tell(self, text: str) -> None:
        """Say how far the search is, where somebody listens."""
        if self.progress is not None:
            self.progress(text)

    def out_of_time(self) -> bool:
        """Whether the seconds are spent."""
        return self.seconds is not None and time.monotonic() - self.began_s >= self.seconds

    def with_evaluations(self, evaluations: int) -> SearchBudget:
        """The same clock, other evaluations."""
        return replace(self, evaluations=max(evaluations, 0))


@dataclass(frozen=True, slots=True)
class RankedPlan:
    """A plan of shards, how long its step takes, and which strategy asked for it first. `score` is what is compared."""

    score: float
    step_ns: float
    rank_of: tuple[int, ...]
    by: str


@dataclass
class Search:
    """Plans of one division's shards on the same ranks, compared; keeps the best ones."""

    division: Division
    shards: tuple[Table, ...]
    ranks: int
    memory: Memory
    pinned: Places  # [shards] a rank or FREE
    evaluator: Evaluates
    budget: SearchBudget
    exact: bool = False  # whether the evaluator is asked exactly
    by: str = ""  # the strategy at work
    asked: int = 0
    complete: bool = False  # whether every plan was asked for
    ranked: list[RankedPlan] = field(default_factory=list)  # best first
    best_by: dict[str, RankedPlan] = field(default_factory=dict)  # the best that each strategy asked for first
    log: list[tuple[Places, Evaluation]] = field(default_factory=list)  # what was asked, for whoever learns from it
    _known: dict[bytes, tuple[float, int, int]] = field(default_factory=dict)  # score, and where in the log

    @property
    def left(self) -> int:
        """Evaluations that may still be asked for."""
        return 0 if self.budget.out_of_time() else max(self.budget.evaluations - self.asked, 0)

    @property
    def best(self) -> RankedPlan:
        """So far: a search begins with a plan."""
        return self.ranked[0]

    @property
    def symmetric(self) -> bool:
        """Whether ranks may change their numbers: nothing is pinned."""
        return bool((self.pinned == FREE).all())

    def ask(self, plans: Places, *, by: Sequence[str] | None = None, beyond: bool = False) -> Floats:
        """Scores of plans, [plans], little more than their steps; infinite where a plan is not possible or the budget is spent.

        `by`: whose plans they are, where that is not the strategy at work. `beyond`: whatever the budget says, for the few
        plans that an answer needs.
        """
        plans = np.atleast_2d(np.asarray(plans, dtype=np.intp))
        keys = [plan.tobytes() for plan in plans]
        possible = self.possible(plans)
        room = len(plans) if beyond else self.left
        new: dict[bytes, int] = {}
        for index, key in enumerate(keys):
            if possible[index] and key not in self._known and key not in new and len(new) < room:
                new[key] = index
        if new:
            rows = list(new.values())
            self._learn(plans[rows], list(new), [self.by if by is None else by[row] for row in rows])
        return np.array([self._known[key][0] if key in self._known else np.inf for key in keys])

    def result(self, rank_of: Places) -> Evaluation:
        """What the ranks of one plan do, whatever the budget says."""
        key = np.asarray(rank_of, dtype=np.intp).tobytes()
        if key not in self._known:
            self.asked += 1
            return self._evaluate(np.atleast_2d(rank_of))
        _, entry, row = self._known[key]
        return self.log[entry][1].take(slice(row, row + 1))

    def possible(self, plans: Places) -> npt.NDArray[np.bool_]:
        """Whether plans fit and leave pinned shards where they are, [plans]."""
        held = ((self.pinned == FREE) | (plans == self.pinned)).all(axis=1)
        result: npt.NDArray[np.bool_] = held & self.memory.fits(plans, self.ranks)
        return result

    def _evaluate(self, plans: Places) -> Evaluation:
        return self.evaluator.evaluate(plans, self.division, exact=self.exact)

    def _learn(self, plans: Places, keys: Sequence[bytes], by: Sequence[str]) -> None:
        result = self._evaluate(plans)
        self.asked += len(plans)
        self.budget.tell(f"plans evaluated of one way to divide tables: {self.asked:,}")
        self.log.append((plans, result))
        steps, scores = result.step_ns.tolist(), (result.step_ns + _DEVICE_SHARE * result.device_ns).tolist()
        self._known.update(
            (key, (score, len(self.log) - 1, row)) for row, (key, score) in enumerate(zip(keys, scores, strict=True))
        )
        worst = self.ranked[-1].score if len(self.ranked) >= KEPT else np.inf
        better = [index for index, score in enumerate(scores) if score < worst]
        new = [RankedPlan(scores[index], steps[index], tuple(plans[index].tolist()), by[index]) for index in better]
        for item in sorted(new, key=lambda item: (item.score, item.rank_of)):
            if item.by not in self.best_by or item.score < self.best_by[item.by].score:
                self.best_by[item.by] = item
        self.ranked = self._distinct(sorted([*self.ranked, *new], key=lambda item: (item.score, item.rank_of)))[:KEPT]

    def _distinct(self, ranked: Sequence[RankedPlan]) -> list[RankedPlan]:
        """Without those that only number ranks differently."""
        if not self.symmetric:
            return list(ranked)
        distinct: dict[tuple[float, tuple[int, ...]], RankedPlan] = {}
        for item in ranked:
            if len(distinct) == KEPT:
                break
            distinct.setdefault((item.step_ns, renumbered(item.rank_of)), item)
        return list(distinct.values())


def renumbered(rank_of: Sequence[int]) -> tuple[int, ...]:
    """The plan with ranks numbered as they first come."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(rank, len(numbers)) for rank in rank_of)
