"""The form of convolutions: a blend per kind of layer that learns how far off the book is, and one for shares of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import DeviceLimits
from steptime._models.engine.blend import Blend
from steptime._models.engine.constants import constants_of
from steptime._models.engine.stored import Floats
from steptime._models.kernels.forms.convolution import (
    BIASED,
    DENSE,
    DEPTHWISE,
    GROUPED,
    PARTS,
    WHOLE,
    ConvolutionForm,
    blend_of,
    coordinates,
    kind_of,
    layer_of_call,
    ratios,
    states_of,
)
from steptime._models.kernels.forms.convolution.features import ConvolutionConstants, Pass, PassColumns, crowd, table
from steptime_lab.fit.engine.blend import Training, fit_blend
from steptime_lab.fit.kernels.convolution_passes import short_name, split, way
from steptime_lab.fit.kernels.launch_lists import fit_lists
from steptime_lab.measurements.kernels import Row

# All chosen on validation rows, of whole GPUs but for the last: absolute error, because a few calls take a path of their own.
_GROWN: dict[str, Any] = {"objective": "regression_l1", "max_depth": 12, "learning_rate": 0.1, "single": True}
_TRAINED = Training(width=128, steps=6000, rate=0.01, knee=0.02, batch=512)
_FEWER = replace(_TRAINED, steps=3000, batch=256)
_BLENDS: dict[str, dict[str, Any]] = {
    DENSE: {**_GROWN, "num_leaves": 127, "rounds": 200, "networks": 3, "training": _TRAINED},
    DEPTHWISE: {**_GROWN, "num_leaves": 31, "rounds": 150, "networks": 2, "training": _FEWER, "weight": 0.8},
    GROUPED: {**_GROWN, "num_leaves": 31, "rounds": 150, "feature_fraction": 0.9, "networks": 0},
    BIASED: {"rounds": 300, "num_leaves": 15, "networks": 0, "single": True},
    PARTS: {"rounds": 150, "num_leaves": 4, "min_data_in_leaf": 30, "networks": 0, "single": True},
}
_GUESSED = (DENSE, GROUPED)  # where cuDNN has many ways and the likeliest one says more than a mean of them
# Everything was chosen before; there are few rows.
LEARNS_FROM_VALIDATION = True


def fit(rows: Sequence[Row], seed: int, limits: DeviceLimits) -> ConvolutionForm:
    """Fits to measured convolutions."""
    device = constants_of(limits, "convolution", ConvolutionConstants)
    passes, kernels, spans = [], [], []
    for row in sorted(rows, key=lambda row: row.question.share):
        layer = layer_of_call(row.question.call)
        for name, places in split(row.kernel_names, layer).items():
            passes.append(Pass(layer, name, row.question))
            spans.append([row.kernel_ns[index] for index in places])
            kernels.append([short_name(row.kernel_names[index]) for index in places])
    columns = PassColumns(passes, device)
    features, base = table(columns)
    target = np.log(np.array([sum(times) for times in spans]) / base)
    shared = columns.share > 1  # they scatter five times as much: fitted apart
    ways = np.array([way(names, item.layer.groups) for names, item in zip(kernels, passes, strict=True)], dtype=int)
    blends = _fit_whole(passes, features, target, ways, ~shared, seed)
    kinds, points, states = [kind_of(item) for item in passes], coordinates(passes), states_of(passes)
    lists = fit_lists(kinds, points, kernels, spans, target, states)
    if shared.any():
        known = ratios(blends, passes, features, lists.nearest(kinds, points, states))
        blends[PARTS] = fit_blend(crowd(columns, base)[shared], (target - known)[shared], seed, **_BLENDS[PARTS])
    return ConvolutionForm(lists, features.min(axis=0), features.max(axis=0), blends, device)


def _fit_whole(
    passes: Sequence[Pass],
    features: Floats,
    target: Floats,
    ways: npt.NDArray[np.int_],
    whole: npt.NDArray[np.bool_],
    seed: int,
) -> dict[str, Blend]:
    """Blends for passes on the whole GPU."""
    groups = np.asarray([blend_of(item) for item in passes])
    blends = {}
    for name in WHOLE:
        here = whole & (groups == name)
        if here.any():
            told = ways[here] if name in _GUESSED else None
            blends[name] = fit_blend(features[here], target[here], seed, ways=told, **_BLENDS[name])
    return blends
