"""The form of convolutions: a blend per kind of layer that learns how far off the book is, and one for shares of a GPU.

Which of the kernels that a call launched belong to which of its passes is read off their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import DeviceLimits
from steptime._models.engine.constants import constants_of
from steptime._models.engine.regression import Blend, Choice
from steptime._models.kernels.forms import convolution as form
from steptime._models.kernels.forms.convolution.cores import (
    FIRST,
    GIVES_FIRST,
    LAST,
    PLAIN,
    code,
    conversions,
    core_features,
)
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
    layer_of,
    table,
)
from steptime_lab.fit.engine.regression import Training, fit_blend, fit_choice
from steptime_lab.fit.kernels.book import fit_lists, short_name
from steptime_lab.measurements.kernels import Row

# All chosen on validation rows, of whole GPUs but for the last: absolute error, because a few calls take a path of their own.
_GROWN: dict[str, Any] = {"objective": "regression_l1", "max_depth": 12, "learning_rate": 0.1, "single": True}
_TRAINED = Training(width=128, steps=6000, rate=0.01, knee=0.02, batch=512, epochs=230)
_FEWER = replace(_TRAINED, steps=3000, batch=256)
_BLENDS: dict[str, dict[str, Any]] = {
    form.DENSE: {**_GROWN, "num_leaves": 127, "rounds": 200, "networks": 3, "training": _TRAINED},
    form.DEPTHWISE: {**_GROWN, "num_leaves": 31, "rounds": 150, "networks": 2, "training": _FEWER, "weight": 0.8},
    form.GROUPED: {**_GROWN, "num_leaves": 63, "rounds": 200, "feature_fraction": 0.9, "networks": 0},
    form.BIASED: {"rounds": 300, "num_leaves": 15, "networks": 0, "single": True},
    form.PARTS: {"rounds": 150, "num_leaves": 4, "min_data_in_leaf": 30, "networks": 0, "single": True},
}
_LEAST_OF_CORE = 6  # rows that a core was seen in, to be taken for another's
_GUESSED = (form.DENSE, form.GROUPED)  # where cuDNN has many ways and the likeliest one says more than a mean of them
# Everything was chosen before; there are few rows.
LEARNS_FROM_VALIDATION = True


def fit(rows: Sequence[Row], seed: int, limits: DeviceLimits) -> form.ConvolutionForm:
    """Fits to measured convolutions."""
    device = constants_of(limits, "convolution", ConvolutionConstants)
    passes, kernels, spans = [], [], []
    for row in sorted(rows, key=lambda row: row.question.share):
        layer = layer_of(row.question.call)
        for name, places in passes_of(row.kernel_names, layer).items():
            passes.append(Pass(layer, name, row.question))
            spans.append([row.kernel_ns[index] for index in places])
            kernels.append([short_name(row.kernel_names[index]) for index in places])
    columns = PassColumns(passes, device)
    features, base = table(columns)
    target = np.log(np.array([sum(times) for times in spans]) / base)
    shared = columns.share > 1  # they scatter five times as much: fitted apart
    ways = np.array([way(names, item.layer.groups) for names, item in zip(kernels, passes, strict=True)], dtype=int)
    groups = np.asarray([form.blend_of(item) for item in passes])
    blends: dict[str, Blend] = {}
    for name in form.WHOLE:
        here = ~shared & (groups == name)
        if here.any():
            known_ways = ways[here] if name in _GUESSED else None
            blends[name] = fit_blend(features[here], target[here], seed, ways=known_ways, **_BLENDS[name])
    kinds, points, states = [form.kind_of(item) for item in passes], form.coordinates(passes), form.states_of(passes)
    lists = fit_lists(kinds, points, kernels, spans, target, states)
    if shared.any():
        known = form.ratios(blends, passes, features, lists.nearest(kinds, points, states))
        blends[form.PARTS] = fit_blend(crowd(columns, base)[shared], (target - known)[shared], seed, **_BLENDS[form.PARTS])
    cores = _fit_cores(passes, kernels, groups == form.DENSE, device, seed)
    return form.ConvolutionForm(lists, features.min(axis=0), features.max(axis=0), blends, cores, device)


def _fit_cores(
    passes: Sequence[Pass],
    kernels: Sequence[Sequence[str]],
    dense: npt.NDArray[np.bool_],
    device: ConvolutionConstants,
    seed: int,
) -> dict[str, Choice]:
    """Which core passes of dense layers take, by pass; of layers measured cold and warm once."""
    seen: dict[tuple[ConvolutionLayer, str, bool], int] = {}
    for place in np.flatnonzero(dense).tolist():
        seen.setdefault((replace(passes[place].layer, written=()), passes[place].name, passes[place].question.tf32), place)
    result = {}
    for name in (FPROP, DGRAD, WGRAD):
        places = [place for (_, own, _), place in seen.items() if own == name]
        codes = np.array([core_of(kernels[place], passes[place]) for place in places], dtype=int)
        usual = [code for code, count in zip(*np.unique(codes, return_counts=True), strict=True) if count >= _LEAST_OF_CORE]
        kept = np.flatnonzero(np.isin(codes, usual))
        if len(kept):
            features = core_features([passes[places[index]] for index in kept], device)
            result[name] = fit_choice(features, codes[kept], seed)
    return result


def core_of(short_names: Sequence[str], item: Pass) -> int:
    """What the core of a measured pass takes, and how many kernels are in it: all that bring nothing to it."""
    moves = [name for name in short_names if name in _MOVES]
    to_first, to_last = (any(each in name for name in moves) for each in ("ToNchw", "ToNhwc"))
    if item.layer.channels_last:
        layout = FIRST if to_first and to_last else LAST if moves else PLAIN
    else:
        layout = LAST if to_last and (to_first or item.name == WGRAD) else GIVES_FIRST if to_last else PLAIN
    return code(layout, len(short_names) - conversions(item.layer, item.name, layout))


# What a kernel does within its pass.
IN, OUT, BEFORE, TAIL, MAIN = "in", "out", "before", "tail", "main"
_CLEARING = "Memset"
# Kernels that bring tensors to a core and back.
_MOVES = ("nchwToNhwcKernel", "nhwcToNchwKernel", "foldedNhwcToNchwKernel", "nhwcAddPaddingKernel", "nchwAddPaddingKernel")

# What a kernel does, and parts of names that say so, in lower case and in the order they are looked for.
_ROLES = (
    (IN, ("addpadding",)),
    (OUT, ("slicec",)),
    (BEFORE, ("memset", "init_device_workspace", "scalepacked", "scaletensor", "flip_filter", "kernel_helper")),
    (
        TAIL,
        ("reduce_wgrad", "nhwc_reduce", "reducesplitk", "splitkreduce", "c2r", "winogradforwardoutput", "winogradwgradoutput"),
    ),
    (IN, ("tensortransformgeneric", "generictranspose", "converttensor", "r2c")),
    (IN, ("winogradforwarddata", "winogradforwardfilter", "winogradwgraddata", "winogradwgraddelta")),
)
# Ways of doing a pass, told by parts of its kernels' names in lower case, in the order they are looked for: transforms, direct
# sums, CUDA cores' implicit products, tensor cores' of three generations of code, plain products.
_WAYS = (
    ("winograd", "fft", "region_transform"),
    ("direct",),
    ("implicit_convolve", "common_engine", "alg0", "alg1", "dgrad_engine", "precomputed"),
    ("sm90_xmma",),
    ("cutlass_tensorop", "cutlass_implicit_gemm"),
    ("nvjet", "cutlass_80", "xmma_gemm"),
    ("sm80_xmma",),
)
_DIRECT = 1


def role(name: str, channels_last: bool) -> str:
    """What a kernel does: brings data in, does the work, reduces, brings data out."""
    text = name.lower()
    if "nchwtonhwc" in text or "nhwctonchw" in text:
        return OUT if ("nchwtonhwc" in text) == channels_last else IN
    return next((what for what, parts in _ROLES if any(part in text for part in parts)), MAIN)


def passes_of(names: Sequence[str], layer: ConvolutionLayer) -> dict[str, list[int]]:
    """Pass -> places of its kernels in the call's list; a pass that launched nothing of its own is not there."""
    places = list(range(len(names)))
    result = {}
    if BIAS in layer.passes and len(names) > 1 and _adds_bias(names[-1]):
        result[BIAS] = [places.pop()]
        if layer.backward and len(places) > 1 and names[places[-1]].startswith(_CLEARING):
            result[BIAS].insert(0, places.pop())  # of the counters that blocks of a sum share
    first = next((name for name in (FPROP, DGRAD) if name in layer.passes), WGRAD)
    if first == WGRAD or WGRAD not in layer.passes:
        return {first: places, **result}
    names = [names[index] for index in places]
    inputs, weights = (_named(names, parts) for parts in (("dgrad", "backward_kernel"), ("wgrad", "grad_weight")))
    if inputs and weights and max(weights) < min(inputs):  # ATen's own depthwise kernels
        return {WGRAD: places[: min(inputs)], first: places[min(inputs) :], **result}
    border = _border(names, [role(name, layer.channels_last) for name in names], inputs, weights)
    return {first: places[:border], WGRAD: places[border:], **result}


