"""Layers of convolution calls, their passes, what a pass costs by the book, and the sizes that say how far off the book is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from steptime._models.engine.stored import Floats
from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.forms import settings_of, shape_text
from steptime._models.kernels.question import Question
from steptime._units import dtype_bytes
from steptime.errors import InputError

FORWARD, BACKWARD = "aten::convolution.default", "aten::convolution_backward.default"

# What one call does, in the order cuDNN launches it; ATen's own depthwise kernels do the weight before the input.
FPROP, DGRAD, WGRAD, BIAS = "fprop", "dgrad", "wgrad", "bias"

# What the passes of a transposed convolution are of the one that goes the other way.
_TURNED = {FPROP: DGRAD, DGRAD: FPROP}

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
    backward: bool  # whether the call is a backward pass
    turned: bool  # whether it is a transposed one, taken for the convolution that goes the other way
    passes: tuple[str, ...]
    written: tuple[str, ...]  # image, weight, result: which of them a step has just written

    @property
    def even(self) -> bool:
        """Whether each of its groups has as many outputs as inputs, a power of two of them."""
        each = self.inputs // self.groups
        return self.groups > 1 and self.inputs == self.outputs and each & (each - 1) == 0

    @property
    def depthwise(self) -> bool:
        """Whether every input channel has filters of its own."""
        return self.groups > 1 and self.groups == self.inputs


@lru_cache(maxsize=1 << 16)
def layer_of(call: Call) -> ConvolutionLayer:
    """The layer of a convolution call; InputError where shapes, dtypes or arguments do not belong together."""
    if call.op not in (FORWARD, BACKWARD):
        raise InputError(f"{call.op} is no convolution: {FORWARD} or {BACKWARD} was expected")
    backward = call.op == BACKWARD
    places: tuple[int | None, int, int | None] = (1, 2, 0) if backward else (0, 1, None)
    image, weight = _tensor(call, places[0]), _tensor(call, places[1])
    first = 4 if backward else 3
    if len(call.args) < first + 6:
        raise InputError(f"{call.op} has {len(call.args)} arguments, {first + 6} were expected")
    axes, shapes = len(image.shape) - 2, f"{call.op} of {shape_text(image.shape)} with filters {shape_text(weight.shape)}"
    if axes not in _SPATIAL or len(weight.shape) != axes + 2:
        raise InputError(f"{shapes}: batch, channels and 1 to 3 axes were expected")
    stride, padding, dilation = (_lengths(call, first + index, axes) for index in range(3))
    groups, turned = call.args[first + 5], bool(call.args[first + 3])
    if turned:
        # The other way round: what it reads is the result of a convolution whose image it writes.
        further = _lengths(call, first + 4, axes)
        sides = zip(image.shape[2:], weight.shape[2:], stride, padding, dilation, further, strict=True)
        image_side = tuple(
            (side - 1) * step - 2 * pad + gap * (tap - 1) + more + 1 for side, tap, step, pad, gap, more in sides
        )
        inputs, result = weight.shape[1] * groups if isinstance(groups, int) else 0, image.shape[2:]
        divides = image.shape[1] == weight.shape[0]
        places = (places[2], places[1], places[0])
    else:
        sides_of = zip(image.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
        result = tuple((side + 2 * pad - gap * (tap - 1) - 1) // step + 1 for side, tap, step, pad, gap in sides_of)
        inputs, image_side = image.shape[1], image.shape[2:]
        divides = isinstance(groups, int) and image.shape[1] == weight.shape[1] * groups
    if not isinstance(groups, int) or groups < 1 or not divides or weight.shape[0] % groups:
        raise InputError(f"{shapes} in {groups} groups: channels do not divide")
    if min((*image.shape, *weight.shape, *result, *image_side)) < 1:
        raise InputError(f"{shapes} has no result: {shape_text(image_side if turned else result)}")
    if image.dtype not in DTYPES or weight.dtype != image.dtype:
        raise InputError(f"{call.op} of {image.dtype} with {weight.dtype}: one of {', '.join(DTYPES)} for both was expected")
    expected = (image.shape[0], inputs, *image_side) if turned else (image.shape[0], weight.shape[0], *result)
    if backward and _tensor(call, 0).shape != expected:
        raise InputError(f"{call.op} of a gradient {shape_text(_tensor(call, 0).shape)}: {shape_text(expected)} was expected")
    names = {places[0]: "image", places[1]: "weight", places[2]: "result"}
    return ConvolutionLayer(
        batch=image.shape[0],
        inputs=inputs,
        outputs=weight.shape[0],
        taps=_two(weight.shape[2:]),
        image=_two(image_side),
        result=_two(result),
        stride=_two(stride),
        dilation=_two(dilation),
        groups=groups,
        dtype=image.dtype,
        axes=axes,
        channels_last=_channels_last(image) or _channels_last(weight),
        backward=backward,
        turned=turned,
        passes=tuple(_TURNED.get(name, name) for name in _passes(call)) if turned else _passes(call),
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


def _lengths(call: Call, place: int, count: int) -> tuple[int, ...]:
    value: Argument = call.args[place]
    numbers = tuple(item for item in value if isinstance(item, int)) if isinstance(value, tuple) else ()
    if len(numbers) == 1:
        numbers *= count
    if len(numbers) != count or min(numbers) < 0:
        raise InputError(f"{call.op} has {value!r} as argument {place}: {count} whole numbers were expected")
    return numbers


def _two(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Height and width; depth joins height."""
    return math.prod(lengths[:-1]), lengths[-1]


