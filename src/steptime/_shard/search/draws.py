"""Seeded draws of a model's parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import TypeVar

from steptime._lookups.generators import LENGTHS, Generator
from steptime._lookups.populations import Population

T = TypeVar("T")

HEAVY = 20.0
"""Lookups a sample from which a table is heavy."""

MOST_BYTES_PER_RANK = 2 << 30
"""Of tables, if they were split evenly: a task that comes out larger is drawn again."""

_LOCALITIES = (0.0, 0.0, 0.1, 0.3, 0.6)


class Draws:
    """Draws from one seed. Only `Random.random` is behind them: Python promises that it never changes."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def uniform(self, low: float, high: float) -> float:
        """Between two ends."""
        return low + (high - low) * self._random.random()

    def log_uniform(self, low: float, high: float) -> float:
        """Between two ends, every factor equally likely."""
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def count(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def pick(self, values: Sequence[T]) -> T:
        """One of several."""
        return values[int(self._random.random() * len(values))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """All of them, in any order."""
        return sorted(values, key=lambda _: self._random.random())

    def seed(self) -> int:
        """For something that draws by itself."""
        return int(self._random.random() * (1 << 31))

    def stream(self, population: Population, rows: tuple[float, float], pooling: tuple[float, float]) -> Generator:
        """Lookups of a table: pooling and skew from a population, the first within its ends; rows log-uniform."""
        drawn = population.table([self._random.random() for _ in range(4)])
        while not pooling[0] <= drawn.pooling <= pooling[1]:
            drawn = population.table([self._random.random() for _ in range(4)])
        return Generator(
            rows=round(self.log_uniform(*rows)),
            pooling=drawn.pooling,
            lengths=self.pick(LENGTHS),
            kind=drawn.kind,
            alpha=drawn.alpha,
            shift=drawn.shift,
            locality=self.pick(_LOCALITIES),
            seed=self.seed(),
        )
