"""Dropout, forward and backward."""

from __future__ import annotations

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.families import elementwise, fill
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import GpuCall, Launch, fresh
from steptime._models.kernels.sweep import Draw, Drawn, KernelSweep

_RATES = (0.1, 0.1, 0.2, 0.3, 0.5)
_BLOCK = 1024  # elements; 256 threads of 4


def _draw_forward(draw: Draw) -> Drawn:
    return {"x": draw.activation(), "rate": draw.pick(_RATES)}


def _draw_backward(draw: Draw) -> Drawn:
    shape, rate = draw.activation_shape(), draw.pick(_RATES)
    mask = TensorArg(shape, "bool", values="mask")
    return {"x": TensorArg(shape, draw.floating()), "mask": mask, "scale": 1.0 / (1.0 - rate)}


def _launches(call: GpuCall) -> list[Launch]:
    """A fused kernel that draws, scales and keeps the mask."""
    x = call.tensor(0)
    count = x.numel
    kernel = "fused_dropout_kernel_vec" if count % 2 == 0 and x.dense else "fused_dropout_kernel"
    facts = {f"aligned_{vector}": count % vector == 0 for vector in (4, 8, 16)}
    writes = (fresh(x.shape, x.dtype), fresh(x.shape, "bool"))
    return [Launch(kernel, count, (x,), writes, facts, ((count / _BLOCK, 1.0),), "" if x.dense else "strided", x.dtype)]


FAMILY = Family(
    name="dropout",
    sweep=KernelSweep(
        (1, _draw_forward, "native_dropout(*x, rate, True)"),
        (1, _draw_backward, "native_dropout_backward(*x, mask, scale)"),
        # The mask alone, as dropout of whole channels or paths draws it.
        (0.15, _draw_forward, "bernoulli_.float(*x, rate)"),
    ),
    weight=2.5,
    rules={"native_dropout": _launches, "native_dropout_backward": elementwise.launches, "bernoulli_": fill.random_numbers},
)
