"""Trees on what physics leaves of measured times."""

from __future__ import annotations

from typing import Any

import numpy as np

from steptime._models.engine.stored import Floats
from steptime._models.lookups.correction import Correction
from steptime_lab.fit.engine.trees import grow_trees

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


def fit_correction(features: Floats, physics: Floats, times: Floats, seed: int, **settings: Any) -> Correction:
    """From fitted rows. `settings` are LightGBM's, with `rounds`."""
    target = np.log(times / physics)
    trees = grow_trees(features, target, seed=seed, **{"rounds": _ROUNDS, **_SETTINGS, **settings})
    return Correction(trees, np.array([target.min(), target.max()]))