def _channels_last(tensor: TensorArg) -> bool:
    """Channels next to each other in memory, as ATen suggests a layout: of single pixels or channels both hold."""
    return tensor.strides is not None and len(tensor.shape) > 3 and tensor.strides[1] == 1 and tensor.strides[-1] != 1


# Seen in the smallest rows: a launch, a product's floor, a tile's start.
_LAUNCH_NS, _KERNEL_NS, _WAVE_NS = 1500.0, 2000.0, 700.0
_MOVE_TILE = 32  # cuDNN's layout kernels move squares of 32 x 32
_SPLIT_LEAST = 256  # how much of the inner length a split keeps at least, seen in the measured rows
# How much faster depthwise kernels are with channels last (cuDNN) than first (ATen), seen in the measured rows.
_DEPTHWISE_LAST = 3.0
# A turn of ATen's depthwise gradient of a weight, alone and with every warp of an SM at work: seen in the measured rows.
_TURN_LEAST_NS, _TURN_NS = 160.0, 370.0
_DENSE_TILES = ((64, 64), (128, 64), (128, 128), (256, 64))
_PRODUCT_TILES = ((64, 64), (128, 128), (128, 256))
_SINGLE_TILES = ((32, 32, 0.55), (128, 32, 0.75), (256, 64, 0.9))  # and the part of the peak they reach
_WAVE_TILES = ((64, 64), (128, 64), (128, 128), (256, 64), (32, 32), (256, 128))


