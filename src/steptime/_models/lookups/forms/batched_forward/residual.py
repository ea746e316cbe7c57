"""What physics leaves of a launch: ln(measured / physics), the mean of boosted trees and of a smooth function."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.engine.regression import Trees

# Rows that are evaluated at once: distances from all landmarks stay in a second-level cache.
_ROWS = 64


@dataclass(frozen=True)
class Landmarks:
    """A smooth function through rows: a sum of bumps at some of them (Matern kernels of smoothness 3/2)."""

    middle: Floats  # [features]
    scale: Floats  # [features] by which features are multiplied, once the middle is taken away
    far: Floats  # [features]
    places: Floats  # [landmarks, features]
    heights: Floats  # [landmarks]
    level: float  # far from all landmarks

    def placed(self, features: Floats) -> Floats:
        """Features in the units of the landmarks."""
        return np.clip((features - self.middle) * self.scale, -self.far, self.far)

    def values(self, features: Floats) -> Floats:
        """[rows]."""
        placed, result = self.placed(features), np.full(len(features), self.level)
        for first in range(0, len(placed), _ROWS):
            result[first : first + _ROWS] += bumps(placed[first : first + _ROWS], self.places) @ self.heights
        return result


def bumps(rows: Floats, places: Floats) -> Floats:
    """[rows, places]: 1 at a place, less with the distance from it."""
    distance: Floats = (-2 * rows) @ places.T
    distance += (rows**2).sum(axis=1)[:, None]
    distance += (places**2).sum(axis=1)
    np.sqrt(np.maximum(distance, 0.0, out=distance), out=distance)
    fallen = np.exp(-distance)
    distance += 1
    distance *= fallen
    return distance


@dataclass(frozen=True)
class Residual:
    """Within the range that fitted rows showed."""

    trees: Trees
    range: Floats  # [2] of logarithms
    smooth: Landmarks | None = None

    @classmethod
    def none(cls) -> Residual:
        """Where nothing is known: physics as it is."""
        return cls(Trees.constant(0.0), np.zeros(2))

    def values(self, features: Floats) -> Floats:
        """Logarithms to add to those of each row's physics."""
        logs = self.trees.values(features)
        if self.smooth is not None:
            logs = (logs + self.smooth.values(features)) / 2
        return np.clip(logs, *self.range)
