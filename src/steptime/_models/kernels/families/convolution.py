"""Convolution in one and two dimensions, forward and backward: dense, grouped, depthwise, strided, dilated, channels last."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import (
    USUAL_BYTES,
    Draw,
    Rng,
    Shape,
    chance,
    channels_last,
    fits,
    floating,
    log_int,
    mixture,
    pick,
    size,
)
from steptime._models.kernels.family import Family

# About 3 ms on an H200 at half of what matrix products reach.
_MOST_FLOP = {"float32": 60e9, "bfloat16": 6e11, "float16": 6e11}

# Layers as (inputs, outputs, kernel, stride, padding, groups, side of the input).
# ResNet-50 (and its 3x3 stride-2 variant, torchvision's), 224 pixels.
_RESNET = (
    (3, 64, (7, 7), 2, (3, 3), 1, 224),
    *((64, 64, (1, 1), 1, (0, 0), 1, 56), (64, 64, (3, 3), 1, (1, 1), 1, 56), (64, 256, (1, 1), 1, (0, 0), 1, 56)),
    *((256, 64, (1, 1), 1, (0, 0), 1, 56), (256, 128, (1, 1), 1, (0, 0), 1, 56), (128, 128, (3, 3), 2, (1, 1), 1, 56)),
    *((256, 512, (1, 1), 2, (0, 0), 1, 56), (512, 128, (1, 1), 1, (0, 0), 1, 28), (128, 128, (3, 3), 1, (1, 1), 1, 28)),
    *((512, 256, (1, 1), 1, (0, 0), 1, 28), (256, 256, (3, 3), 2, (1, 1), 1, 28), (512, 1024, (1, 1), 2, (0, 0), 1, 28)),
    *((1024, 256, (1, 1), 1, (0, 0), 1, 14), (256, 256, (3, 3), 1, (1, 1), 1, 14), (256, 1024, (1, 1), 1, (0, 0), 1, 14)),
    *((1024, 512, (1, 1), 1, (0, 0), 1, 14), (512, 512, (3, 3), 2, (1, 1), 1, 14), (1024, 2048, (1, 1), 2, (0, 0), 1, 14)),
    *((2048, 512, (1, 1), 1, (0, 0), 1, 7), (512, 512, (3, 3), 1, (1, 1), 1, 7), (512, 2048, (1, 1), 1, (0, 0), 1, 7)),
)
# Inception-v3, 299 pixels: the stem and one layer of each kind of block.
_INCEPTION = (
    *((3, 32, (3, 3), 2, (0, 0), 1, 299), (32, 32, (3, 3), 1, (0, 0), 1, 149), (32, 64, (3, 3), 1, (1, 1), 1, 147)),
    *((64, 80, (1, 1), 1, (0, 0), 1, 73), (80, 192, (3, 3), 1, (0, 0), 1, 73), (192, 64, (1, 1), 1, (0, 0), 1, 35)),
    *((48, 64, (5, 5), 1, (2, 2), 1, 35), (64, 96, (3, 3), 1, (1, 1), 1, 35), (288, 384, (3, 3), 2, (0, 0), 1, 35)),
    *((768, 128, (1, 1), 1, (0, 0), 1, 17), (128, 128, (1, 7), 1, (0, 3), 1, 17), (128, 192, (7, 1), 1, (3, 0), 1, 17)),
    *((160, 160, (7, 1), 1, (3, 0), 1, 17), (192, 192, (1, 7), 1, (0, 3), 1, 17), (192, 320, (3, 3), 2, (0, 0), 1, 17)),
    *((1280, 320, (1, 1), 1, (0, 0), 1, 8), (1280, 448, (1, 1), 1, (0, 0), 1, 8), (448, 384, (3, 3), 1, (1, 1), 1, 8)),
    *((384, 384, (1, 3), 1, (0, 1), 1, 8), (384, 384, (3, 1), 1, (1, 0), 1, 8), (2048, 192, (1, 1), 1, (0, 0), 1, 8)),
)
_NAMED = _RESNET + _INCEPTION


@dataclass(frozen=True)
class _Layer:
    batch: int
    inputs: int
    outputs: int
    kernel: Shape
    image: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int
    dtype: str

    @property
    def result(self) -> Shape:
        axes = zip(self.image, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((length + 2 * pad - gap * (tap - 1) - 1) // step + 1 for length, tap, step, pad, gap in axes)

    @property
    def affordable(self) -> bool:
        if min(self.result) < 1:
            return False
        pixels = self.batch * math.prod(self.result)
        flop = 2.0 * pixels * self.outputs * (self.inputs // self.groups) * math.prod(self.kernel)
        most = 4 * max(self.batch * self.inputs * math.prod(self.image), pixels * self.outputs)
        return flop <= _MOST_FLOP[self.dtype] and most <= USUAL_BYTES


def _named(rng: Rng) -> _Layer:
    inputs, outputs, kernel, stride, padding, groups, side = pick(rng, _NAMED)
    batch = pick(rng, (8, 16, 32, 64, 128)) if chance(rng, 0.6) else log_int(rng, 1, 256)
    return _Layer(batch, inputs, outputs, kernel, (side, side), (stride, stride), padding, (1, 1), groups, floating(rng))


def _square(rng: Rng) -> _Layer:
    tap, side = pick(rng, (1, 1, 3, 3, 3, 5, 7)), log_int(rng, 7, 224)
    dilation = pick(rng, (1, 2, 4), (0.85, 0.1, 0.05))
    groups = pick(rng, (1, 2, 4, 8, 32), (0.8, 0.05, 0.05, 0.05, 0.05))
    inputs, outputs = (groups * max(1, size(rng, 4, 1024) // groups) for _ in range(2))
    stride, padding = pick(rng, (1, 2), (0.75, 0.25)), dilation * (tap // 2)
    return _Layer(
        *(log_int(rng, 1, 128), inputs, outputs, (tap, tap), (side, side), (stride, stride), (padding, padding)),
        *((dilation, dilation), groups, floating(rng)),
    )


def _depthwise(rng: Rng) -> _Layer:
    tap, side, channels = pick(rng, (3, 3, 5, 7)), pick(rng, (7, 14, 28, 56, 112)), size(rng, 16, 1280)
    stride = pick(rng, (1, 2), (0.7, 0.3))
    return _Layer(
        *(log_int(rng, 1, 128), channels, channels, (tap, tap), (side, side), (stride, stride), (tap // 2, tap // 2)),
        *((1, 1), channels, floating(rng)),
    )


def _line(rng: Rng) -> _Layer:
    """One-dimensional: speech encoders, temporal stacks, pointwise and grouped layers over sequences."""
    tap, dilation = pick(rng, (1, 2, 3, 3, 5, 7, 10)), pick(rng, (1, 2, 4, 8), (0.7, 0.1, 0.1, 0.1))
    groups = pick(rng, (1, 4, 16), (0.8, 0.1, 0.1))
    inputs, outputs = (groups * max(1, size(rng, 8, 1024) // groups) for _ in range(2))
    stride = pick(rng, (1, 2, 5), (0.75, 0.2, 0.05))
    return _Layer(
        *(log_int(rng, 1, 128), inputs, outputs, (tap,), (log_int(rng, 32, 16384),), (stride,), (dilation * (tap // 2),)),
        *((dilation,), groups, floating(rng)),
    )


def _any(rng: Rng) -> _Layer:
    return pick(rng, (_named, _square, _depthwise, _line), (0.5, 0.2, 0.12, 0.18))(rng)


def _tensors(rng: Rng, layer: _Layer) -> tuple[TensorArg, TensorArg, TensorArg]:
    """Input, weight and output, all three in the same order of memory."""
    x = (layer.batch, layer.inputs, *layer.image)
    weight = (layer.outputs, layer.inputs // layer.groups, *layer.kernel)
    y = (layer.batch, layer.outputs, *layer.result)
    if len(layer.kernel) == 2 and chance(rng, 0.4):
        return channels_last(x, layer.dtype), channels_last(weight, layer.dtype), channels_last(y, layer.dtype)
    return TensorArg(x, layer.dtype), TensorArg(weight, layer.dtype), TensorArg(y, layer.dtype)


def _forward(rng: Rng) -> Call | None:
    layer = _any(rng)
    if not layer.affordable:
        return None
    x, weight, y = _tensors(rng, layer)
    bias = TensorArg((layer.outputs,), layer.dtype) if chance(rng, 0.3) else None
    no_output_padding = (0,) * len(layer.kernel)
    geometry = (layer.stride, layer.padding, layer.dilation, False, no_output_padding, layer.groups)
    return fits(Call("aten::convolution.default", (x, weight, bias, *geometry)), (y.shape, layer.dtype))


def _backward(rng: Rng) -> Call | None:
    layer = _any(rng)
    if not layer.affordable:
        return None
    x, weight, y = _tensors(rng, layer)
    biased = chance(rng, 0.3)
    # A network's first layer asks for no gradient of its input.
    asked = (layer.inputs != 3, True, biased)
    no_output_padding = (0,) * len(layer.kernel)
    geometry = (layer.stride, layer.padding, layer.dilation, False, no_output_padding, layer.groups)
    bias_shape = (layer.outputs,) if biased else None
    return fits(Call("aten::convolution_backward.default", (y, x, weight, bias_shape, *geometry, asked)))


_DRAWS: tuple[tuple[float, Draw], ...] = ((1, _forward), (1, _backward))

FAMILY = Family(
    name="convolution",
    form="convolution",
    ops=("aten::convolution.default", "aten::convolution_backward.default"),
    sweep=mixture(*_DRAWS),
    weight=7.0,  # cuDNN plans tens of milliseconds at a layer's first call
)
