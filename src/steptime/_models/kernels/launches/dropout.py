"""What dropout launches: a fused kernel that draws, scales and keeps the mask; its backward is element-wise."""

from __future__ import annotations

from steptime._models.kernels.call import Call
from steptime._models.kernels.launches import Launch, elementwise, fresh
from steptime._models.kernels.launches import fill as filled
from steptime._models.kernels.launches.arguments import base_name, tensor

_BLOCK = 1024  # elements; 256 threads of 4


def launches(call: Call) -> list[Launch]:
    """The kernels of dropout and its backward."""
    name = base_name(call.op)
    if name == "bernoulli_":
        return filled.launches(call)
    if name != "native_dropout":
        return elementwise.launches(call)
    x = tensor(call, 0)
    count = x.numel
    kernel = "fused_dropout_kernel_vec" if count % 2 == 0 and x.dense else "fused_dropout_kernel"
    facts = {f"aligned_{vector}": count % vector == 0 for vector in (4, 8, 16)}
    writes = (fresh(x.shape, x.dtype), fresh(x.shape, "bool"))
    return [Launch(kernel, count, (x,), writes, facts, ((count / _BLOCK, 1.0),), "" if x.dense else "strided", x.dtype)]