@dataclass(frozen=True)
class ConvolutionConstants:
    """Of the device: its size, what memory reaches, and what its SMs do."""

    sms: float
    l2_bytes: float  # what can still be in cache when a call begins
    warps_per_sm: float
    bytes_per_ns: float  # read and write mixed
    moved_bytes_per_ns: float  # by layout kernels
    reduced_bytes_per_ns: float  # by sums over the splits of a product
    # Flop per ns of one SM on large products.
    half_flop_per_ns: float
    tf32_flop_per_ns: float
    single_flop_per_ns: float
    # Multiply-adds per ns of depthwise kernels with channels first.
    depthwise_per_ns: float
    depthwise_weight_per_ns: float


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a layer under the settings of a question."""

    layer: ConvolutionLayer
    name: str
    question: Question


def goes_forward(layer: ConvolutionLayer, name: str) -> bool:
    """Whether a pass is what a forward call does: the output, or a bias added to it."""
    return name == FPROP or (name == BIAS and not layer.backward)


@lru_cache(maxsize=1 << 16)
def _numbers(layer: ConvolutionLayer, name: str) -> tuple[float, ...]:
    return (
        *(layer.batch, layer.inputs, layer.outputs, layer.groups, *layer.taps, *layer.image, *layer.result),
        *(layer.stride[0] * layer.stride[1], layer.dilation[0] * layer.dilation[1], dtype_bytes(layer.dtype)),
        *(layer.dtype == "bfloat16", layer.axes, layer.channels_last, name == FPROP, name == DGRAD, name == WGRAD),
        *(
            "image" in layer.written,
            "weight" in layer.written,
            "result" in layer.written,
            goes_forward(layer, name),
            layer.turned,
        ),
    )


class PassColumns:
    """Sizes of many passes, a column each, and times by the book. Shapes are (passes,) throughout."""

    def __init__(self, passes: Sequence[Pass], device: ConvolutionConstants) -> None:
        """Reads the sizes of the passes."""
        self.device = device
        table = np.array([_numbers(item.layer, item.name) for item in passes], dtype=np.float64).reshape(-1, 24).T
        self.batch, self.inputs, self.outputs, self.groups = table[:4]
        self.tap_height, self.tap_width, self.image_height, self.image_width = table[4:8]
        self.result_height, self.result_width, self.stride, self.dilation, self.element, self.bfloat16 = table[8:14]
        self.axes = table[14]
        self.last, self.fprop, self.dgrad, self.wgrad = (column > 0 for column in table[15:19])
        self.written = [column > 0 for column in table[19:22]]
        self.forward, self.turned = table[22] > 0, table[23] > 0
        settings = settings_of([item.question for item in passes])
        self.warm, self.share, self.others = settings.warm, settings.share.astype(float), settings.others.astype(float)
        self.half = self.element == 2
        self.single = (self.element > 2) & ~settings.tf32
        self.sms = np.maximum(1.0, device.sms / self.share)
        self.taps = self.tap_height * self.tap_width
        self.area, self.result_area = self.image_height * self.image_width, self.result_height * self.result_width
        self.pixels = self.batch * self.result_area
        self.group_inputs, self.group_outputs = self.inputs / self.groups, self.outputs / self.groups
        self.depthwise = (self.groups > 1) & (self.groups == self.inputs)
        # cuDNN has kernels for all groups at once where each has as many outputs as inputs, a power of two of them; others are
        # padded to that by kernels of their own, or taken one by one (seen in the measured rows).
        self.even = (
            (self.groups > 1)
            & (self.group_inputs == self.group_outputs)
            & (_next_power(self.group_inputs) == self.group_inputs)
        )
        self.pointwise = (self.taps == 1) & (self.stride == 1)
        self.macs = self.pixels * self.outputs * self.group_inputs * self.taps
        self.tensors = [  # bytes of image, weight, result
            self.batch * self.inputs * self.area * self.element,
            self.outputs * self.group_inputs * self.taps * self.element,
            self.pixels * self.outputs * self.element,
        ]
        self.nbytes = self.tensors[0] + self.tensors[1] + self.tensors[2]
        # While the other parts do the same, each has its share of the memory's rate.
        self.crowding = np.where(self.others == 2, self.share, 1.0)
        self.bytes_per_ns = device.bytes_per_ns / self.crowding
        self.memory_ns = _KERNEL_NS + self.nbytes / self.bytes_per_ns

    def by_pass(self, fprop: Floats, dgrad: Floats, wgrad: Floats) -> Floats:
        """Of each pass what belongs to it."""
        return np.where(self.fprop, fprop, np.where(self.dgrad, dgrad, wgrad))

    def sizes(self, pad: Floats | int = 1) -> tuple[Floats, Floats, Floats]:
        """Rows, columns and inner length of a pass as a product, for one group; inner channels padded to a multiple."""
        rows = self.by_pass(self.pixels, self.batch * self.area, self.group_outputs)
        columns = self.by_pass(self.group_outputs, self.group_inputs, self.group_inputs * self.taps)
        forward = _padded(self.group_inputs, pad) * self.taps
        return rows, columns, self.by_pass(forward, _padded(self.group_outputs, pad) * self.taps / self.stride, self.pixels)

    def implicit_ns(self, tile: tuple[int, int], peak: Floats, pad: Floats) -> Floats:
        """An implicit product: channels are padded to what a step of the kernel takes, tiles run in waves."""
        return self._tiled_ns(self.sizes(pad), self.groups, tile, peak, self.wgrad)

    def product_ns(self, tile: tuple[int, int], peak: Floats) -> Floats:
        """A pointwise pass as a plain product: of the whole batch with channels last, else of each image."""
        images = np.where(self.last, 1.0, self.batch)
        places = np.where(self.last, self.pixels, self.result_area)
        channels = np.where(self.dgrad, self.inputs, self.outputs)
        inner = np.where(self.fprop, self.inputs, self.outputs)
        sizes = (
            np.where(self.wgrad, self.inputs, np.where(self.last, channels, places)),
            np.where(self.wgrad, self.outputs, np.where(self.last, places, channels)),
            np.where(self.wgrad, np.where(self.last, self.pixels, _padded(self.result_area, 8)), _padded(inner, 8)),
        )
        summed_bytes = np.where(self.wgrad & ~self.last, self.batch * self.inputs * self.outputs * 4, 0.0)
        times: Floats = self._tiled_ns(sizes, images * self.groups, tile, peak, np.ones_like(self.wgrad))
        return times + summed_bytes / self.device.moved_bytes_per_ns

    def _tiled_ns(
        self,
        sizes: tuple[Floats, Floats, Floats],
        copies: Floats,
        tile: tuple[int, int],
        peak: Floats,
        may_split: npt.NDArray[np.bool_],
    ) -> Floats:
        rows, columns, inner = sizes
        tiles = np.ceil(rows / tile[0]) * np.ceil(columns / tile[1]) * copies
        parts = np.maximum(1.0, np.minimum(self.sms // tiles, inner // _SPLIT_LEAST))
        parts = np.where(may_split & (tiles < self.sms), parts, 1.0)
        step = 2 * tile[0] * tile[1] / peak  # ns that one tile takes for one of the inner length
        reduced = np.where(parts > 1, _KERNEL_NS + 8 * parts * rows * columns / self.device.reduced_bytes_per_ns, 0.0)
        times: Floats = _KERNEL_NS + np.ceil(tiles * parts / self.sms) * (inner / parts * step + _WAVE_NS) + reduced
        return times

    def layout_ns(self) -> Floats:
        """Bringing what a pass reads into the other order of memory and back what it writes; single taps need no moving."""
        shapes = (
            (self.batch, self.inputs, self.area),
            (self.outputs, self.group_inputs, self.taps),
            (self.batch, self.outputs, self.result_area),
        )
        total: Floats = np.zeros(self.batch.shape)
        for index, (count, channels, places) in enumerate(shapes):
            moved = count * _padded(channels, _MOVE_TILE) * _padded(places, _MOVE_TILE) * self.element
            time = _LAUNCH_NS + 2 * moved / (self.device.moved_bytes_per_ns / self.crowding)
            total += np.where(self.taps > 1, time, 0.0) if index == 1 else time
        return total

    def depthwise_ns(self) -> Floats:
        """A depthwise pass: a backward one visits every tap of every pixel of the image, strided or not."""
        visited = self.batch * self.inputs * self.area * self.taps * np.maximum(1.0, self.outputs // self.inputs)
        work = np.where(self.dgrad & (self.outputs >= self.inputs), visited, self.macs)
        first_rate = np.where(self.wgrad, self.device.depthwise_weight_per_ns, self.device.depthwise_per_ns)
        rate = first_rate * np.where(self.last, _DEPTHWISE_LAST, 1.0) / self.share
        busy = np.where(self.wgrad & ~self.last, self.weight_gradient_ns(), work / rate)
        times: Floats = _LAUNCH_NS + np.maximum(self.nbytes / self.bytes_per_ns, busy)
        return times

    def weight_gradient_ns(self) -> Floats:
        """ATen's depthwise gradient of a weight: a block per weight, a warp per image and at most eight, a lane per pixel."""
        warps = np.minimum(self.batch, 8.0)
        turns = np.ceil(self.batch / warps) * np.ceil(self.result_area / 32)
        waves = self.outputs * self.taps * warps / (self.sms * self.device.warps_per_sm)
        times: Floats = turns * np.maximum(_TURN_LEAST_NS, _TURN_NS * waves)
        return times

    def hot_share(self) -> Floats:
        """What part of a pass's bytes a step has just written, as far as it is read and fits the cache."""
        read = (self.fprop | self.wgrad, self.fprop | self.dgrad, self.dgrad | self.wgrad)
        hot = [
            np.where(written & reads, np.minimum(nbytes, self.device.l2_bytes), 0.0)
            for written, reads, nbytes in zip(self.written, read, self.tensors, strict=True)
        ]
        share: Floats = np.where(self.warm, hot[0] + hot[1] + hot[2], 0.0) / self.nbytes
        return share


