"""How far a model was off on rows it was not fitted to: what intervals are made from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Upper edges of the sizes that are told apart: short kernels repeat less well than long ones.
EDGES_NS = (5_000.0, 50_000.0, float("inf"))
# The distribution is kept as its quantiles; the first and the last bound nine of ten.
LEVELS = np.linspace(0.05, 0.95, 19)
# Fewer rows than this say nothing about their tails; the whole family stands in for them.
_LEAST = 40


@dataclass(frozen=True)
class Residuals:
    """Quantiles of ln(measured / predicted), per group (a family on whole GPUs, or on parts of one) and size."""

    quantiles: dict[tuple[str, int], npt.NDArray[np.float64]]
    every: npt.NDArray[np.float64]  # of all families: what a family without rows gets

    @classmethod
    def of(
        cls, groups: Sequence[str], predicted_ns: npt.NDArray[np.float64], measured_ns: npt.NDArray[np.float64]
    ) -> Residuals:
        """From rows of the split `validation`, as a model predicts them that was not fitted to them."""
        logs = np.log(measured_ns / predicted_ns)
        places: dict[tuple[str, int], list[int]] = defaultdict(list)
        for place, (family, time_ns) in enumerate(zip(groups, predicted_ns, strict=True)):
            places[family, size_of(float(time_ns))].append(place)
            places[family, -1].append(place)
        found = {}
        for (family, size), some in places.items():
            used = some if len(some) >= _LEAST else places[family, -1]
            found[family, size] = np.quantile(logs[used], LEVELS)
        return cls(found, np.quantile(logs, LEVELS))

    def of_answer(self, family: str, time_ns: float, share: int = 1) -> npt.NDArray[np.float64]:
        """The quantiles that belong to a prediction."""
        group = group_of(family, share)
        found = self.quantiles.get((group, size_of(time_ns)))
        return self.quantiles.get((group, -1), self.every) if found is None else found

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        keys = sorted(self.quantiles)
        return {
            "families": np.asarray([family for family, _ in keys], dtype=np.str_),
            "sizes": np.asarray([size for _, size in keys], dtype=np.int64),
            "quantiles": np.asarray([self.quantiles[key] for key in keys]).reshape(len(keys), len(LEVELS)),
            "every": self.every,
        }

    @classmethod
    def load(cls, arrays: dict[str, npt.NDArray[Any]]) -> Residuals:
        """The residuals that `arrays` were taken from."""
        keys = zip(arrays["families"].tolist(), arrays["sizes"].tolist(), strict=True)
        return cls(dict(zip(keys, arrays["quantiles"], strict=True)), arrays["every"])


def group_of(family: str, share: int) -> str:
    """Ranks on parts of a GPU disturb each other: their times are known less well."""
    return family if share == 1 else f"{family}, parts"


def size_of(time_ns: float) -> int:
    """Which of the sizes a time belongs to."""
    return next(place for place, edge in enumerate(EDGES_NS) if time_ns <= edge)
