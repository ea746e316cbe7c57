"""`Landmarks`: a smooth function through rows, a sum of bumps at some of them (kernel ridge on a subset of rows)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.columns import Floats
from steptime._models.engine.stored import Arrays

# Chosen on validation rows: with trees, 400 landmarks are 0.3 points worse, 1,500 as good, all rows 0.1 points better.
_LANDMARKS = 1000
# In standard deviations, of features that matter most; and what counts as noise, of a bump's height.
_REACH, _NOISE = 5.0, 0.05
# Features are held within so many standard deviations: beyond fitted rows nothing is known.
_FAR = 3.0
# Rows that are evaluated at once: distances from all landmarks stay in a second-level cache.
_ROWS = 64


@dataclass(frozen=True)
class Landmarks:
    """Matern kernels of smoothness 3/2."""

    middle: Floats  # [features]
    scale: Floats  # [features] by which features are multiplied, once the middle is taken away
    far: Floats  # [features]
    places: Floats  # [landmarks, features]
    heights: Floats  # [landmarks]
    level: float  # far from all landmarks

    @classmethod
    def fit(cls, features: Floats, target: Floats, worth: Floats, seed: int) -> Landmarks:
        """Through rows; `worth` says how much each feature matters, [features]."""
        spread = features.std(axis=0) + 1e-9
        weight = np.clip(np.sqrt(worth / max(worth.max(), 1e-30)), 0.1, 1.0) * np.sqrt(3) / _REACH
        middle, scale, far, level = features.mean(axis=0), weight / spread, _FAR * weight, float(target.mean())
        empty = cls(middle, scale, far, np.zeros((0, features.shape[1])), np.zeros(0), level)
        placed = empty.placed(features)
        chosen = np.random.default_rng(seed).permutation(len(placed))[:_LANDMARKS]
        places = placed[chosen]
        bumps = _bumps(placed, places)
        among = bumps.T @ bumps + _NOISE * _bumps(places, places) + 1e-6 * np.eye(len(places))
        heights = np.linalg.solve(among, bumps.T @ (target - level)).astype(np.float64)
        return cls(middle, scale, far, places, heights, level)

    def placed(self, features: Floats) -> Floats:
        """Features in the units of the landmarks."""
        return np.clip((features - self.middle) * self.scale, -self.far, self.far)

    def values(self, features: Floats) -> Floats:
        """[rows]."""
        placed, found = self.placed(features), np.full(len(features), self.level)
        for first in range(0, len(placed), _ROWS):
            found[first : first + _ROWS] += _bumps(placed[first : first + _ROWS], self.places) @ self.heights
        return found

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same from."""
        return {
            "middle": self.middle, "scale": self.scale, "far": self.far, "places": self.places, "heights": self.heights,
            "level": np.array(self.level),
        }  # fmt: skip

    @classmethod
    def load(cls, arrays: Arrays) -> Landmarks:
        """The function that `arrays` were taken from."""
        middle, scale, far, places, heights = (
            np.asarray(arrays[name], dtype=np.float64) for name in ("middle", "scale", "far", "places", "heights")
        )
        return cls(middle, scale, far, places, heights, float(arrays["level"]))


def _bumps(rows: Floats, places: Floats) -> Floats:
    """[rows, places]: 1 at a place, less with the distance from it."""
    distance: Floats = (-2 * rows) @ places.T
    distance += (rows**2).sum(axis=1)[:, None]
    distance += (places**2).sum(axis=1)
    np.sqrt(np.maximum(distance, 0.0, out=distance), out=distance)
    fallen = np.exp(-distance)
    distance += 1
    distance *= fallen
    return distance
