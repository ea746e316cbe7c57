"""The form of matrix products: a mixture for every group, the small kernels beside it, and shares of a GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from steptime._hardware.device import DeviceLimits
from steptime._models.engine.constants import constants_of
from steptime._models.engine.splits import FIT
from steptime._models.kernels.forms.matmul.beside import COPY, PATTERNS, SmallKernels
from steptime._models.kernels.forms.matmul.ensemble import FOLDS, NETWORKS, Ensemble, FittedGroup, tree_features
from steptime._models.kernels.forms.matmul.features import Floats, MatmulConstants, inputs_of, sizes_of
from steptime._models.kernels.forms.matmul.group import GROUPS, groups_of
from steptime._models.kernels.forms.matmul.mixture import KernelMixture, Mixed
from steptime._models.kernels.forms.matmul.model import MatmulForm
from steptime._models.kernels.forms.matmul.product import Column, Products, of_questions
from steptime._models.kernels.forms.matmul.shares import NO_SHARES, ProductShares
from steptime.errors import InputError
from steptime_lab.fit.engine.trees import grow_trees
from steptime_lab.fit.kernels.matmul_beside import fit_curves, fit_lines, fit_shares
from steptime_lab.fit.kernels.matmul_names import candidates, pattern_of, role
from steptime_lab.fit.kernels.matmul_training import Schedule, Targets, UsualRates, train
from steptime_lab.measurements.kernels import Row

# Chosen on validation rows.
_TREES: dict[str, Any] = {
    "learning_rate": 0.05,
    "num_leaves": 15,
    "min_data_in_leaf": 10,
    "feature_fraction": 0.4,
}


def fit(rows: Sequence[Row], seed: int, limits: DeviceLimits, schedule: Schedule | None = None) -> MatmulForm:
    """Fits to rows on whole GPUs and on shares of one."""
    device = constants_of(limits, "matmul", MatmulConstants)
    usual = constants_of(limits, "matmul", UsualRates)
    rows = [row for row in rows if row.split == FIT]  # those of `validation` say how far off it is
    whole = [row for row in rows if row.question.share == 1]
    products = of_questions([row.question for row in whole])
    groups = groups_of(products)
    beside = SmallKernels(fit_lines(whole, products), fit_curves(whole, products, usual.copied_bytes_per_ns))
    fitted = {}
    for group, name in enumerate(GROUPS):
        places = np.flatnonzero(groups == group)
        chosen = products.take(places)
        fitted[name] = _fit_group(
            group, [whole[index] for index in places], chosen, seed, schedule or Schedule(), device, usual
        )
    ensembles = [Ensemble(group, fitted[name], device.sms) for group, name in enumerate(GROUPS)]
    shares = _fit_shares([row for row in rows if row.question.share > 1], ensembles, device)
    return MatmulForm(beside, shares, fitted, device)


def main_log_ns(rows: Sequence[Row]) -> Floats:
    """ln of what is left of rows' times without copies."""
    copied = [
        sum(time for name, time in zip(row.kernel_names, row.kernel_ns, strict=True) if role(name) == COPY) for row in rows
    ]
    return np.log(np.maximum([row.time_ns for row in rows] - np.array(copied), 1.0)).astype(np.float32)


def _folds(rows: Sequence[Row]) -> Column:
    """Which fifth each row is in, by its call: cache states and settings of one call stay together."""
    texts = (row.question.call.to_json().encode() for row in rows)
    return np.array([int(hashlib.sha256(text).hexdigest()[8:14], 16) % FOLDS for text in texts])


def _fit_group(
    group: int,
    rows: Sequence[Row],
    products: Products,
    seed: int,
    schedule: Schedule,
    device: MatmulConstants,
    usual: UsualRates,
) -> FittedGroup:
    """One group's networks and the trees that correct what networks predict of rows they have not seen."""
    folds = _folds(rows)
    if len(set(folds)) < FOLDS:
        raise InputError(f"{len(rows)} measured products of the group {GROUPS[group]} are too few to be fitted on")
    inputs = inputs_of(products, group, NO_SHARES, device)
    names = [row.kernel_names for row in rows]
    targets = Targets(main_log_ns(rows), candidates(names, group), np.array([pattern_of(name) for name in names]))
    unseen, networks = np.empty((1 + len(PATTERNS), len(rows)), dtype=np.float32), []
    for fold in range(FOLDS):
        inner, outer = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        networks.append(train(group, inputs.take(inner), targets.take(inner), FOLDS * seed + fold, schedule, usual))
        asked = KernelMixture(group, networks[-1]).ask(inputs.take(outer))
        unseen[0, outer], unseen[1:, outer] = asked.log_ns, asked.launched
    # One network learns from the measured times and from the others' mean, which is smoother: better than from rows alone.
    mean = np.mean([KernelMixture(group, network).ask(inputs).log_ns for network in networks], axis=0)
    both = replace(targets, log_ns=((targets.log_ns + mean) / 2).astype(np.float32))
    networks.append(train(group, inputs, both, seed, schedule, usual, networks[0]))
    features = tree_features(inputs, Mixed(unseen[0], unseen[1:]))
    trees = grow_trees(features, targets.log_ns - unseen[0], seed=seed, rounds=schedule.trees, **_TREES)
    sizes = sizes_of(inputs)
    return FittedGroup(sizes.min(axis=1), sizes.max(axis=1), trees, dict(zip(NETWORKS, networks, strict=True)))


def _fit_shares(rows: Sequence[Row], ensembles: Sequence[Ensemble], device: MatmulConstants) -> ProductShares:
    if not rows:
        return NO_SHARES
    products = of_questions([row.question for row in rows])
    groups = groups_of(products)

    def predict(shares: ProductShares, places: Column) -> Column:
        result = np.empty(len(places))
        for group in np.unique(groups[places]):
            mine = groups[places] == group
            inputs = inputs_of(products.take(places[mine]), int(group), shares, device)
            result[mine] = ensembles[group].quick(inputs).log_ns
        return result

    return fit_shares(products.share, products.others, predict, main_log_ns(rows))
