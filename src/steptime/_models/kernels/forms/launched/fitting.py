"""Fits the form: weights of terms over whole GPUs and parts, scales of the parts, trees on what the sum leaves."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.forms.launched.columns import Numbers
from steptime._models.kernels.forms.launched.groups import CODE_LEVELS, finest
from steptime._models.kernels.forms.launched.model import MOST, Batch, Codes, Model, base_ns, features
from steptime._models.kernels.forms.launched.parts import parts_of, start
from steptime._models.kernels.forms.launched.table import Table, table_of
from steptime._models.kernels.forms.launched.terms import terms, traffic
from steptime._models.kernels.forms.launched.weights import Weights, fit_weights
from steptime._models.kernels.forms.trees import Trees
from steptime._models.kernels.question import OTHERS
from steptime._models.kernels.rows import FIT, Row, of
from steptime.errors import InputError

# A launch counts by its share of its call's time, but never as nothing.
_LEAST_IMPORTANCE = 0.02
# Calls of real steps beside swept ones: they are what will be asked.
_STEP_IMPORTANCE, _SWEPT = 3.0, "sweep"
# Rows on whole GPUs where there are rows on parts as well: they steady what the few of those leave open.
_WHOLE_IMPORTANCE = 0.15
# Folds that the sum of terms is fitted without, so that trees see errors as on new rows.
_FOLDS = 4
# Rows that a mean of a text's residuals is drawn to zero by.
_SMOOTHING = 10.0
# Steps in which scales of parts are looked for, coarse and fine, and what the loss has to fall to for one to be taken.
_STEPS, _WORTH = ((0.3, 0.1), (0.1, 0.03)), 0.9995
# Launches that are looked at for that, of every company.
_LOOKED_AT = 3000
# Trees: chosen on validation rows. Fewer with parts: repeats beside busy ones differ by 7 to 10 %, and more learn that noise.
_ROUNDS, _ROUNDS_PARTS = 400, 150
_SETTINGS = {"learning_rate": 0.07, "num_leaves": 31, "max_depth": 8, "min_data_in_leaf": 10, "feature_fraction": 0.5}


def fit_model(rows: Sequence[Row], seed: int) -> Model:
    """The model of the rows of the split `fit`."""
    fitted = of(rows, FIT)
    table = table_of(fitted)
    if not len(table.time_ns):
        raise InputError("no measured row launches what the rules of its family say")
    importance = _importance(table, fitted)
    scales = _fit_scales(table, importance)
    weights = _fit_weights(table, importance, scales, np.ones(len(table.time_ns), dtype=bool))
    crossed = _crossed(table, fitted, importance, scales)
    left = np.clip(np.log(table.time_ns / crossed), -MOST, MOST)
    codes = _codes(table, left)
    batch = batch_of(table, weights, codes)
    moved = traffic(batch.numbers, parts_of(batch.share, batch.others, scales))
    seen = features(table.columns, batch, moved, crossed)
    rounds = _ROUNDS_PARTS if (table.share > 1).any() else _ROUNDS
    trees = Trees.fit(seen, left, importance, seed, rounds, **_SETTINGS)
    known = {name: place for place, name in enumerate(weights.names)}
    return Model(table.columns, weights, scales, codes, trees, frozenset(), _ranges(table), known)


def batch_of(table: Table, weights: Weights, codes: Codes) -> Batch:
    """The launches of a table as the model sees them."""
    known = {name: place for place, name in enumerate(weights.names)}
    group = np.asarray([finest(names, known) for names in table.groups], dtype=np.int64)
    code = np.asarray([finest(names[:CODE_LEVELS], known) for names in table.groups], dtype=np.int64)
    coded = np.asarray([codes.of(names) for names in table.groups]).reshape(-1, 3)
    return Batch(table.numbers, group, code, coded, table.share, table.others)


def _importance(table: Table, rows: Sequence[Row]) -> Numbers:
    call_ns = np.asarray([row.time_ns for row in rows])[table.row]
    whole = _WHOLE_IMPORTANCE if (table.share > 1).any() else 1.0
    step = np.asarray([1.0 if row.source == _SWEPT else _STEP_IMPORTANCE for row in rows])[table.row]
    found: Numbers = np.clip(table.time_ns / call_ns, _LEAST_IMPORTANCE, 1.0) * step * np.where(table.share > 1, 1.0, whole)
    return found


def _fit_weights(table: Table, importance: Numbers, scales: Numbers, used: npt.NDArray[np.bool_]) -> Weights:
    parts = parts_of(table.share[used], table.others[used], scales)
    numbers = table.numbers[used]
    worked = terms(table.columns, numbers, traffic(numbers, parts), parts)
    groups = [names for names, one in zip(table.groups, used, strict=True) if one]
    return fit_weights(worked, table.time_ns[used], groups, importance[used])


def _fit_scales(table: Table, importance: Numbers) -> Numbers:
    """Scales under which weights of all rows fit the rows on parts best."""
    scales = start()
    part = table.share > 1
    if not part.any():
        return scales
    for steps in _STEPS:
        weights = _fit_weights(table, importance, scales, np.ones(len(part), dtype=bool))
        batch = batch_of(table, weights, Codes({}))
        for company in range(1, len(OTHERS)):
            used = np.flatnonzero(part & (table.others == company))
            used = used[:: max(1, len(used) // _LOOKED_AT)]
            if len(used):
                scales = _descended(scales, company, steps, _loss(table, weights, batch, used, importance))
    return scales


def _loss(
    table: Table, weights: Weights, batch: Batch, used: npt.NDArray[np.int64], importance: Numbers
) -> Callable[[Numbers], float]:
    some = batch.take(used)
    truth, weight = np.log(table.time_ns[used]), importance[used]

    def loss(scales: Numbers) -> float:
        found, _ = base_ns(table.columns, weights, scales, some)
        return float(np.average(np.abs(np.log(found) - truth), weights=weight))

    return loss


def _descended(scales: Numbers, company: int, steps: Sequence[float], loss: Callable[[Numbers], float]) -> Numbers:
    """One number after the other moved for as long as that helps."""
    best = loss(scales)
    for step in steps:
        for place in np.ndindex(scales.shape[1:]):
            for way in (step, -step):
                moving = True
                while moving:
                    tried = scales.copy()
                    tried[company, *place] += way
                    found = loss(tried)
                    moving = found < best * _WORTH
                    if moving:
                        scales, best = tried, found
    return scales


def _crossed(table: Table, rows: Sequence[Row], importance: Numbers, scales: Numbers) -> Numbers:
    """The sum of terms for every launch by weights that have not seen its call."""
    fold = np.asarray([_fold(row.question.call.to_json()) for row in rows])[table.row]
    found = np.empty(len(table.time_ns))
    for one in range(_FOLDS):
        weights = _fit_weights(table, importance, scales, fold != one)
        found[fold == one] = base_ns(table.columns, weights, scales, batch_of(table, weights, Codes({})))[0][fold == one]
    return found


def _fold(text: str) -> int:
    return int(hashlib.sha256(f"fold {text}".encode()).hexdigest()[:8], 16) % _FOLDS


def _codes(table: Table, left: Numbers) -> Codes:
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for names, off in zip(table.groups, left.tolist(), strict=True):
        for name in (names[1], names[3], names[4]):
            sums[name] += off
            counts[name] += 1
    return Codes({name: sums[name] / (counts[name] + _SMOOTHING) for name in sorted(sums)})


def _ranges(table: Table) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for names, elements in zip(table.groups, table.numbers[:, 0].tolist(), strict=True):
        low, high = found.get(names[1], (np.inf, 0.0))
        found[names[1]] = (min(low, elements), max(high, elements))
    return found
