"""Convolutions: each pass of a call (output, gradients of input and weight, bias) by the book, times a learned ratio.

The book has what cuDNN can do for a pass: an implicit product in waves of tiles, with or without moving tensors to the other
order of memory, a plain product where filters are points, depthwise kernels by their multiply-adds. Which of them it takes, and
how far off the book is, trees and small networks have learned from measured rows: dense layers, grouped ones and parts of a GPU
apart. A pass launches what the nearest measured one with as many kernels did; `cores` says how many. The form is wrong most
where cuDNN chooses an unlikely kernel (by four tenths and more for one call in ten), and so most often where it chooses among
ways to take one group after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from steptime._models.engine.constants import reference_constants
from steptime._models.engine.regression import Blend, Choice
from steptime._models.engine.stored import Floats, stored
from steptime._models.kernels.forms.convolution.cores import core_features, launched, sum_of_bias
from steptime._models.kernels.forms.convolution.passes import (
    BIAS,
    DGRAD,
    FPROP,
    WGRAD,
    ConvolutionConstants,
    ConvolutionLayer,
    Pass,
    PassColumns,
    crowd,
    goes_forward,
    layer_of,
    table,
)
from steptime._models.kernels.forms.lists import Ints, Lists, Near, inside_of
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._units import dtype_bytes

# Where one pass belongs: which of the fitted blends answers for it.
BLENDS = DENSE, DEPTHWISE, GROUPED, BIASED, PARTS = "dense", "depthwise", "grouped", "bias", "parts"
WHOLE = (DENSE, DEPTHWISE, GROUPED, BIASED)
_OWN_DEPTHWISE = "conv_depthwise"  # how the names of ATen's own kernels begin
_SAME = 1e-3  # how near a measured pass lies that is the very same
_PART_SHARE = 0.5  # of what parts of a GPU were seen to add: their repeats scatter too much to believe it whole


@dataclass(frozen=True)
class ConvolutionForm:
    """The fitted form."""

    lists: Lists
    low: Floats  # feature -> range of the fitted rows
    high: Floats
    blends: dict[str, Blend] = field(metadata=stored(prefix="", names=BLENDS))
    cores: dict[str, Choice] = field(metadata=stored(names=(FPROP, DGRAD, WGRAD)))  # of dense layers, by pass
    device: ConvolutionConstants = field(default_factory=partial(reference_constants, "convolution", ConvolutionConstants))

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """What each question's call launches, pass by pass."""
        owners, passes = [], []
        for owner, question in enumerate(questions):
            layer = layer_of(question.call)
            for name in _order(layer):
                owners.append(owner)
                passes.append(Pass(layer, name, question))
        launches: list[list[LaunchTime]] = [[] for _ in questions]
        inside = [not question.benchmark for question in questions]
        if not passes:
            return [Answer((), here) for here in inside]
        features, times, near = self.times_ns(passes)
        within = inside_of(features, self.low, self.high)
        listed = self.lists.nearest([kind_of(item) for item in passes], coordinates(passes), counts=self.counts(passes, near))
        for index, (owner, time) in enumerate(zip(owners, times, strict=True)):
            inside[owner] = inside[owner] and bool(within[index])
            if not adds_bias_itself(passes[index], launches[owner]):
                launches[owner] += listed.launches(index, time, passes[index].name)
        return [Answer(tuple(launch), here) for launch, here in zip(launches, inside, strict=True)]

    def times_ns(self, passes: Sequence[Pass]) -> tuple[Floats, Floats, Near]:
        """Features and times of passes, and the measured passes that lie near them."""
        columns = PassColumns(passes, self.device)
        features, base = table(columns)
        near = self.lists.nearest([kind_of(item) for item in passes], coordinates(passes), states_of(passes))
        learned = ratios(self.blends, passes, features, near)
        shared = columns.share > 1
        if PARTS in self.blends and shared.any():
            learned[shared] += _PART_SHARE * self.blends[PARTS].values(crowd(columns, base)[shared])
        return features, base * np.exp(learned), near

    def counts(self, passes: Sequence[Pass], near: Near) -> Ints:
        """How many kernels each pass launches, by rules and the likeliest core; of measured ones what was seen. 0: not told."""
        counts = np.zeros(len(passes), dtype=int)
        for name, choice in self.cores.items():
            here = [place for place, item in enumerate(passes) if item.name == name and blend_of(item) == DENSE]
            if here:
                found = choice.likeliest(core_features([passes[place] for place in here], self.device)).tolist()
                counts[here] = [launched(passes[place].layer, name, core) for place, core in zip(here, found, strict=True)]
        for place, item in enumerate(passes):
            if item.name == BIAS and item.layer.backward:
                counts[place] = sum_of_bias(item, self.device)
        same = near.known & (near.distances < _SAME)
        counts[same] = self.lists.share_counts[near.nearest[same]]
        return counts


