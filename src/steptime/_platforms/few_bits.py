"""Calls of few bits as architectures after Hopper run them, which have less to do than the H200 whose times are carried over.

Their tensor cores add up in full precision by themselves, and they take operands whichever way these lie, so that what has one
scale is cast once, not into its columns too (NVIDIA, cuBLAS: 8-bit floating point data types; compute capability 10.0).
"""

from __future__ import annotations

from dataclasses import replace

from steptime._hardware.device import DeviceLimits
from steptime._models.kernels.call import Call
from steptime._models.kernels.forms.matmul.scaled import EXACT_SUMS
from steptime._models.kernels.launches import base_name

_AFTER_HOPPER = 10  # compute capability
_CAST, _ONE_WAY = "quantize", 1


def is_after_hopper(limits: DeviceLimits) -> bool:
    """Whether a device is of such an architecture."""
    return limits.compute_capability is not None and limits.compute_capability.value >= _AFTER_HOPPER


def as_run_after_hopper(call: Call) -> Call:
    """The call of as much work on the device that times are carried over from."""
    name = base_name(call.op)
    place = EXACT_SUMS.get(name)
    if place is not None:
        return replace(call, args=(*call.args[:place], *(None for _ in range(place - len(call.args))), True))
    if name == _CAST and call.args[1:] and not any(call.args[2:]):
        return replace(call, args=(call.args[0], _ONE_WAY, *call.args[2:]))
    return call
