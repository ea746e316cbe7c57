"""What physics leaves of a launch: ln(measured / physics), the mean of boosted trees and of a smooth function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays, pack, unpack
from steptime._models.engine.trees import Trees
from steptime._models.lookups.correction import named, part
from steptime._models.lookups.forms.batched_forward.landmarks import Landmarks

# Chosen on validation rows; few trees, so that a plan of many tables is estimated in microseconds.
_ROUNDS = 180
_SETTINGS: dict[str, Any] = {
    "objective": "regression",
    "learning_rate": 0.085,
    "num_leaves": 24,
    "max_depth": 7,
    "min_data_in_leaf": 10,
    "feature_fraction": 0.5,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
    "lambda_l2": 1.0,
}
# On validation rows of parts of a GPU, whose repeats spread over 8 % in the median row.
_NOISY: dict[str, Any] = {"objective": "regression_l1", "rounds": 60, "num_leaves": 8}


@dataclass(frozen=True)
class Left:
    """Within the range that fitted rows showed."""

    trees: Trees
    smooth: Landmarks | None
    low: float
    high: float

    @classmethod
    def fit(cls, features: Floats, target: Floats, seed: int) -> Left:
        """From fitted rows."""
        from steptime_lab.fit.engine.trees import grow_trees

        trees = grow_trees(features, target, seed=seed, rounds=_ROUNDS, **_SETTINGS)
        function = Landmarks.fit(features, target, _worth(trees, features), seed)
        return cls(trees, function, float(target.min()), float(target.max()))

    @classmethod
    def fit_noisy(cls, features: Floats, target: Floats, seed: int) -> Left:
        """From few rows whose repeats differ much: by few small trees alone, to the median."""
        from steptime_lab.fit.engine.trees import grow_trees

        trees = grow_trees(features, target, seed=seed, **{**_SETTINGS, **_NOISY})
        return cls(trees, None, float(target.min()), float(target.max()))

    @classmethod
    def nothing(cls) -> Left:
        """Where nothing is known: physics as it is."""
        return cls(Trees.constant(0.0), None, 0.0, 0.0)

    def values(self, features: Floats) -> Floats:
        """[rows]."""
        found = self.trees.values(features)
        if self.smooth is not None:
            found = (found + self.smooth.values(features)) / 2
        return np.clip(found, self.low, self.high)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        own = {**named("trees", pack(self.trees)), "range": np.array([self.low, self.high])}
        return own if self.smooth is None else {**own, **named("smooth", self.smooth.arrays())}

    @classmethod
    def load(cls, arrays: Arrays) -> Left:
        """What `arrays` were taken from."""
        smooth = part(arrays, "smooth")
        low, high = (float(end) for end in arrays["range"])
        return cls(unpack(Trees, part(arrays, "trees")), Landmarks.load(smooth) if smooth else None, low, high)


def _worth(trees: Trees, features: Floats) -> Floats:
    """How much trees make of each feature: how often they ask for it near their roots counts most, [features]."""
    worth = np.zeros(features.shape[1])
    nodes, weight = trees.roots, 1.0
    for _ in range(trees.depth):
        inner = nodes[trees.children[2 * nodes] != nodes]
        np.add.at(worth, trees.feature[inner], weight / max(len(trees.roots), 1))
        nodes = np.concatenate([trees.children[2 * inner], trees.children[2 * inner + 1]])
        weight /= 2
    return worth