def _padded(lengths: Floats, unit: Floats | int) -> Floats:
    padded: Floats = np.ceil(lengths / unit) * unit
    return padded


def _next_power(lengths: Floats) -> Floats:
    """The least power of two that is not below each."""
    powers: Floats = np.exp2(np.ceil(np.log2(lengths)))
    return powers


def _alignment(lengths: Floats) -> Floats:
    """The largest power of two that divides each, up to 64."""
    whole = lengths.astype(np.int64)
    powers: Floats = np.minimum(whole & -whole, 64).astype(np.float64)
    return powers


def table(columns: PassColumns) -> tuple[Floats, Floats]:
    """Features, shape (passes, features), and the time by the book in ns, of which a model learns the ratio."""
    times, base = _book(columns)
    rows, width, inner = columns.sizes()
    log = np.log
    plain = [
        *(log(rows), log(width), log(inner), log(columns.batch), log(columns.inputs), log(columns.outputs)),
        *(log(columns.group_inputs), log(columns.group_outputs), log(columns.groups)),
        *(log(columns.area), log(columns.result_area)),
        *(columns.tap_height, columns.tap_width, columns.taps, columns.stride, columns.dilation),
        *(columns.image_height, columns.image_width, columns.result_width, columns.element, columns.bfloat16, columns.axes),
        *(_alignment(columns.inputs), _alignment(columns.outputs), _alignment(columns.area), _alignment(columns.result_area)),
        *(_alignment(columns.group_inputs), _alignment(columns.group_outputs), columns.turned.astype(np.float64)),
        *(*(log(nbytes) for nbytes in columns.tensors), columns.hot_share(), log(inner / rows), log(rows * width)),
        *(log(columns.macs), log(columns.nbytes), log(base), columns.share, columns.others),
        *(width / _padded(width, 64), width / _padded(width, 128), rows / _padded(rows, 128)),
        *(columns.group_inputs / _next_power(columns.group_inputs), columns.group_outputs / _next_power(columns.group_outputs)),
    ]
    flags = (
        *(columns.single, columns.half, columns.last, columns.depthwise, columns.taps == 1, columns.pointwise, columns.warm),
        *(columns.fprop, columns.dgrad, columns.wgrad, columns.last == columns.single, columns.forward),
        columns.even,
    )
    waves = []
    for high, wide in _WAVE_TILES:
        count = np.ceil(rows / high) * np.ceil(width / wide) * columns.groups / columns.sms
        waves += [log(count), np.where(count < 40, np.ceil(count) / count, 1.0), log(np.ceil(count) * inner)]
    ratios = [*(log(time / base) for time in times), log(columns.weight_gradient_ns()), log(columns.outputs * columns.taps)]
    return np.stack([*plain, *(flag.astype(np.float64) for flag in flags), *waves, *ratios], axis=1), base


