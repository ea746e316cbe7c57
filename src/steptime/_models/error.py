"""GMAE: the geometric mean of relative errors, as every table of this project has it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Added to every absolute error, so that one exact hit does not pull the mean to zero; Lin et al. use the same.
GMAE_FLOOR = 4e-4


def gmae(errors: Sequence[float]) -> float:
    """Of signed or absolute relative errors; nan where there are none."""
    return float(np.exp(np.mean(np.log(np.abs(np.asarray(errors)) + GMAE_FLOOR)))) if len(errors) else math.nan
