"""Dropout, forward and backward."""

from __future__ import annotations

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import Rng, activation, activation_shape, floating, mixture, pick
from steptime._models.kernels.families import elementwise
from steptime._models.kernels.families import fill as filled
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Launch, fresh
from steptime._models.kernels.launches.arguments import base_name, tensor

_RATES = (0.1, 0.1, 0.2, 0.3, 0.5)


def _draw_forward(rng: Rng) -> Call:
    return Call("aten::native_dropout.default", (activation(rng), pick(rng, _RATES), True))


def _draw_backward(rng: Rng) -> Call:
    shape, rate = activation_shape(rng), pick(rng, _RATES)
    mask = TensorArg(shape, "bool", values="mask")
    return Call("aten::native_dropout_backward.default", (TensorArg(shape, floating(rng)), mask, 1.0 / (1.0 - rate)))


def _draw_bernoulli(rng: Rng) -> Call:
    """The mask alone, as dropout of whole channels or paths draws it."""
    return Call("aten::bernoulli_.float", (activation(rng), pick(rng, _RATES)))


# What dropout launches: a fused kernel that draws, scales and keeps the mask; its backward is element-wise.

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


FAMILY = Family(
    name="dropout",
    ops=("aten::native_dropout.default", "aten::native_dropout_backward.default", "aten::bernoulli_.float"),
    sweep=mixture((1, _draw_forward), (1, _draw_backward), (0.15, _draw_bernoulli)),
    weight=2.5,
    rules=launches,
)
