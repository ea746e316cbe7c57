"""`Search`: what strategies share: the shards to place, who says how long a plan takes, what was asked and found so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Table
from steptime._shard.task.memory import Memory

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

FREE = -1
"""In place of a rank: a shard that may go anywhere."""

KEPT = 32
"""Plans that are remembered: the best, its runners-up, and starts for the next strategy."""

# Plans whose steps are alike because hosts hide the tables are told apart by what their devices take.
_DEVICE_SHARE = 1e-4


class Evaluated(Protocol):
    """What an evaluator answers (`sharding.evaluation.Evaluation`)."""

    @property
    def step_ns(self) -> Floats:
        """[plans]."""

    @property
    def device_ns(self) -> Floats:
        """[plans] as fast as the device can, where the host takes longer."""

    @property
    def forward_ns(self) -> Floats:
        """[plans, ranks]."""

    @property
    def backward_ns(self) -> Floats:
        """[plans, ranks]."""

    @property
    def exchange_ns(self) -> Floats:
        """[plans, ranks]."""


@dataclass(frozen=True)
class Answer:
    """What an evaluation of somebody's own answers, and nothing else."""

    step_ns: Floats
    device_ns: Floats
    forward_ns: Floats
    backward_ns: Floats
    exchange_ns: Floats


Evaluate = Callable[[Places], Evaluated]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may spend. Evaluations decide what is found, on any machine; seconds only end it earlier."""

    evaluations: int
    seconds: float | None = None
    began_s: float = field(default_factory=time.monotonic)

    def out_of_time(self) -> bool:
        """Whether the seconds are spent."""
        return self.seconds is not None and time.monotonic() - self.began_s >= self.seconds

    def with_evaluations(self, evaluations: int) -> Budget:
        """The same clock, other evaluations."""
        return Budget(max(evaluations, 0), self.seconds, self.began_s)


@dataclass(frozen=True, slots=True)
class Found:
    """A plan of shards, how long its step takes, and which strategy asked for it first. `score` is what is compared."""

    score: float
    step_ns: float
    rank_of: tuple[int, ...]
    by: str


@dataclass
class Search:
    """Plans of the same shards on the same ranks, compared; keeps the best ones."""

    shards: tuple[Table, ...]
    ranks: int
    memory: Memory
    pinned: Places  # [shards] a rank or FREE
    evaluate: Evaluate
    budget: Budget
    added_ns: float = 0.0  # to every step: what tables cost that every rank has a part of
    by: str = ""  # the strategy at work
    asked: int = 0
    found: list[Found] = field(default_factory=list)  # best first
    best_by: dict[str, Found] = field(default_factory=dict)  # the best that each strategy asked for first
    log: list[tuple[Places, Evaluated]] = field(default_factory=list)  # what was asked, for whoever learns from it
    _known: dict[bytes, tuple[float, float]] = field(default_factory=dict)  # score and step
    _rows: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # where in the log

    @property
    def left(self) -> int:
        """Evaluations that may still be asked for."""
        return 0 if self.budget.out_of_time() else max(self.budget.evaluations - self.asked, 0)

    @property
    def best(self) -> Found | None:
        """So far."""
        return self.found[0] if self.found else None

    @property
    def symmetric(self) -> bool:
        """Whether ranks may change their numbers: nothing is pinned."""
        return bool((self.pinned == FREE).all())

    def ask(self, plans: Places, *, beyond: bool = False) -> Floats:
        """Scores of plans, [plans], little more than their steps; infinite where a plan is not possible or the budget is spent.

        `beyond`: whatever the budget says, for the few plans that an answer needs.
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
            self._learn(plans[list(new.values())], list(new))
        return np.array([self._known.get(key, (np.inf, np.inf))[0] for key in keys])

    def step_ns(self, rank_of: Places) -> float:
        """The step of a plan, whatever the budget says; infinite where it is not possible."""
        self.ask(rank_of, beyond=True)
        return self._known.get(np.asarray(rank_of, dtype=np.intp).tobytes(), (np.inf, np.inf))[1]

    def parts(self, rank_of: Places) -> Evaluated:
        """What the ranks of one plan do."""
        known = self._rows.get(np.asarray(rank_of, dtype=np.intp).tobytes())
        if known is None:
            self.asked += 1
            return self.evaluate(np.atleast_2d(rank_of))
        answer, row = self.log[known[0]][1], slice(known[1], known[1] + 1)
        return Answer(*(getattr(answer, each.name)[row] for each in fields(Answer)))

    def possible(self, plans: Places) -> npt.NDArray[np.bool_]:
        """Whether plans fit and leave pinned shards where they are, [plans]."""
        held = ((self.pinned == FREE) | (plans == self.pinned)).all(axis=1)
        result: npt.NDArray[np.bool_] = held & self.memory.fits(plans, self.ranks)
        return result

    def _learn(self, plans: Places, keys: Sequence[bytes]) -> None:
        answer = self.evaluate(plans)
        self.asked += len(plans)
        self.log.append((plans, answer))
        steps = (answer.step_ns + self.added_ns).tolist()
        scores = (answer.step_ns + self.added_ns + _DEVICE_SHARE * answer.device_ns).tolist()
        self._known.update(zip(keys, zip(scores, steps, strict=True), strict=True))
        self._rows.update((key, (len(self.log) - 1, row)) for row, key in enumerate(keys))
        worst = self.found[-1].score if len(self.found) >= KEPT else np.inf
        better = [index for index, score in enumerate(scores) if score < worst]
        new = [Found(scores[index], steps[index], tuple(plans[index].tolist()), self.by) for index in better]
        if new:
            mine = min(new, key=lambda one: (one.score, one.rank_of))
            self.best_by[self.by] = min(mine, self.best_by.get(self.by, mine), key=lambda one: one.score)
        self.found = self._distinct(sorted([*self.found, *new], key=lambda one: (one.score, one.rank_of)))[:KEPT]

    def _distinct(self, found: Sequence[Found]) -> list[Found]:
        """Without those that only number ranks differently."""
        if not self.symmetric:
            return list(found)
        kept: dict[tuple[float, tuple[int, ...]], Found] = {}
        for item in found:
            if len(kept) == KEPT:
                break
            kept.setdefault((item.step_ns, renumbered(item.rank_of)), item)
        return list(kept.values())


def renumbered(rank_of: Sequence[int]) -> tuple[int, ...]:
    """The plan with ranks numbered as they first come."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(rank, len(numbers)) for rank in rank_of)
