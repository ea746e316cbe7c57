"""Fits the forward pass of the table-batched lookup: constants of its physics, then what they leave.

Constants are fitted to relative errors, in which few rows that are far off count less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from steptime._hardware.device import DeviceLimits
from steptime._lookups.table import Floats
from steptime._models.engine.constants import constants_of
from steptime._models.engine.regression import Trees
from steptime._models.lookups.caches import FORM, LookupConstants
from steptime._models.lookups.forms.batched_forward import (
    BatchedForward,
    Landmarks,
    Residual,
    bumps,
    features_of,
    share_features,
    sizes_of,
)
from steptime._models.lookups.forms.forward_physics import Constants, Costs, ForwardTables, SharePowers, launched
from steptime._models.lookups.question import Lookups
from steptime.errors import InputError
from steptime_lab.fit.engine.regression import grow_trees
from steptime_lab.measurements.lookups import MeasuredLookups

# Errors beyond this count linearly. How far a constant may go from where it starts: a factor of e costs one row off by 0.03.
_CLOSE, _HELD = 0.05, 0.03
_EVALUATIONS = 40
# Rows of one table are many because they vary one thing at a time; with this, physics of many is off by 5.2 % instead of 5.5.
_ONE_TABLE = 0.3
# Where a fit starts: round numbers near what fit rows show.
START = Constants(**{
    "launch": 500.0,
    "program": 1000.0,
    "step": 450.0,
    "step_cold": 100.0,
    "step_memory": 400.0,
    "step_l2": 100.0,
    "bags": 30.0,
    "bags_cold": 60.0,
    "bags_memory": 60.0,
    "bags_l2": 30.0,
    "bags_unaligned": 30.0,
    "bag_unaligned": 3.0,
    "bag_unaligned_cold": 10.0,
    "missing": 2.0,
    "l1_rate": 13e3,
    "l2_rate": 9e3,
    "memory_rate": 4e3,
    "line_rate": 500.0,
    "index_lines": 0.5,
    "row_least": 90.0,
    "kept": 36e6,
    "kept_slope": 6.0,
    "weights": 0.04,
    "half_step": 0.95,
    "half_bags": 0.8,
    "half_rate": 0.7,
    "overlap": 0.9,
    "softness": 0.6,
    "wave": 0.8,
    "uneven": 5.0,
    "late": 0.5,
    "early": 1.0,
})  # fmt: skip
# Idle shares take nothing, others their part of bandwidth: on memory, on the second-level cache, on steps, on what is kept.
START_POWERS = np.array([0.1, 0.8, 0.8, 0.1, 0.8, 0.8, 0.02, 0.1, 0.1, 0.1, 0.8, 0.8])
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
# On validation rows of shares of a GPU, whose repeats spread over 8 % in the median row.
_NOISY: dict[str, Any] = {"objective": "regression_l1", "rounds": 60, "num_leaves": 8}
# Chosen on validation rows: with trees, 400 landmarks are 0.3 points worse, 1,500 as good, all rows 0.1 points better.
_LANDMARKS = 1000
# In standard deviations, of features that matter most; and what counts as noise, of a bump's height.
_REACH, _NOISE = 5.0, 0.05
# Features are held within so many standard deviations: beyond fitted rows nothing is known.
_FAR = 3.0


def fit(measured: MeasuredLookups, seed: int, limits: DeviceLimits) -> BatchedForward:
    """Constants, then what they leave: of whole GPUs, then of shares."""
    rows = measured.of("fit")
    device = constants_of(limits, FORM, LookupConstants)
    tables = ForwardTables.of(rows.lookups.pool, device)
    whole, shares = rows.take(rows.lookups.share == 1), rows.take(rows.lookups.share > 1)
    constants = _constants(tables, whole)
    sizes = sizes_of(tables, rows.lookups)
    form = BatchedForward(
        constants=constants.values(),
        powers=_powers(constants, tables, shares),
        sizes=np.stack([sizes.min(axis=0), sizes.max(axis=0)]),
        whole=Residual.none(),
        shares=Residual.none(),
        device=device,
    )
    launch = form.launched(tables, whole.lookups)
    target = np.log(whole.time_ns / launch.time)
    form = replace(form, whole=_residual(features_of(launch, tables, whole.lookups), target, seed))
    return replace(form, shares=_residual_of_shares(form, tables, shares, seed))


def _residual(features: Floats, target: Floats, seed: int) -> Residual:
    trees = grow_trees(features, target, seed=seed, rounds=_ROUNDS, **_SETTINGS)
    return Residual(trees, _range(target), _landmarks(features, target, _worth(trees, features), seed))


def _residual_of_shares(form: BatchedForward, tables: ForwardTables, rows: MeasuredLookups, seed: int) -> Residual:
    """From rows whose repeats differ much: by few small trees alone, to the median; nothing where none were measured."""
    if not len(rows):
        return Residual.none()
    launch = form.launched(tables, rows.lookups)
    features = features_of(launch, tables, rows.lookups)
    known = form.whole.values(features)
    target = np.log(rows.time_ns / launch.time) - known
    trees = grow_trees(share_features(features, known, rows.lookups), target, seed=seed, **{**_SETTINGS, **_NOISY})
    return Residual(trees, _range(target))


def _range(target: Floats) -> Floats:
    return np.array([target.min(), target.max()])


def _landmarks(features: Floats, target: Floats, worth: Floats, seed: int) -> Landmarks:
    """Kernel ridge on a subset of rows; `worth` says how much each feature matters, [features]."""
    spread = features.std(axis=0) + 1e-9
    weight = np.clip(np.sqrt(worth / max(worth.max(), 1e-30)), 0.1, 1.0) * np.sqrt(3) / _REACH
    middle, scale, far, level = features.mean(axis=0), weight / spread, _FAR * weight, float(target.mean())
    empty = Landmarks(middle, scale, far, np.zeros((0, features.shape[1])), np.zeros(0), level)
    placed = empty.placed(features)
    chosen = np.random.default_rng(seed).permutation(len(placed))[:_LANDMARKS]
    places = placed[chosen]
    heights = bumps(placed, places)
    among = heights.T @ heights + _NOISE * bumps(places, places) + 1e-6 * np.eye(len(places))
    solved = np.linalg.solve(among, heights.T @ (target - level)).astype(np.float64)
    return Landmarks(middle, scale, far, places, solved, level)


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


def _constants(tables: ForwardTables, rows: MeasuredLookups) -> Constants:
    """From rows of whole GPUs."""
    if not len(rows):
        return START
    start = np.log(START.values())
    lookups, used = _compact(rows.lookups, tables)
    nothing = SharePowers.of(np.zeros_like(START_POWERS))

    def times(values: Floats) -> Floats:
        return launched(Constants.of(np.exp(values)), nothing, used, lookups).time

    return Constants.of(np.exp(_least(times, rows, start, (start - 5, start + 5))))


def _powers(constants: Constants, tables: ForwardTables, rows: MeasuredLookups) -> Floats:
    """From rows of shares of a GPU, with the constants of a whole one."""
    start = START_POWERS
    if not len(rows):
        return start
    lookups, used = _compact(rows.lookups, tables)
    costs = Costs.of(constants, used)

    def times(values: Floats) -> Floats:
        return launched(constants, SharePowers.of(values), used, lookups, costs).time

    return _least(times, rows, start, (np.full_like(start, -1e-9), np.full_like(start, 2.0)))


def _compact(lookups: Lookups, tables: ForwardTables) -> tuple[Lookups, ForwardTables]:
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

    result: Floats = optimize.least_squares(off, start, bounds=bounds, loss="soft_l1", f_scale=_CLOSE, max_nfev=_EVALUATIONS).x
    return result