def ratios(blends: dict[str, Blend], passes: Sequence[Pass], features: Floats, near: Near) -> Floats:
    """Logarithm of how much longer each pass takes than by the book."""
    groups = np.asarray([blend_of(item) for item in passes])
    learned = np.zeros(len(passes))
    for name in WHOLE:
        here = groups == name
        if name in blends and here.any():
            learned[here] = blends[name].values(features[here])
    levels, belief = near.twins()
    belief *= near.known & np.asarray([item.question.share == 1 for item in passes])
    learned += belief * (levels - learned)
    return learned


def blend_of(item: Pass) -> str:
    """The blend that answers for a pass on a whole GPU."""
    if item.name == BIAS:
        return BIASED
    return DEPTHWISE if item.layer.depthwise else GROUPED if item.layer.groups > 1 else DENSE


def _order(layer: ConvolutionLayer) -> tuple[str, ...]:
    """ATen's depthwise kernels give the weight's gradient first; they run where channels come first in memory."""
    if layer.depthwise and not layer.channels_last and WGRAD in layer.passes:
        return (WGRAD, *(name for name in layer.passes if name != WGRAD))
    return layer.passes


def adds_bias_itself(item: Pass, before: Sequence[LaunchTime]) -> bool:
    """Whether a pass is the bias of an output that a depthwise kernel of ATen gave: it has added the bias already."""
    return item.name == BIAS and not item.layer.backward and any(launch.kernel.startswith(_OWN_DEPTHWISE) for launch in before)


def kind_of(item: Pass) -> str:
    """What has to agree for two passes to launch alike."""
    layer, question = item.layer, item.question
    precision = layer.dtype if layer.dtype != "float32" else "tf32" if question.tf32 else "fp32"
    order = "last" if layer.channels_last else "first"
    grouping = "depthwise" if layer.depthwise else "even" if layer.even else "grouped" if layer.groups > 1 else "dense"
    point = "point" if math.prod(layer.taps) * math.prod(layer.stride) == 1 else "taps"
    return f"{item.name} {'forward' if goes_forward(layer, item.name) else 'backward'} {precision} {order} {grouping} {point}"


def coordinates(passes: Sequence[Pass]) -> npt.NDArray[np.float32]:
    """Where a pass lies among those of its kind; what cuDNN's rules go by counts most."""
    return np.array([_point(item.layer) for item in passes], dtype=np.float32).reshape(len(passes), -1)


def states_of(passes: Sequence[Pass]) -> list[int]:
    """A pass is measured cold and warm, at one place."""
    return [int(item.question.warm) for item in passes]


@lru_cache(maxsize=1 << 16)
def _point(layer: ConvolutionLayer) -> tuple[float, ...]:
    """Weights were chosen so that the nearest measured pass of another layer launches as many kernels as often as can be."""
    element, pixels = dtype_bytes(layer.dtype), layer.batch * math.prod(layer.result)
    of_group = layer.inputs // layer.groups
    aligned = (
        *(3.0 * (layer.inputs * element % 16 == 0), 6.0 * (layer.outputs * element % 16 == 0), 2.0 * (layer.inputs % 4 == 0)),
        *(3.0 * (of_group * element % 16 == 0), 2.0 * (layer.outputs // layer.groups * element % 16 == 0)),
        0.3 * (math.prod(layer.result) * element % 16 == 0),
    )
    few = 3.0 * (layer.inputs <= 4)  # images of three colours are padded
    strided = 2.0 * (math.prod(layer.stride) > 1)
    sizes = (
        *((1.0, layer.batch), (2.0, layer.inputs), (1.0, layer.outputs), (2.0, 4 * math.prod(layer.taps) - 3)),
        *((4.0, layer.groups), (0.3, pixels), (0.6, pixels * layer.outputs * of_group * math.prod(layer.taps))),
        # Filters and images that are not square, padding and dilation tell apart what is else of one size.
        *((0.3, layer.taps[0] / layer.taps[1]), (0.1, layer.image[0] / layer.image[1]), (0.2, math.prod(layer.image))),
        *((0.3, math.prod(layer.result)), (0.6, math.prod(layer.dilation))),
    )
    return (*(weight * math.log(size) for weight, size in sizes), *aligned, few, strided)


FORM = ConvolutionForm
