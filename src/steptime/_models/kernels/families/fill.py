"""Fills: zeros, constants and random numbers."""

from __future__ import annotations

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._models.kernels.draw import Rng, activation_shape, floating, log_int, mixture, options, pick
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches.fill import launches

# Op -> arguments after the tensor.
_FILLS: dict[str, tuple[Argument, ...]] = {
    "aten::zero_.default": (),
    "aten::fill_.Scalar": (1.0,),
    "aten::ones_like.default": (),
    "aten::zeros_like.default": (),
    "aten::full_like.default": (0.5,),
}
_RANDOM: dict[str, tuple[Argument, ...]] = {
    "aten::uniform_.default": (0.0, 1.0),
    "aten::normal_.default": (0.0, 1.0),
}


def _filled(rng: Rng) -> Call:
    op = pick(rng, tuple(_FILLS), (3, 2, 1, 1, 0.5))
    return Call(op, (TensorArg(activation_shape(rng), floating(rng)), *_FILLS[op]))


def _made(rng: Rng) -> Call:
    """Tensors that are made with their content: gradients of lookups, masks, positions."""
    if pick(rng, (True, False)):
        shape = activation_shape(rng)
        return Call("aten::zeros.default", (shape,), options(device="device", dtype=DtypeArg(floating(rng))), written=())
    count = log_int(rng, 16, 4_000_000)
    return Call("aten::arange.default", (count,), options(device="device", dtype=DtypeArg("int64")), written=())


def _integers(rng: Rng) -> Call:
    x = TensorArg((log_int(rng, 1, 8_000_000),), pick(rng, ("int64", "int32")), high=100)
    return Call("aten::zero_.default", (x,))


def _random(rng: Rng) -> Call:
    op = pick(rng, tuple(_RANDOM))
    return Call(op, (TensorArg(activation_shape(rng), floating(rng)), *_RANDOM[op]))


FAMILY = Family(
    name="fill",
    ops=(*_FILLS, *_RANDOM, "aten::zeros.default", "aten::arange.default"),
    sweep=mixture((3, _filled), (0.5, _integers), (0.8, _random), (0.7, _made)),
    weight=2.0,
    rules=launches,
)
