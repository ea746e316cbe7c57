"""Dropout, forward and backward."""

from __future__ import annotations

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.draw import Rng, activation_shape, floating, mixture, pick
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.dropout import launches

_RATES = (0.1, 0.1, 0.2, 0.3, 0.5)


def _forward(rng: Rng) -> Call:
    return Call("aten::native_dropout.default", (TensorArg(activation_shape(rng), floating(rng)), pick(rng, _RATES), True))


def _backward(rng: Rng) -> Call:
    shape, rate = activation_shape(rng), pick(rng, _RATES)
    mask = TensorArg(shape, "bool", values="mask")
    return Call("aten::native_dropout_backward.default", (TensorArg(shape, floating(rng)), mask, 1.0 / (1.0 - rate)))


def _bernoulli(rng: Rng) -> Call:
    """The mask alone, as dropout of whole channels or paths draws it."""
    return Call("aten::bernoulli_.float", (TensorArg(activation_shape(rng), floating(rng)), pick(rng, _RATES)))


FAMILY = Family(
    name="dropout",
    ops=("aten::native_dropout.default", "aten::native_dropout_backward.default", "aten::bernoulli_.float"),
    sweep=mixture((1, _forward), (1, _backward), (0.15, _bernoulli)),
    weight=2.5,
    rules=launches,
)
