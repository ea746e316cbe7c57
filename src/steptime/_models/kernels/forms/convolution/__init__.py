"""Convolutions: each pass of a call (output, gradients of input and weight, bias) by the book, times a learned ratio.

The book has what cuDNN can do for a pass: an implicit product in waves of tiles, with or without moving tensors to the other
order of memory, a plain product where filters are points, depthwise kernels by their multiply-adds. Which of them it takes, and
how far off the book is, trees and small networks have learned from measured rows: dense layers, grouped ones and parts of a GPU
apart. It is wrong most where cuDNN chooses an unlikely kernel (by four tenths and more for one call in ten), and so most often
where it chooses among ways to take one group after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.kernels.call import Call
from steptime._models.kernels.forms import Arrays
from steptime._models.kernels.forms.blend import Blend, Training, part, prefixed
from steptime._models.kernels.forms.convolution.features import Columns, Pass, crowd, table
from steptime._models.kernels.forms.convolution.layer import BIAS, FPROP, WGRAD, Layer, layer_of
from steptime._models.kernels.forms.convolution.passes import short_name, split, way
from steptime._models.kernels.forms.lists import Lists, Near
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._models.kernels.rows import Row
from steptime._units import dtype_bytes

Floats = npt.NDArray[np.float64]

# Where one pass belongs: which of the fitted blends answers for it.
_DENSE, _DEPTHWISE, _GROUPED, _BIAS, _PARTS = "dense", "depthwise", "grouped", "bias", "parts"
# All chosen on validation rows, of whole GPUs but for the last: absolute error, because a few calls take a path of their own.
_GROWN: dict[str, Any] = {"objective": "regression_l1", "max_depth": 12, "learning_rate": 0.1, "single": True}
_TRAINED = Training(width=128, steps=6000, rate=0.01, knee=0.02, batch=512)
_FEWER = replace(_TRAINED, steps=3000, batch=256)
_BLENDS: dict[str, dict[str, Any]] = {
    _DENSE: {**_GROWN, "num_leaves": 127, "rounds": 200, "networks": 3, "training": _TRAINED},
    _DEPTHWISE: {**_GROWN, "num_leaves": 31, "rounds": 150, "networks": 2, "training": _FEWER, "weight": 0.8},
    _GROUPED: {**_GROWN, "num_leaves": 31, "rounds": 150, "feature_fraction": 0.9, "networks": 0},
    _BIAS: {"rounds": 300, "num_leaves": 15, "networks": 0, "single": True},
    _PARTS: {"rounds": 150, "num_leaves": 4, "min_data_in_leaf": 30, "networks": 0, "single": True},
}
_GUESSED = (_DENSE, _GROUPED)  # where cuDNN has many ways and the likeliest one says more than a mean of them
_PART_SHARE = 0.5  # of what parts of a GPU were seen to add: their repeats scatter too much to believe it whole
_SLACK = 0.02  # how far beyond the fitted range a feature may lie, in shares of it, and still be inside

# Everything was chosen before; there are few rows.
LEARNS_FROM_VALIDATION = True


@lru_cache(maxsize=1 << 16)
def _layer(call: Call) -> Layer:
    return layer_of(call)


@dataclass(frozen=True)
class Convolution:
    """The fitted form."""

    blends: dict[str, Blend]
    lists: Lists
    low: Floats  # feature -> range of the fitted rows
    high: Floats

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches, pass by pass."""
        owners, passes = [], []
        for owner, question in enumerate(questions):
            layer = _layer(question.call)
            for name in _order(layer):
                owners.append(owner)
                passes.append(Pass(layer, name, question))
        launches: list[list[LaunchTime]] = [[] for _ in questions]
        inside = [not question.benchmark for question in questions]
        if not passes:
            return [Answer((), here) for here in inside]
        features, times, near = self.times_ns(passes)
        margin = _SLACK * (self.high - self.low)
        within: npt.NDArray[np.bool_] = np.all((features >= self.low - margin) & (features <= self.high + margin), axis=1)
        for place, (owner, one, time) in enumerate(zip(owners, passes, times, strict=True)):
            inside[owner] = inside[owner] and bool(within[place])
            names, shares = near.launches(place) if near.known[place] else ((one.name,), np.ones(1))
            launches[owner] += [LaunchTime(name, float(time * share)) for name, share in zip(names, shares, strict=True)]
        return [Answer(tuple(one), here) for one, here in zip(launches, inside, strict=True)]

    def times_ns(self, passes: Sequence[Pass]) -> tuple[Floats, Floats, Near]:
        """Features and times of passes, and the measured passes that lie near them."""
        columns = Columns(passes)
        features, base = table(columns)
        near = self.lists.nearest([_kind(one) for one in passes], _place(passes), _states(passes))
        ratios = _ratios(self.blends, passes, features, near)
        shared = columns.share > 1
        if _PARTS in self.blends and shared.any():
            ratios[shared] += _PART_SHARE * self.blends[_PARTS].values(crowd(columns, base)[shared])
        return features, base * np.exp(ratios), near

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same form from."""
        kept = {"low": self.low, "high": self.high, **prefixed(self.lists.arrays(), "lists")}
        for name, blend in self.blends.items():
            kept |= prefixed(blend.arrays(), name)
        return kept


def _ratios(blends: dict[str, Blend], passes: Sequence[Pass], features: Floats, near: Near) -> Floats:
    """Logarithm of how much longer each pass takes than by the book."""
    groups = np.asarray([_group(one) for one in passes])
    ratios = np.zeros(len(passes))
    for name in (_DENSE, _DEPTHWISE, _GROUPED, _BIAS):
        here = groups == name
        if name in blends and here.any():
            ratios[here] = blends[name].values(features[here])
    levels, belief = near.twins()
    belief *= near.known & np.asarray([one.question.share == 1 for one in passes])
    ratios += belief * (levels - ratios)
    return ratios


def _group(one: Pass) -> str:
    if one.name == BIAS:
        return _BIAS
    return _DEPTHWISE if one.layer.depthwise else _GROUPED if one.layer.groups > 1 else _DENSE


def _order(layer: Layer) -> tuple[str, ...]:
    """ATen's depthwise kernels give the weight's gradient first; they run where channels come first in memory."""
    if layer.depthwise and not layer.channels_last and WGRAD in layer.passes:
        return (WGRAD, *(name for name in layer.passes if name != WGRAD))
    return layer.passes


def _kind(one: Pass) -> str:
    """What has to agree for two passes to launch alike."""
    layer, question = one.layer, one.question
    precision = layer.dtype if layer.dtype != "float32" else "tf32" if question.tf32 else "fp32"
    order = "last" if layer.channels_last else "first"
    grouping = "depthwise" if layer.depthwise else "grouped" if layer.groups > 1 else "dense"
    point = "point" if math.prod(layer.taps) * math.prod(layer.stride) == 1 else "taps"
    return f"{one.name} {'forward' if FPROP in layer.passes else 'backward'} {precision} {order} {grouping} {point}"


def _place(passes: Sequence[Pass]) -> npt.NDArray[np.float32]:
    """Where a pass lies among those of its kind; what cuDNN's rules go by counts most."""
    return np.array([_coordinates(one.layer) for one in passes], dtype=np.float32).reshape(len(passes), -1)


