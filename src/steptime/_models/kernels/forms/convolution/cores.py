"""How many kernels a pass launches: a core, which cuDNN's heuristics choose, and what brings tensors to it and back.

Tensor cores take channels last and a multiple of 16 bytes of them. A tensor that lies otherwise is moved, cleared memory first
where channels are added; filters of one tap are the same either way. That follows from the layer: of 13,237 measured passes of
dense layers (cuDNN 9.19, H200) 98 % have as many kernels around their core as it says. Which core runs does not: one kernel,
one behind a counter that is cleared (beyond two tiles for each multiprocessor, as in cuBLAS), several with a sum at their end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from steptime._models.engine.stored import Floats
from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.family import launches_of
from steptime._models.kernels.forms.convolution.passes import (
    DGRAD,
    WGRAD,
    ConvolutionConstants,
    ConvolutionLayer,
    Pass,
    PassColumns,
    table,
)
from steptime._models.kernels.launches import Gpu
from steptime._models.kernels.question import OTHERS, Question
from steptime._units import dtype_bytes

# What a core takes: the order that tensors are in, channels last, those and gives channels first, channels first of tensors
# that have them last.
PLAIN, LAST, GIVES_FIRST, FIRST = range(4)
MOST = 15  # kernels of a core that are told apart
_CODES = MOST + 1  # of a layout
_PADDED_BYTES = 16
_WARP = 32
_TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (256, 64), (256, 128), (128, 256), (256, 32), (64, 192))


def code(layout: int, kernels: int) -> int:
    """One number for what a core takes and how many kernels it has."""
    return _CODES * layout + min(max(kernels, 1), MOST)


def launched(layer: ConvolutionLayer, name: str, core: int) -> int:
    """How many kernels a pass has with this core."""
    return core % _CODES + conversions(layer, name, core // _CODES)


def conversions(layer: ConvolutionLayer, name: str, layout: int) -> int:
    """How many kernels bring the tensors of a pass of a dense layer to a core that takes this layout, and its result back."""
    point = math.prod(layer.taps) == 1
    if layout == PLAIN:
        return 0
    if layout == FIRST:
        return 2 + (not point)
    unit = max(1, _PADDED_BYTES // dtype_bytes(layer.dtype))
    odd_inputs, odd_outputs = layer.inputs % unit > 0, layer.outputs % unit > 0
    odd = odd_inputs or odd_outputs
    moved = not layer.channels_last
    image, result = ((moved + each if moved else 2 * each) for each in (odd_inputs, odd_outputs))
    filters = 2 if odd else int(moved and (not point or layout == GIVES_FIRST))
    if name == WGRAD:
        return image + result + (int(not point or odd) if moved else int(odd))
    if name == DGRAD:
        return result + filters + (1 if moved else int(odd_inputs))
    return image + filters + (1 if moved and layout == LAST else int(odd_outputs))


def sum_of_bias(item: Pass, device: ConvolutionConstants) -> int:
    """How many kernels the gradient of a bias has: those of a sum over all axes but the channels'."""
    gradient = item.question.call.args[0]
    assert isinstance(gradient, TensorArg)
    axes = (0, *range(2, len(gradient.shape)))
    gpu = Gpu(int(device.sms), int(_WARP * device.warps_per_sm), 0)  # sums do not ask for the cache
    return len(launches_of(Call("aten::sum.dim_IntList", (gradient, axes, False)), gpu))


def core_features(passes: Sequence[Pass], device: ConvolutionConstants) -> Floats:
    """What says which core runs, shape (passes, features): libraries see a whole GPU, and no cache."""
    whole = [
        item if item.question.share == 1 and not item.question.warm else replace(item, question=_alone(item)) for item in passes
    ]
    columns = PassColumns(whole, device)
    rows, width, _ = columns.sizes()
    tiles = [np.log(np.ceil(rows / high) * np.ceil(width / wide) * columns.groups / device.sms) for high, wide in _TILES]
    return np.column_stack([table(columns)[0], *tiles])


def _alone(item: Pass) -> Question:
    return replace(item.question, share=1, others=OTHERS[0], warm=False)
