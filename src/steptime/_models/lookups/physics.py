"""Physical terms of a time, each with a factor that is not negative."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from steptime._lookups.columns import Floats
from steptime.errors import InputError

_ROUNDS = 8
# A row off by less than this counts as one off by this: the fit is to the many, not to the few that are far off.
_CLOSE = 0.03


def fit_terms(terms: Floats, times: Floats, weight: Floats | None = None) -> Floats:
    """Factors of terms, [terms], whose sum is least off from the times, relatively; few rows that are far off count less."""
    try:
        optimize: Any = import_module("scipy.optimize")
    except ImportError as error:
        raise InputError("fitting lookup models needs SciPy: install steptime[fit]") from error
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-30)
    own = np.ones(len(times)) if weight is None else weight
    weights = own / times
    found = np.zeros(terms.shape[1])
    for _ in range(_ROUNDS):
        found, _ = optimize.nnls(terms / scale * weights[:, None], times * weights)
        off = np.abs(terms / scale @ found / times - 1)
        weights = own / times / np.sqrt(np.maximum(off, _CLOSE))
    factors: Floats = found / scale
    return factors