def _states(passes: Sequence[Pass]) -> list[int]:
    """A pass is measured cold and warm, at one place."""
    return [int(one.question.warm) for one in passes]


@lru_cache(maxsize=1 << 16)
def _coordinates(layer: Layer) -> tuple[float, ...]:
    element = dtype_bytes(layer.dtype)
    aligned = tuple(3.0 * (channels * element % 16 == 0) for channels in (layer.inputs, layer.outputs))
    few = 3.0 * (layer.inputs <= 4)  # images of three colours are padded
    sizes = (layer.batch, layer.inputs, layer.outputs, math.prod(layer.image), 4 * math.prod(layer.taps) - 3)
    strided = 2.0 * (math.prod(layer.stride) > 1)
    # Filters and images that are not square, padding and dilation tell apart what is else of one size.
    shapes = (
        layer.taps[0] / layer.taps[1],
        layer.image[0] / layer.image[1],
        math.prod(layer.result),
        math.prod(layer.dilation),
    )
    fine = (0.3 * math.log(ratio) for ratio in shapes)
    return (*(math.log(size) for size in sizes), *aligned, few, strided, math.log(layer.groups), *fine)


def fit(rows: Sequence[Row], seed: int) -> Convolution:
    """Fits to measured convolutions."""
    passes, kernels, spans = [], [], []
    for row in sorted(rows, key=lambda row: row.question.share):
        layer = _layer(row.question.call)
        for name, places in split(row.kernel_names, layer).items():
            passes.append(Pass(layer, name, row.question))
            spans.append([row.kernel_ns[place] for place in places])
            kernels.append([short_name(row.kernel_names[place]) for place in places])
    columns = Columns(passes)
    features, base = table(columns)
    target = np.log(np.array([sum(times) for times in spans]) / base)
    shared = columns.share > 1  # they scatter five times as much: fitted apart
    ways = np.array([way(names, one.layer.groups) for names, one in zip(kernels, passes, strict=True)], dtype=int)
    blends = _fit_whole(passes, features, target, ways, ~shared, seed)
    kinds, places_of = [_kind(one) for one in passes], _place(passes)
    lists = Lists.fit(kinds, places_of, kernels, spans, target, _states(passes))
    if shared.any():
        known = _ratios(blends, passes, features, lists.nearest(kinds, places_of, _states(passes)))
        blends[_PARTS] = Blend.fit(crowd(columns, base)[shared], (target - known)[shared], seed, **_BLENDS[_PARTS])
    return Convolution(blends, lists, features.min(axis=0), features.max(axis=0))


def _fit_whole(
    passes: Sequence[Pass],
    features: Floats,
    target: Floats,
    ways: npt.NDArray[np.int_],
    whole: npt.NDArray[np.bool_],
    seed: int,
) -> dict[str, Blend]:
    """Blends for passes on the whole GPU."""
    groups = np.asarray([_group(one) for one in passes])
    blends = {}
    for name in (_DENSE, _DEPTHWISE, _GROUPED, _BIAS):
        here = whole & (groups == name)
        if here.any():
            told = ways[here] if name in _GUESSED else None
            blends[name] = Blend.fit(features[here], target[here], seed, ways=told, **_BLENDS[name])
    return blends


def load(arrays: Arrays) -> Convolution:
    """The form that `arrays` were taken from."""
    kept = {name: part(arrays, name) for name in _BLENDS}
    blends = {name: Blend.load(values) for name, values in kept.items() if values}
    return Convolution(blends, Lists.load(part(arrays, "lists")), arrays["low"], arrays["high"])
