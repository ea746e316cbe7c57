"""Convolution in one and two dimensions, forward and backward: dense, grouped, depthwise, strided, dilated, channels last."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from steptime._models.kernels.call import Argument, Call, TensorArg, contiguous
from steptime._models.kernels.family import Family
from steptime._models.kernels.sweep import USUAL_BYTES, Draw, Drawn, KernelSweep, Shape

# About 3 ms on an H200 at half of what matrix products reach.
_MOST_FLOP = {"float32": 60e9, "bfloat16": 6e11, "float16": 6e11}

# Layers as (inputs, outputs, kernel, stride, padding, side of the input).
# ResNet-50 (and its 3x3 stride-2 variant, torchvision's), 224 pixels.
_RESNET = (
    *((3, 64, (7, 7), 2, (3, 3), 224), (64, 64, (1, 1), 1, (0, 0), 56), (64, 64, (3, 3), 1, (1, 1), 56)),
    *((64, 256, (1, 1), 1, (0, 0), 56), (256, 64, (1, 1), 1, (0, 0), 56), (256, 128, (1, 1), 1, (0, 0), 56)),
    *((128, 128, (3, 3), 2, (1, 1), 56), (256, 512, (1, 1), 2, (0, 0), 56), (512, 128, (1, 1), 1, (0, 0), 28)),
    *((128, 128, (3, 3), 1, (1, 1), 28), (512, 256, (1, 1), 1, (0, 0), 28), (256, 256, (3, 3), 2, (1, 1), 28)),
    *((512, 1024, (1, 1), 2, (0, 0), 28), (1024, 256, (1, 1), 1, (0, 0), 14), (256, 256, (3, 3), 1, (1, 1), 14)),
    *((256, 1024, (1, 1), 1, (0, 0), 14), (1024, 512, (1, 1), 1, (0, 0), 14), (512, 512, (3, 3), 2, (1, 1), 14)),
    *((1024, 2048, (1, 1), 2, (0, 0), 14), (2048, 512, (1, 1), 1, (0, 0), 7), (512, 512, (3, 3), 1, (1, 1), 7)),
    (512, 2048, (1, 1), 1, (0, 0), 7),
)
# Inception-v3, 299 pixels: the stem and one layer of each kind of block.
_INCEPTION = (
    *((3, 32, (3, 3), 2, (0, 0), 299), (32, 32, (3, 3), 1, (0, 0), 149), (32, 64, (3, 3), 1, (1, 1), 147)),
    *((64, 80, (1, 1), 1, (0, 0), 73), (80, 192, (3, 3), 1, (0, 0), 73), (192, 64, (1, 1), 1, (0, 0), 35)),
    *((48, 64, (5, 5), 1, (2, 2), 35), (64, 96, (3, 3), 1, (1, 1), 35), (288, 384, (3, 3), 2, (0, 0), 35)),
    *((768, 128, (1, 1), 1, (0, 0), 17), (128, 128, (1, 7), 1, (0, 3), 17), (128, 192, (7, 1), 1, (3, 0), 17)),
    *((160, 160, (7, 1), 1, (3, 0), 17), (192, 192, (1, 7), 1, (0, 3), 17), (192, 320, (3, 3), 2, (0, 0), 17)),
    *((1280, 320, (1, 1), 1, (0, 0), 8), (1280, 448, (1, 1), 1, (0, 0), 8), (448, 384, (3, 3), 1, (1, 1), 8)),
    *((384, 384, (1, 3), 1, (0, 1), 8), (384, 384, (3, 1), 1, (1, 0), 8), (2048, 192, (1, 1), 1, (0, 0), 8)),
)
_NAMED = _RESNET + _INCEPTION


class _Layer(NamedTuple):
    batch: int
    inputs: int
    outputs: int
    kernel: Shape
    image: Shape
    stride: int
    padding: Shape
    dilation: int
    groups: int
    dtype: str


def _draw_named(draw: Draw) -> _Layer:
    inputs, outputs, kernel, stride, padding, side = draw.pick(_NAMED)
    batch = draw.pick((8, 16, 32, 64, 128)) if draw.chance(0.6) else draw.log_int(1, 256)
    return _Layer(batch, inputs, outputs, kernel, (side, side), stride, padding, 1, 1, draw.floating())


def _draw_square(draw: Draw) -> _Layer:
    tap, side = draw.pick((1, 1, 3, 3, 3, 5, 7)), draw.log_int(7, 224)
    dilation = draw.pick((1, 2, 4), (0.85, 0.1, 0.05))
    groups = draw.pick((1, 2, 4, 8, 32), (0.8, 0.05, 0.05, 0.05, 0.05))
    inputs, outputs = (groups * max(1, draw.size(4, 1024) // groups) for _ in range(2))
    stride, padding, batch = draw.pick((1, 2), (0.75, 0.25)), dilation * (tap // 2), draw.log_int(1, 128)
    return _Layer(batch, inputs, outputs, (tap,) * 2, (side,) * 2, stride, (padding,) * 2, dilation, groups, draw.floating())


def _draw_depthwise(draw: Draw) -> _Layer:
    tap, side, channels = draw.pick((3, 3, 5, 7)), draw.pick((7, 14, 28, 56, 112)), draw.size(16, 1280)
    stride, padding, batch = draw.pick((1, 2), (0.7, 0.3)), tap // 2, draw.log_int(1, 128)
    return _Layer(batch, channels, channels, (tap,) * 2, (side,) * 2, stride, (padding,) * 2, 1, channels, draw.floating())


def _draw_line(draw: Draw) -> _Layer:
    """One-dimensional: speech encoders, temporal stacks, pointwise and grouped layers over sequences."""
    tap, dilation = draw.pick((1, 2, 3, 3, 5, 7, 10)), draw.pick((1, 2, 4, 8), (0.7, 0.1, 0.1, 0.1))
    groups = draw.pick((1, 4, 16), (0.8, 0.1, 0.1))
    inputs, outputs = (groups * max(1, draw.size(8, 1024) // groups) for _ in range(2))
    stride, batch, length = draw.pick((1, 2, 5), (0.75, 0.2, 0.05)), draw.log_int(1, 128), draw.log_int(32, 16384)
    padding = dilation * (tap // 2)
    return _Layer(batch, inputs, outputs, (tap,), (length,), stride, (padding,), dilation, groups, draw.floating())


def _draw_layer(draw: Draw) -> Drawn | None:
    """Input, weight and output, all three in the same order of memory, and the layer's geometry."""
    kinds = (_draw_named, _draw_square, _draw_depthwise, _draw_line)
    layer = draw.pick(kinds, (0.5, 0.2, 0.12, 0.18))(draw)
    axes = zip(layer.image, layer.kernel, layer.padding, strict=True)
    result = tuple((side + 2 * pad - layer.dilation * (tap - 1) - 1) // layer.stride + 1 for side, tap, pad in axes)
    of_group, rank = layer.inputs // layer.groups, len(layer.kernel)
    flop = 2.0 * layer.batch * math.prod(result) * layer.outputs * of_group * math.prod(layer.kernel)
    most = 4 * layer.batch * max(layer.inputs * math.prod(layer.image), layer.outputs * math.prod(result))
    if min(result) < 1 or flop > _MOST_FLOP[layer.dtype] or most > USUAL_BYTES:
        return None
    x = TensorArg((layer.batch, layer.inputs, *layer.image), layer.dtype)
    weight = TensorArg((layer.outputs, of_group, *layer.kernel), layer.dtype)
    y = TensorArg((layer.batch, layer.outputs, *result), layer.dtype)
    if rank == 2 and draw.chance(0.4):
        x, weight, y = x.channels_last(), weight.channels_last(), y.channels_last()
    biased = draw.chance(0.3)
    return {
        "x": x,
        "weight": weight,
        "y": y,
        "bias": TensorArg((layer.outputs,), layer.dtype) if biased else None,
        "bias_shape": (layer.outputs,) if biased else None,
        "stride": (layer.stride,) * rank,
        "padding": layer.padding,
        "dilation": (layer.dilation,) * rank,
        "no_padding": (0,) * rank,
        "groups": layer.groups,
        # A network's first layer asks for no gradient of its input.
        "output_mask": (layer.inputs != 3, True, biased),
    }


# ATen copies what does not lie in the order of memory that a layer's tensors suggest, once for each gradient that it is needed
# for: the result's for both (native/Convolution.cpp, native/cudnn/ConvShared.cpp).
_PLACES = {"aten::convolution.default": (0, 1), "aten::convolution_backward.default": (1, 2, 0)}  # of image, filters, gradient
_LINE = 3  # axes of a batch of lines
_MASK_PLACE = 10  # of a backward call: which gradients are asked for: image, filters, bias


def _dense(call: Call) -> tuple[Call, tuple[int, ...]]:
    """The call with image, filters and gradient all in one order of memory, without gaps; places of what is copied for it."""
    places = [place for place in _PLACES[call.op] if place < len(call.args)]
    tensors = {place: value for place in places if isinstance(value := call.args[place], TensorArg)}
    if all(tensor.strides is None for tensor in tensors.values()):
        return call, ()
    # A line is brought into its own order first, and is an image of height 1 then. Depthwise kernels do not ask the gradient.
    asked = [tensors[place] for place in places[: 2 if _depthwise(call) else None] if place in tensors]
    last = any(_suggests_channels_last(tensor) for tensor in asked if len(tensor.shape) > _LINE)
    args = tuple(_in_order(value, last) if place in tensors else value for place, value in enumerate(call.args))
    copied = (place for place in places if args[place] is not call.args[place] for _ in range(_uses(call, place)))
    return replace(call, args=args), tuple(copied)


def _depthwise(call: Call) -> bool:
    image, groups = call.args[_PLACES[call.op][0]], call.args[8 + (len(_PLACES[call.op]) > 2)]
    return isinstance(image, TensorArg) and image.shape[1] == groups != 1


def _uses(call: Call, place: int) -> int:
    """How many results are made from the argument at a place, and so how often it is copied."""
    asked, x = call.args[_MASK_PLACE] if len(call.args) > _MASK_PLACE else None, call.args[place]
    if not isinstance(asked, tuple) or len(asked) < 2 or not isinstance(x, TensorArg):
        return 1
    of_image, of_filters = bool(asked[0]), bool(asked[1])
    if place == 0 and len(x.shape) == _LINE and _suggests_channels_last(x):
        return int(of_filters)  # the line's, which is then brought into the order of the gradient
    if place == 0 and _depthwise(call):
        return 1
    return (of_image + of_filters, int(of_filters), int(of_image))[place]


def _suggests_channels_last(x: TensorArg) -> bool:
    """Whether channels lie next to each other and the other axes outside of them, with gaps or without, as ATen tells."""
    if x.strides is None:
        return False
    least = 1
    for axis in (1, *range(len(x.shape) - 1, 1, -1), 0):
        if x.strides[axis] < least or (axis == 0 and x.strides[1] == least):
            return False
        least = x.strides[axis] * x.shape[axis]
    return True


def _in_order(value: Argument, channels_last: bool) -> Argument:
    """The tensor as it has to lie; the same one where it does."""
    if not isinstance(value, TensorArg):
        return value
    wanted = value.channels_last() if channels_last else replace(value, strides=None)
    steps = [x.strides or contiguous(x.shape) for x in (value, wanted)]
    same = all(size == 1 or here == there for size, here, there in zip(value.shape, *steps, strict=True))
    return value if same else wanted


FAMILY = Family(
    name="convolution",
    form="convolution",
    dense=_dense,
    sweep=KernelSweep(
        (1, _draw_layer, "convolution(*x, weight, bias, stride, padding, dilation, False, no_padding, groups)"),
        (
            *(1, _draw_layer),
            "convolution_backward"
            "(*y, x, weight, bias_shape, stride, padding, dilation, False, no_padding, groups, output_mask)",
        ),
    ),
    weight=7.0,  # cuDNN plans tens of milliseconds at a layer's first call
)
