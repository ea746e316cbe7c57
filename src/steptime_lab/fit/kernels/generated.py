"""The form of generated kernels: rates and costs by least squares on logarithms of times, a blend on what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import DeviceLimits
from steptime._models.engine.constants import constants_of
from steptime._models.engine.regression import Blend, Trees
from steptime._models.engine.stored import Floats
from steptime._models.kernels.forms.generated import MOST, RATES, GeneratedForm, parts_ns, ranged, rated, summed_ns
from steptime._models.kernels.forms.generated.numbers import FUNCTIONS, RATED, GeneratedConstants, numbers_of
from steptime_lab.fit.engine import fitting_library
from steptime_lab.fit.engine.regression import Training, fit_blend
from steptime_lab.measurements.kernels import Row

LEARNS_FROM_VALIDATION = True
# Where the fit begins. Shares of the peak bandwidth (caches have a multiple of it); atomic additions for an SM and ns;
# ns of a turn of a loop and of a reduction in it, SM ns of a load or store, of an instruction of a warp, of a block; ns of an
# empty kernel.
_RATES = {
    **{"read": 0.9, "write": 0.9, "cache": 2.0, "stores": 1.5, "scattered": 1.0, "sm": 0.06, "atomics": 0.75},
    **{"turn_ns": 400.0, "reduce_ns": 50.0, "access_sm_ns": 0.013, "instruction_sm_ns": 0.6, "start_ns": 1300.0},
    **{"block_sm_ns": 20.0},
}
# Instructions of each group of functions, as compiled for a pointwise kernel, and SM ns of one.
_COSTS = {
    **{"plain": 1, "index": 4, "exp": 8, "div": 8, "erf": 20, "log": 10, "random": 60, "welford": 15, "online": 40},
    **{"scan": 40, "other": 10},
}
_INSTRUCTION_SM_NS = 1 / 224  # 128 lanes at 1.75 GHz: where the fit begins
_SHARPNESS = 3.0
# Logarithms beyond this count no more; those of parameters are drawn to where they begin, as a row drawn to its time.
_FAR, _CLOSE, _ROUNDS = 1.5, 0.15, 40
# Chosen with whole graphs, and all graphs of a kind of network together, left out.
_TREES = {
    **{"rounds": 700, "learning_rate": 0.05, "num_leaves": 31, "max_depth": 10, "min_data_in_leaf": 10},
    **{"objective": "regression_l1", "feature_fraction": 0.4},
}
_NETWORKS, _WEIGHT, _TRAINING = 4, 0.6, Training(width=96, steps=2000, batch=1024, dropout=0.15)


def fit(rows: Sequence[Row], seed: int, limits: DeviceLimits) -> GeneratedForm:
    """Fits to all rows given."""
    device = constants_of(limits, "generated", GeneratedConstants)
    numbers = numbers_of([row.question.call for row in rows], device, [1.0] * len(rows))
    times = np.log([row.time_ns for row in rows])
    rates = _fit_rates(numbers, times, device)
    ranges = ranged(numbers)
    nothing = Blend((Trees.constant(0.0),), None)
    form = GeneratedForm(*rates, nothing, ranges.min(axis=0), ranges.max(axis=0), device)
    summed = form.base_ns(numbers, np.ones(len(rows)))
    left = np.clip(times - np.log(summed), -MOST, MOST)
    seen = form.seen(numbers, summed)
    settings: dict[str, Any] = {"networks": _NETWORKS, "weight": _WEIGHT, "training": _TRAINING, "single": True, **_TREES}
    return replace(form, correction=fit_blend(seen, left, seed, **settings))


def _fit_rates(numbers: Floats, times: Floats, device: GeneratedConstants) -> tuple[float, Floats, Floats]:
    kinds = rated(numbers)
    start = np.log(
        [
            _SHARPNESS - 1.0,
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
        summed = summed_ns(parts_ns(numbers, by_kind, costs, device, ones), sharpness)
        return np.concatenate([np.clip(np.log(summed) - times, -_FAR, _FAR), values - start])

    optimize = fitting_library("scipy.optimize")
    fitted: npt.NDArray[np.float64] = optimize.least_squares(off, start, loss="soft_l1", f_scale=_CLOSE, max_nfev=_ROUNDS).x
    return unpacked(fitted)
