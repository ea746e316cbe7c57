"""Which measured rows a fit may see, and how far a model was off on those it did not: what intervals are made from.

A row's side goes by the text of its question alone, so that the same question is always on one side.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from steptime._models.engine.stored import Floats

FIT, VALIDATION, TEST = "fit", "validation", "test"
# Shares of the questions: what is left is test.
_FIT, _VALIDATION = 0.70, 0.15
# Upper edges of the sizes that are told apart: short kernels repeat less well than long ones.
EDGES_NS = (5_000.0, 50_000.0, float("inf"))
# The distribution is kept as its quantiles; the first and the last bound nine of ten.
LEVELS = np.linspace(0.05, 0.95, 19)
# Fewer rows than this say nothing about their tails; the whole family stands in for them.
_LEAST = 40
# The group of rows of any family that lie beyond those that its model was fitted to.
OUTSIDE = "outside"
_EVERY_SIZE = -1


@cache
def split_of(text: str) -> str:
    """On which side of the split a question lies: its cache states, settings and shares of a GPU stay together."""
    point = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32
    return FIT if point < _FIT else VALIDATION if point < _FIT + _VALIDATION else TEST


@dataclass(frozen=True)
class Residuals:
    """Quantiles of ln(measured / predicted), per group (a family on whole GPUs, or on shares of one) and size."""

    families: tuple[str, ...]
    sizes: tuple[int, ...]
    quantiles: Floats  # a row for each family and size
    every: Floats  # of all families: what a family without rows gets

    @classmethod
    def of(cls, groups: Sequence[str], predicted_ns: Floats, measured_ns: Floats) -> Residuals:
        """From rows of the split `validation`, as a model predicts them that was not fitted to them."""
        logs = np.log(measured_ns / predicted_ns)
        rows: dict[tuple[str, int], list[int]] = defaultdict(list)
        for row, (family, time_ns) in enumerate(zip(groups, predicted_ns, strict=True)):
            rows[family, size_of(float(time_ns))].append(row)
            rows[family, _EVERY_SIZE].append(row)
        few = len(rows[OUTSIDE, _EVERY_SIZE]) < _LEAST
        keys = sorted(key for key, members in rows.items() if members and not (few and key[0] == OUTSIDE))
        used = [rows[key] if len(rows[key]) >= _LEAST else rows[key[0], _EVERY_SIZE] for key in keys]
        quantiles = np.asarray([np.quantile(logs[members], LEVELS) for members in used]).reshape(len(keys), len(LEVELS))
        return cls(tuple(family for family, _ in keys), tuple(size for _, size in keys), quantiles, np.quantile(logs, LEVELS))

    def interval_ns(self, family: str, time_ns: float, share: int = 1, *, inside: bool = True) -> tuple[float, float]:
        """Between the outermost quantiles of a prediction, which lies within.

        Beyond what was measured of a call's kernels, where models err more, at least between those of all such rows.
        """
        quantiles = [self.of_answer(family, time_ns, share)]
        if not inside and self.knows(OUTSIDE):
            quantiles.append(self._by_group[OUTSIDE, _EVERY_SIZE])
        low, high = min(float(each[0]) for each in quantiles), max(float(each[-1]) for each in quantiles)
        return time_ns * math.exp(min(low, 0.0)), time_ns * math.exp(max(high, 0.0))

    def of_answer(self, family: str, time_ns: float, share: int = 1) -> Floats:
        """The quantiles that belong to a prediction."""
        group = group_of(family, share)
        of_size = self._by_group.get((group, size_of(time_ns)))
        return self._by_group.get((group, _EVERY_SIZE), self.every) if of_size is None else of_size

    def knows(self, family: str) -> bool:
        """Whether rows of a family were measured."""
        return (family, _EVERY_SIZE) in self._by_group

    @cached_property
    def _by_group(self) -> dict[tuple[str, int], Floats]:
        return dict(zip(zip(self.families, self.sizes, strict=True), self.quantiles, strict=True))


def group_of(family: str, share: int) -> str:
    """Ranks on shares of a GPU disturb each other: their times are known less well."""
    return family if share == 1 else f"{family}, parts"


def size_of(time_ns: float) -> int:
    """Which of the sizes a time belongs to."""
    return next(size for size, edge in enumerate(EDGES_NS) if time_ns <= edge)
