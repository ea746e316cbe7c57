"""Products of eight-bit operands beside 16-bit ones of as many bytes: what their scales and sums cost.

With a scale for each operand the same choice of tiles runs a little longer, and longer again where sums of tensor cores are
added up outside of them in full precision (`use_fast_accum` off, or scales of blocks). With a scale for every row there is one
kernel, of 128 x 128 tiles: its time is whole rounds of those over the SMs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._models.engine.constants import reference_constants
from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.forms.matmul.products import SCALED, SCALED_GROUPED
from steptime._models.kernels.launches import base_name

Numbers = npt.NDArray[np.float64]
# Where calls say whether tensor cores may do the sums, which are not exact then.
EXACT_SUMS = {SCALED: 7, SCALED_GROUPED: 8}
_TILE, _LINE = 128, 128  # of the only kernel by rows; bytes that a multiple of loads whole


@dataclass(frozen=True)
class ScaledConstants:
    """Of the device that eight-bit products were measured on."""

    sms: float
    factor: float  # one scale for each operand: of the 16-bit product's time
    more_ns: float  # and beside it
    exact_sums: float  # how much more where sums are not left to tensor cores
    by_row_start_ns: float
    by_row_round_ns: float  # of every round of tiles
    by_row_element_ns: float  # and of every element along what is summed
    by_row_exact_sums: float
    by_row_bytes_per_ns: float
    by_row_odd: float  # how much more where what is summed is no multiple of a line


def scaled_ns(call: Call, plain_ns: float, share: int = 1, device: ScaledConstants | None = None) -> float:
    """What a product of few bits takes on one of `share` parts of a GPU, where the 16-bit one takes `plain_ns`."""
    device = reference_constants("scaled", ScaledConstants) if device is None else device
    left, right, scale = call.args[:3]
    if not isinstance(left, TensorArg) or not isinstance(right, TensorArg) or not isinstance(scale, TensorArg):
        return plain_ns
    place = EXACT_SUMS[base_name(call.op)]
    fast = len(call.args) > place and call.args[place] is True
    if is_by_row(scale) and len(right.shape) == 2 and place == EXACT_SUMS[SCALED]:
        sizes = np.array([[left.shape[0], right.shape[1], left.shape[1]]], dtype=np.float64)
        return float(by_row_ns(sizes, np.array([fast]), device, share)[0])
    # Tensor cores take scales of short blocks, which are bytes, themselves; others are applied to sums outside of them.
    of_blocks = scale.dtype != "uint8" and scale.numel > 1
    exact = scale.dtype != "uint8" and (of_blocks or not fast)
    return plain_ns * device.factor * (1 + device.exact_sums * exact) + device.more_ns


def is_by_row(scale: Argument) -> bool:
    """Whether there is a scale for every row."""
    return isinstance(scale, TensorArg) and scale.numel > 1 and scale.shape[-1] == 1


def by_row_ns(sizes: Numbers, fast: npt.NDArray[np.bool_], device: ScaledConstants, share: int = 1) -> Numbers:
    """Rounds of tiles, or memory where that takes longer; `sizes` are rows, columns and what is summed, a product a line."""
    rows, columns, inner = sizes.T
    rounds = np.ceil(np.ceil(rows / _TILE) * np.ceil(columns / _TILE) * share / device.sms)
    odd = np.where(inner % _LINE, 1 + device.by_row_odd, 1.0)
    each = device.by_row_element_ns * inner * odd * np.where(fast, 1.0, 1 + device.by_row_exact_sums) + device.by_row_round_ns
    moved = rows * inner + columns * inner + 2 * rows * columns
    result: Numbers = device.by_row_start_ns + np.maximum(rounds * each, moved * share / device.by_row_bytes_per_ns)
    return result