def crowd(columns: PassColumns, base: Floats) -> Floats:
    """The few features that say what a part of a GPU and its company add, shape (passes, features)."""
    flags = (columns.last, columns.single, columns.fprop, columns.dgrad, columns.wgrad, columns.depthwise, columns.warm)
    sizes = (columns.share, columns.others, np.log(base), np.log(columns.memory_ns / base), np.log(columns.nbytes))
    return np.stack([*sizes, *(flag.astype(np.float64) for flag in flags)], axis=1)


def _book(columns: PassColumns) -> tuple[list[Floats], Floats]:
    """Times of the ways cuDNN has, and the one it is likeliest to take."""
    device = columns.device
    single_peak = device.single_flop_per_ns
    peak = np.where(columns.half, device.half_flop_per_ns, np.where(columns.single, single_peak, device.tf32_flop_per_ns))
    pad = np.where(columns.half, 32.0, np.where(columns.single, 8.0, 16.0))
    layout = columns.layout_ns()
    to_last, to_first = np.where(columns.last, 0.0, layout), np.where(columns.last, layout, 0.0)
    memory = columns.memory_ns
    dense = [np.maximum(memory, columns.implicit_ns(tile, peak, pad)) + to_last for tile in _DENSE_TILES]
    product = [np.maximum(memory, columns.product_ns(tile, peak)) for tile in _PRODUCT_TILES]
    moved = np.where(columns.wgrad, to_last, to_first)
    eight = np.full_like(pad, 8.0)
    single = [
        np.maximum(memory, columns.implicit_ns((high, wide), np.full_like(peak, part * single_peak), eight)) + moved
        for high, wide, part in _SINGLE_TILES
    ]
    depthwise = columns.depthwise_ns()
    least = np.minimum.reduce
    tensor_cores = np.where(columns.pointwise, np.minimum(least(dense), least(product)), least(dense))
    base = np.where(columns.single, least(single), tensor_cores)
    base = np.where(columns.depthwise, depthwise, np.where(columns.groups > 1, np.minimum(base, depthwise), base))
    bias = ~(columns.fprop | columns.dgrad | columns.wgrad)
    touched = np.where(columns.forward, 2.0, 1.0) * np.where(columns.turned, columns.tensors[0], columns.tensors[2])
    # A forward one reads and writes the result.
    base = np.where(bias, _LAUNCH_NS + touched / columns.bytes_per_ns, base)
    return [*dense, *product, *single, layout, memory, depthwise], base
