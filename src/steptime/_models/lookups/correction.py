"""What physics leaves: ln(measured / physics) by boosted trees on features of a lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays, pack, unpack
from steptime._models.engine.trees import Trees

# Chosen on validation rows of lookups: few trees, so that a plan of many tables is estimated in microseconds.
_ROUNDS = 140
_SETTINGS: dict[str, Any] = {
    "objective": "regression",
    "learning_rate": 0.1,
    "num_leaves": 16,
    "max_depth": 7,
    "min_data_in_leaf": 10,
    "feature_fraction": 0.6,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
}


@dataclass(frozen=True)
class Correction:
    """Factors on a physical time, within the range that fitted rows showed."""

    trees: Trees
    low: float
    high: float

    @classmethod
    def fit(cls, features: Floats, physics: Floats, times: Floats, seed: int, **settings: Any) -> Correction:
        """From fitted rows. `settings` are LightGBM's, with `rounds`."""
        from steptime_lab.fit.engine.trees import grow_trees

        target = np.log(times / physics)
        trees = grow_trees(features, target, seed=seed, **{"rounds": _ROUNDS, **_SETTINGS, **settings})
        return cls(trees, float(target.min()), float(target.max()))

    def factors(self, features: Floats) -> Floats:
        """[rows]."""
        return np.exp(np.clip(self.trees.values(features), self.low, self.high))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        return {**pack(self.trees), "range": np.array([self.low, self.high])}

    @classmethod
    def load(cls, arrays: Arrays) -> Correction:
        """The correction that `arrays` were taken from."""
        return cls(unpack(Trees, arrays), *(float(end) for end in arrays["range"]))


def part(arrays: Arrays, name: str) -> dict[str, npt.NDArray[Any]]:
    """Those of `arrays` whose names begin with `name.`, without that."""
    return {key[len(name) + 1 :]: value for key, value in arrays.items() if key.startswith(f"{name}.")}


def named(name: str, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    """The inverse of `part`."""
    return {f"{name}.{key}": value for key, value in arrays.items()}
