"""Fills: zeros, constants and random numbers."""

from __future__ import annotations

from steptime._models.kernels.call import Argument, Call, DtypeArg, TensorArg
from steptime._models.kernels.draw import Rng, activation, activation_shape, floating, log_int, mixture, options, pick
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import Launch, fresh
from steptime._models.kernels.launches.arguments import base_name, dtype_keyword, integer, integers, tensor
from steptime._models.kernels.launches.names import WITH_INDEX
from steptime._models.kernels.launches.pointwise import fill
from steptime.errors import InputError

# Op -> arguments after the tensor.
_FILLS: dict[str, tuple[Argument, ...]] = {
    "aten::zero_.default": (),
    "aten::fill_.Scalar": (1.0,),
    "aten::ones_like.default": (),
    "aten::zeros_like.default": (),
    "aten::full_like.default": (0.5,),
}
_DRAWN_BY: dict[str, tuple[Argument, ...]] = {
    "aten::uniform_.default": (0.0, 1.0),
    "aten::normal_.default": (0.0, 1.0),
}


def _draw_filled(rng: Rng) -> Call:
    op = pick(rng, tuple(_FILLS), (3, 2, 1, 1, 0.5))
    return Call(op, (activation(rng), *_FILLS[op]))


def _draw_made(rng: Rng) -> Call:
    """Tensors that are made with their content: gradients of lookups, masks, positions."""
    if pick(rng, (True, False)):
        shape = activation_shape(rng)
        return Call("aten::zeros.default", (shape,), options(device="device", dtype=DtypeArg(floating(rng))), written=())
    count = log_int(rng, 16, 4_000_000)
    return Call("aten::arange.default", (count,), options(device="device", dtype=DtypeArg("int64")), written=())


def _draw_integers(rng: Rng) -> Call:
    x = TensorArg((log_int(rng, 1, 8_000_000),), pick(rng, ("int64", "int32")), high=100)
    return Call("aten::zero_.default", (x,))


def _draw_random(rng: Rng) -> Call:
    op = pick(rng, tuple(_DRAWN_BY))
    return Call(op, (activation(rng), *_DRAWN_BY[op]))


# What constants, ranges and random numbers launch.

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


FAMILY = Family(
    name="fill",
    ops=(*_FILLS, *_DRAWN_BY, "aten::zeros.default", "aten::arange.default"),
    sweep=mixture((3, _draw_filled), (0.5, _draw_integers), (0.8, _draw_random), (0.7, _draw_made)),
    weight=2.0,
    rules=launches,
)
