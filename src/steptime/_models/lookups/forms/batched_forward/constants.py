"""Fits the constants of a launch's physics to measured rows: relative errors, in which few rows that are far off count less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from steptime._lookups.columns import Floats
from steptime._models.lookups.batch import Lookups
from steptime._models.lookups.forms.batched_forward.physics import NUMBER_OF_POWERS, Constants, Costs, Parts, launched
from steptime._models.lookups.forms.batched_forward.tables import Tables
from steptime._models.lookups.rows import MeasuredLookups
from steptime.errors import InputError

# Errors beyond this count linearly. How far a constant may go from where it starts: a factor of e costs one row off by 0.03.
_CLOSE, _HELD = 0.05, 0.03
_EVALUATIONS = 40
# Rows of one table are many because they vary one thing at a time; with this, physics of many is off by 5.2 % instead of 5.5.
_ONE_TABLE = 0.3


def fitted_constants(tables: Tables, rows: MeasuredLookups) -> Constants:
    """From rows of whole GPUs."""
    start = np.log(Constants().values())
    if not len(rows):
        return Constants()
    lookups, own = _compact(rows.lookups, tables)
    nothing = Parts.of(np.zeros(NUMBER_OF_POWERS))

    def times(values: Floats) -> Floats:
        known = Constants.of(np.exp(values))
        return launched(known, nothing, Costs.of(known, own), own, lookups).time

    return Constants.of(np.exp(_least(times, rows, start, (start - 5, start + 5))))


def fitted_parts(constants: Constants, tables: Tables, rows: MeasuredLookups) -> Parts:
    """From rows of parts of a GPU, with the constants of a whole one."""
    start = Parts.start().values()
    if not len(rows):
        return Parts.start()
    lookups, own = _compact(rows.lookups, tables)
    costs = Costs.of(constants, own)

    def times(values: Floats) -> Floats:
        return launched(constants, Parts.of(values), costs, own, lookups).time

    return Parts.of(_least(times, rows, start, (np.full_like(start, -1e-9), np.full_like(start, 2.0))))


def _compact(lookups: Lookups, tables: Tables) -> tuple[Lookups, Tables]:
    """The lookups over a pool of the tables that they have."""
    used, member = np.unique(lookups.member, return_inverse=True)
    return replace(lookups, pool=lookups.pool.take(used), member=member), tables.take(used)


def _least(times: Callable[[Floats], Floats], rows: MeasuredLookups, start: Floats, bounds: tuple[Floats, Floats]) -> Floats:
    try:
        optimize: Any = import_module("scipy.optimize")
    except ImportError as error:
        raise InputError("fitting lookup models needs SciPy: install steptime[fit]") from error

    weight = np.sqrt(np.where(rows.lookups.counts == 1, _ONE_TABLE, 1.0))

    def off(values: Floats) -> Floats:
        return np.concatenate([weight * np.log(times(values) / rows.time_ns), _HELD * (values - start)])

    found: Floats = optimize.least_squares(off, start, bounds=bounds, loss="soft_l1", f_scale=_CLOSE, max_nfev=_EVALUATIONS).x
    return found
