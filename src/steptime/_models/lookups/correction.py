"""What physics leaves: ln(measured / physics) by boosted trees on features of a lookup."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.engine.regression import Trees
from steptime._models.engine.stored import stored


@dataclass(frozen=True)
class Correction:
    """Factors on a physical time, within the range that fitted rows showed."""

    trees: Trees = field(metadata=stored(prefix=""))
    range: Floats  # [2] of logarithms

    @classmethod
    def none(cls) -> Correction:
        """Where nothing is known: physics as it is."""
        return cls(Trees.constant(0.0), np.zeros(2))

    def factors(self, features: Floats) -> Floats:
        """What to multiply the physics of each row by."""
        return np.exp(np.clip(self.trees.values(features), *self.range))
