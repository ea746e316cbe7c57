"""What constants, ranges and random numbers launch."""

from __future__ import annotations

from steptime._models.kernels.call import Call
from steptime._models.kernels.launches import Launch, fresh
from steptime._models.kernels.launches.arguments import base_name, dtype_keyword, integer, integers, tensor
from steptime._models.kernels.launches.names import WITH_INDEX
from steptime._models.kernels.launches.pointwise import fill
from steptime.errors import InputError

_DRAWN = "distribution_elementwise_grid_stride_kernel"
_IN_PLACE, _LIKE, _RANDOM = ("zero_", "fill_"), ("zeros_like", "ones_like", "full_like"), ("uniform_", "normal_", "bernoulli_")
_BLOCK = 1024  # elements, as in the element-wise kernels


def launches(call: Call) -> list[Launch]:
    """The kernel that writes the values."""
    name = base_name(call.op)
    if name in _IN_PLACE:
        return [fill(tensor(call, 0), existing=True)]
    if name in _LIKE:
        x = tensor(call, 0)
        return [fill(fresh(x.shape, dtype_keyword(call, x.dtype)))]
    if name in ("zeros", "ones", "full"):
        return [fill(fresh(integers(call, 0), dtype_keyword(call, "float32")))]
    if name == "arange":
        count = integer(call, 0)
        return [Launch(WITH_INDEX, count, (), (fresh((count,), "int64"),), {}, ((count / _BLOCK, 1.0),))]
    if name in _RANDOM:
        x = tensor(call, 0)
        facts = {"tail": x.numel % 4 != 0}
        return [Launch(_DRAWN, x.numel, (), (x,), facts, ((x.numel / _BLOCK, 1.0),), "", x.dtype)]
    raise InputError(f"{call.op}: no rule says what it launches")