def _adds_bias(name: str) -> bool:
    return "at::native" in name and ("elementwise" in name or "reduce_kernel" in name)


def _named(names: Sequence[str], parts: tuple[str, ...]) -> list[int]:
    return [
        index
        for index, name in enumerate(names)
        if any(part in name.lower() for part in parts) and role(name, channels_last=False) != TAIL
    ]


def _border(names: Sequence[str], roles: Sequence[str], inputs: list[int], weights: list[int]) -> int:
    """Where the gradient of the weight begins: after the input's work, its reductions and its way out."""
    mains = [index for index, what in enumerate(roles) if what == MAIN]
    transformed = [index for index, name in enumerate(names) if "c2r" in name or "winograd" in name.lower()]
    if inputs:
        border = max(inputs) + 1
    elif weights:
        earlier = [index for index in mains if index < min(weights)]
        border = max(earlier) + 1 if earlier else min(weights)
    elif transformed and roles[transformed[-1]] == TAIL:
        border = next(index for index in transformed if roles[index] == TAIL) + 1
    else:
        border = mains[0] + 1 if mains else 1
    ahead = [index for index in (*weights, *mains) if index >= border]
    end = min(ahead, default=len(names))
    while border < end and roles[border] in (TAIL, OUT):
        border += 1
    return border


def way(short_names: Sequence[str], groups: int) -> int:
    """Which way a pass went: one of `_WAYS` or none of them, and whether it was taken for one group after the other."""
    text = " ".join(short_names).lower()
    result = next((index for index, parts in enumerate(_WAYS) if any(part in text for part in parts)), len(_WAYS))
    if groups == 1:
        return result
    mains = [name for name in short_names if role(name, channels_last=False) == MAIN]
    if len(mains) > len(set(mains)):
        return len(_WAYS) + 1 + result
    return result if result == _DIRECT else len(_WAYS)  # the rest are few: one way
