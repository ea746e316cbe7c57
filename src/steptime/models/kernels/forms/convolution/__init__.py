"""Convolutions: each pass of a call (output, gradients of input and weight, bias) by the book, times a learned ratio.

The book has what cuDNN can do for a pass: an implicit product in waves of tiles, with or without moving tensors to the other
order of memory, a plain product where filters are points, depthwise kernels by their multiply-adds. Which of them it takes, and
how far off the book is, trees and small networks have learned from measured rows: dense layers, grouped ones and parts of a GPU
apart. It is wrong most where cuDNN chooses an unlikely kernel: by a third and more for one call in ten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.models.kernels.call import Call
from steptime.models.kernels.forms import Arrays
from steptime.models.kernels.forms.blend import Blend, part, prefixed
from steptime.models.kernels.forms.convolution.features import Columns, Pass, table
from steptime.models.kernels.forms.convolution.layer import BIAS, FPROP, WGRAD, Layer, layer_of
from steptime.models.kernels.forms.convolution.passes import short_name, split
from steptime.models.kernels.forms.lists import Lists
from steptime.models.kernels.question import Answer, LaunchTime, Question
from steptime.models.kernels.rows import Row
from steptime.units import dtype_bytes

Floats = npt.NDArray[np.float64]

# Where one pass belongs: which of the fitted blends answers for it.
_DENSE, _GROUPED, _BIAS, _PARTS = "dense", "grouped", "bias", "parts"
_BLENDS: dict[str, dict[str, Any]] = {
    _DENSE: {},
    _GROUPED: {"num_leaves": 15, "weight": 0.75},
    _BIAS: {"rounds": 150, "num_leaves": 8, "networks": 0},
    _PARTS: {"rounds": 150, "num_leaves": 15, "networks": 0},
}
_SLACK = 0.02  # how far beyond the fitted range a feature may lie, in shares of it, and still be inside


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
        features, times = self.times_ns(passes)
        margin = _SLACK * (self.high - self.low)
        within: npt.NDArray[np.bool_] = np.all((features >= self.low - margin) & (features <= self.high + margin), axis=1)
        lists = self.lists.nearest([_kind(one) for one in passes], _place(passes))
        for owner, one, time, near, known in zip(owners, passes, times, lists, within, strict=True):
            inside[owner] = inside[owner] and bool(known)
            names, shares = near or ((one.name,), np.ones(1))
            launches[owner] += [LaunchTime(name, float(time * share)) for name, share in zip(names, shares, strict=True)]
        return [Answer(tuple(one), here) for one, here in zip(launches, inside, strict=True)]

    def times_ns(self, passes: Sequence[Pass]) -> tuple[Floats, Floats]:
        """Features and times of passes."""
        columns = Columns(passes)
        features, base = table(columns)
        return features, base * np.exp(_ratios(self.blends, passes, features))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What `load` makes the same form from."""
        kept = {"low": self.low, "high": self.high, **prefixed(self.lists.arrays(), "lists")}
        for name, blend in self.blends.items():
            kept |= prefixed(blend.arrays(), name)
        return kept


def _ratios(blends: dict[str, Blend], passes: Sequence[Pass], features: Floats) -> Floats:
    """Logarithm of how much longer each pass takes than by the book."""
    groups = np.asarray([_group(one) for one in passes])
    ratios = np.zeros(len(passes))
    for name in (_DENSE, _GROUPED, _BIAS):
        here = groups == name
        if name in blends and here.any():
            ratios[here] = blends[name].values(features[here])
    shared = np.asarray([one.question.share > 1 for one in passes])
    if _PARTS in blends and shared.any():
        ratios[shared] += blends[_PARTS].values(np.column_stack([features, ratios])[shared])
    return ratios


def _group(one: Pass) -> str:
    return _BIAS if one.name == BIAS else _GROUPED if one.layer.groups > 1 else _DENSE


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


def _place(passes: Sequence[Pass]) -> Floats:
    """Where a pass lies among those of its kind; what cuDNN's rules go by counts most."""
    return np.array([_coordinates(one.layer) for one in passes], dtype=np.float64).reshape(len(passes), -1)


@lru_cache(maxsize=1 << 16)
def _coordinates(layer: Layer) -> tuple[float, ...]:
    element = dtype_bytes(layer.dtype)
    aligned = tuple(3.0 * (channels * element % 16 == 0) for channels in (layer.inputs, layer.outputs))
    few = 3.0 * (layer.inputs <= 4)  # images of three colours are padded
    sizes = (layer.batch, layer.inputs, layer.outputs, math.prod(layer.image), 4 * math.prod(layer.taps) - 3)
    strided = 2.0 * (math.prod(layer.stride) > 1)
    return (*(math.log(size) for size in sizes), *aligned, few, strided, math.log(layer.groups))


def fit(rows: Sequence[Row], seed: int) -> Convolution:
    """Fits to measured convolutions."""
    passes, times, kernels, spans = [], [], [], []
    for row in rows:
        layer = _layer(row.question.call)
        for name, places in split(row.kernel_names, layer).items():
            passes.append(Pass(layer, name, row.question))
            spans.append([row.kernel_ns[place] for place in places])
            kernels.append([short_name(row.kernel_names[place]) for place in places])
            times.append(sum(spans[-1]))
    features, base = table(Columns(passes))
    target = np.log(np.asarray(times) / base)
    groups = np.asarray([_group(one) for one in passes])
    shared = np.asarray([one.question.share > 1 for one in passes])  # scatter five times as much: fitted apart
    blends: dict[str, Blend] = {}
    for name in (_DENSE, _GROUPED, _BIAS):
        rows_here = (groups == name) & ~shared
        if rows_here.any():
            blends[name] = Blend.fit(features[rows_here], target[rows_here], seed, **_BLENDS[name])
    if shared.any():
        known = _ratios(blends, passes, features)
        both = np.column_stack([features, known])[shared]
        blends[_PARTS] = Blend.fit(both, target[shared] - known[shared], seed, **_BLENDS[_PARTS])
    lists = Lists.fit([_kind(one) for one in passes], _place(passes), kernels, spans)
    return Convolution(blends, lists, features.min(axis=0), features.max(axis=0))


def load(arrays: Arrays) -> Convolution:
    """The form that `arrays` were taken from."""
    kept = {name: part(arrays, name) for name in _BLENDS}
    blends = {name: Blend.load(values) for name, values in kept.items() if values}
    return Convolution(blends, Lists.load(part(arrays, "lists")), arrays["low"], arrays["high"])
