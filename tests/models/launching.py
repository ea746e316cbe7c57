"""What rules say, on the GPU that the measured rows are of."""

from __future__ import annotations

from collections.abc import Callable

from steptime._models.engine.constants import reference_constants
from steptime._models.kernels.call import Call
from steptime._models.kernels.family import families
from steptime._models.kernels.forms.launched.terms import LaunchConstants
from steptime._models.kernels.launches import GpuCall, Launch

DEVICE = reference_constants("launched", LaunchConstants)
GPU = DEVICE.gpu


def rules_of(family: str) -> Callable[[Call], list[Launch]]:
    """The rules of a family, whatever the op."""
    launches = families()[family].launches
    return lambda call: launches(GpuCall(call.op, call.args, call.kwargs, call.written, gpu=GPU))
