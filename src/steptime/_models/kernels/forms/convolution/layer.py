"""The layer behind a convolution call: sizes, layout and what is asked of it. A call that cannot be is said in one line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime.errors import InputError

FORWARD, BACKWARD = "aten::convolution.default", "aten::convolution_backward.default"

# What one call does, in the order cuDNN launches it; ATen's own depthwise kernels do the weight before the input.
FPROP, DGRAD, WGRAD, BIAS = "fprop", "dgrad", "wgrad", "bias"

DTYPES = ("float32", "float16", "bfloat16", "float64")
_SPATIAL = (1, 2, 3)  # axes of an image: what cuDNN takes


@dataclass(frozen=True, slots=True)
class ConvolutionLayer:
    """A convolution with everything its time depends on, in two spatial axes: a line is an image of height 1."""

    batch: int
    inputs: int
    outputs: int
    taps: tuple[int, ...]
    image: tuple[int, ...]  # height and width of what a forward pass reads
    result: tuple[int, ...]  # of what it writes
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: str
    axes: int
    channels_last: bool
    passes: tuple[str, ...]
    written: tuple[str, ...]  # image, weight, result: which of them a step has just written

    @property
    def depthwise(self) -> bool:
        """Whether every input channel has filters of its own."""
        return self.groups > 1 and self.groups == self.inputs


def layer_of(call: Call) -> ConvolutionLayer:
    """The layer of a convolution call; InputError where shapes, dtypes or arguments do not belong together."""
    if call.op not in (FORWARD, BACKWARD):
        raise InputError(f"{call.op} is no convolution: {FORWARD} or {BACKWARD} was expected")
    backward = call.op == BACKWARD
    places = (1, 2, 0) if backward else (0, 1, None)
    image, weight = _tensor(call, places[0]), _tensor(call, places[1])
    first = 4 if backward else 3
    if len(call.args) < first + 6:
        raise InputError(f"{call.op} has {len(call.args)} arguments, {first + 6} were expected")
    axes = len(image.shape) - 2
    if axes not in _SPATIAL or len(weight.shape) != axes + 2:
        raise InputError(
            f"{call.op} of {_sizes(image)} with filters {_sizes(weight)}: batch, channels and 1 to 3 axes were expected"
        )
    stride, padding, dilation = (_numbers(call, first + index, axes) for index in range(3))
    if call.args[first + 3]:
        raise InputError(f"{call.op} is transposed, which no measured call is: write it as the backward pass of its input")
    groups = call.args[first + 5]
    result = tuple(
        (length + 2 * pad - gap * (tap - 1) - 1) // step + 1
        for length, tap, step, pad, gap in zip(image.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    )
    if not isinstance(groups, int) or groups < 1 or image.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise InputError(
            f"{call.op} of {_sizes(image)} with filters {_sizes(weight)} in {groups} groups: channels do not divide"
        )
    if min((*image.shape, *weight.shape, *result)) < 1:
        raise InputError(f"{call.op} of {_sizes(image)} with filters {_sizes(weight)} has no result: {_text(result)}")
    if image.dtype not in DTYPES or weight.dtype != image.dtype:
        raise InputError(f"{call.op} of {image.dtype} with {weight.dtype}: one of {', '.join(DTYPES)} for both was expected")
    expected = (image.shape[0], weight.shape[0], *result)
    if backward and _tensor(call, 0).shape != expected:
        raise InputError(f"{call.op} of a gradient {_sizes(_tensor(call, 0))}: {_text(expected)} was expected")
    names = {places[0]: "image", places[1]: "weight", places[2]: "result"}
    return ConvolutionLayer(
        batch=image.shape[0],
        inputs=image.shape[1],
        outputs=weight.shape[0],
        taps=_two(weight.shape[2:], 1),
        image=_two(image.shape[2:], 1),
        result=_two(result, 1),
        stride=_two(stride, 1),
        dilation=_two(dilation, 1),
        groups=groups,
        dtype=image.dtype,
        axes=axes,
        channels_last=_channels_last(image) or _channels_last(weight),
        passes=_passes(call),
        written=tuple(names[index] for index in call.written if index in names),
    )


def _passes(call: Call) -> tuple[str, ...]:
    if call.op == FORWARD:
        return (FPROP, BIAS) if isinstance(call.args[2], TensorArg) else (FPROP,)
    asked = call.args[10] if len(call.args) > 10 else (True, True, bool(call.args[3]))
    if not isinstance(asked, tuple) or len(asked) != 3:
        raise InputError(f"{call.op} asks for {asked!r}: three truths (input, weight, bias) were expected")
    return tuple(name for name, wanted in zip((DGRAD, WGRAD, BIAS), asked, strict=True) if wanted)


def _tensor(call: Call, place: int | None) -> TensorArg:
    value = call.args[place] if place is not None and place < len(call.args) else None
    if not isinstance(value, TensorArg):
        raise InputError(f"{call.op} has no tensor as argument {place}")
    return value


def _numbers(call: Call, place: int, count: int) -> tuple[int, ...]:
    value: Argument = call.args[place]
    numbers = tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()
    if len(numbers) == 1:
        numbers *= count
    if len(numbers) != count or min(numbers) < 0:
        raise InputError(f"{call.op} has {value!r} as argument {place}: {count} whole numbers were expected")
    return numbers


def _two(lengths: tuple[int, ...], blank: int) -> tuple[int, ...]:
    """Height and width; depth joins height."""
    return (blank, *lengths) if len(lengths) == 1 else (math.prod(lengths[:-1]), lengths[-1])


def _channels_last(tensor: TensorArg) -> bool:
    """Channels next to each other in memory, as ATen suggests a layout: of single pixels or channels both hold."""
    return tensor.strides is not None and len(tensor.shape) > 3 and tensor.strides[1] == 1 and tensor.strides[-1] != 1


def _sizes(tensor: TensorArg) -> str:
    return _text(tensor.shape)


def _text(lengths: tuple[int, ...]) -> str:
    return "x".join(str(length) for length in lengths)
