"""Which of the kernels that a convolution call launched belong to which of its passes; read off their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from steptime._models.kernels.forms.convolution.layer import BIAS, DGRAD, FPROP, WGRAD, ConvolutionLayer

# What a kernel does within its pass.
IN, OUT, BEFORE, TAIL, MAIN = "in", "out", "before", "tail", "main"

# Parts of names, in lower case, in the order they are looked for.
_BEFORE = ("memset", "init_device_workspace", "scalepacked", "scaletensor", "flip_filter", "kernel_helper")
_TRANSFORMS = (
    "tensortransformgeneric",
    "generictranspose",
    "converttensor",
    "r2c",
    "winogradforwarddata",
    "winogradforwardfilter",
)
_TAILS = ("reduce_wgrad", "nhwc_reduce", "reducesplitk", "splitkreduce", "c2r", "winogradforwardoutput", "winogradwgradoutput")
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
    if "addpadding" in text:
        return IN
    if "slicec" in text:
        return OUT
    if any(part in text for part in _BEFORE):
        return BEFORE
    if any(part in text for part in _TAILS):
        return TAIL
    return IN if any(part in text for part in (*_TRANSFORMS, "winogradwgraddata", "winogradwgraddelta")) else MAIN


def split(names: Sequence[str], layer: ConvolutionLayer) -> dict[str, list[int]]:
    """Pass -> places of its kernels in the call's list; a pass that launched nothing of its own is not there."""
    places = list(range(len(names)))
    result = {}
    if BIAS in layer.passes and len(names) > 1 and _adds_bias(names[-1]):
        result[BIAS] = [places.pop()]
    if FPROP in layer.passes:
        return {FPROP: places, **result}
    both = DGRAD in layer.passes and WGRAD in layer.passes
    if not both:
        return {DGRAD if DGRAD in layer.passes else WGRAD: places, **result}
    names = [names[index] for index in places]
    inputs, weights = (_named(names, parts) for parts in (("dgrad", "backward_kernel"), ("wgrad", "grad_weight")))
    if inputs and weights and max(weights) < min(inputs):  # ATen's own depthwise kernels
        return {WGRAD: places[: min(inputs)], DGRAD: places[min(inputs) :], **result}
    border = _border(names, [role(name, layer.channels_last) for name in names], inputs, weights)
    return {DGRAD: places[:border], WGRAD: places[border:], **result}


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


def short_name(name: str) -> str:
    """A kernel's name cut to what tells code apart: no arguments, no template, no tile."""
    text = name.removeprefix("void ")
    if match := re.match(r"(sm\d+_xmma_[a-z]+)", text):
        return match.group(1)
    if match := re.match(r"(nvjet_sm\d+)", text):
        return match.group(1)
    if match := re.search(r"<(cutlass_\w+?)_\d+x\d+", text):
        return match.group(1)
    if text.startswith("_ZN"):
        return "cutlass_implicit_gemm"
    return re.sub(r"[<(].*", "", text.replace("(anonymous namespace)::", "")).split("::")[-1].strip()


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
