"""The form of generated kernels: rates and costs by least squares on logarithms of times, trees on what they leave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import DeviceLimits
from steptime._models.engine.constants import constants_of
from steptime._models.engine.regression import Trees
from steptime._models.engine.stored import Floats
from steptime._models.kernels.forms.generated import MOST, RATES, GeneratedForm, physics_ns, ranged, seen
from steptime._models.kernels.forms.generated.numbers import AT, FUNCTIONS, RATED, GeneratedConstants, numbers_of
from steptime_lab.fit.engine import fitting_library
from steptime_lab.fit.engine.regression import grow_trees
from steptime_lab.measurements.kernels import Row

LEARNS_FROM_VALIDATION = True
# Where the fit begins. Shares of the peak bandwidth (caches have a multiple of it); atomic additions for an SM and ns;
# ns of a turn of a loop, SM ns of a load or store, ns of an empty kernel.
_RATES = {
    **{"read": 0.9, "write": 0.9, "cache": 2.0, "wasted_loads": 1.2, "wasted_stores": 0.6, "again": 6.0},
    **{"atomics": 0.75, "turn_ns": 500.0, "access_sm_ns": 0.013, "start_ns": 1300.0},
}
# Instructions of each group of functions, as compiled for a pointwise kernel, and SM ns of one.
_COSTS = {
    **{"plain": 1, "index": 4, "exp": 8, "div": 8, "erf": 20, "log": 10, "random": 60, "welford": 15, "online": 40},
    **{"scan": 40, "other": 10},
}
_INSTRUCTION_SM_NS = 1 / 224  # 128 lanes at 1.75 GHz: where the fit begins
_SHARPNESS = 2.5
# Logarithms beyond this count no more; those of parameters are drawn to where they begin, as a row drawn to its time.
_FAR, _CLOSE, _ROUNDS = 1.5, 0.15, 60
# Trees: chosen with every eighth graph left out.
_TREES, _SETTINGS = (
    700,
    {"learning_rate": 0.05, "num_leaves": 31, "max_depth": 10, "min_data_in_leaf": 10, "feature_fraction": 0.4},
)


def fit(rows: Sequence[Row], seed: int, limits: DeviceLimits) -> GeneratedForm:
    """Fits to all rows given."""
    device = constants_of(limits, "generated", GeneratedConstants)
    numbers = numbers_of([row.question.call for row in rows], device, [1.0] * len(rows))
    times = np.log([row.time_ns for row in rows])
    sharpness, rates, costs = _fit_rates(numbers, times, device)
    ranges = ranged(numbers)
    form = GeneratedForm(sharpness, rates, costs, Trees.constant(0.0), ranges.min(axis=0), ranges.max(axis=0), device)
    summed = form.base_ns(numbers, np.ones(len(rows)))
    left = np.clip(times - np.log(summed), -MOST, MOST)
    trees = grow_trees(seen(numbers, summed), left, None, seed, _TREES, **_SETTINGS)
    return GeneratedForm(sharpness, rates, costs, trees, form.low, form.high, device)


def _fit_rates(numbers: Floats, times: Floats, device: GeneratedConstants) -> tuple[float, Floats, Floats]:
    kinds = np.where(numbers[:, AT["kind"]] < len(RATED), numbers[:, AT["kind"]], 0).astype(int)
    start = np.log(
        [
            _SHARPNESS,
            *(_RATES[name] for _ in RATED for name in RATES),
            *(_INSTRUCTION_SM_NS * _COSTS[group] for group in FUNCTIONS),
        ]
    )
    ones = np.ones(len(times))

    def unpacked(values: Floats) -> tuple[float, Floats, Floats]:
        plain = np.exp(values)
        many = len(RATED) * len(RATES)
        return float(1.0 + plain[0]), plain[1 : 1 + many].reshape(len(RATED), -1), plain[1 + many :]

    def off(values: Floats) -> Floats:
        sharpness, rates, costs = unpacked(values)
        by_kind = dict(zip(RATES, rates[kinds].T, strict=True))
        summed = physics_ns(numbers, by_kind, costs, sharpness, device, ones)
        return np.concatenate([np.clip(np.log(summed) - times, -_FAR, _FAR), values - start])

    optimize = fitting_library("scipy.optimize")
    fitted: npt.NDArray[np.float64] = optimize.least_squares(off, start, loss="soft_l1", f_scale=_CLOSE, max_nfev=_ROUNDS).x
    return unpacked(fitted)
