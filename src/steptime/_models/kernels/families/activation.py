"""Activation functions, forward and backward."""

from __future__ import annotations

from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.draw import Rng, activation_shape, chance, channels_last, floating, mixture, options, pick
from steptime._models.kernels.families.elementwise import launches
from steptime._models.kernels.family import Family

# Op -> arguments after the input; the shares are those of the models that are trained most.
_FORWARD: dict[str, tuple[Argument, ...]] = {
    "aten::relu.default": (),
    "aten::relu_.default": (),
    "aten::clamp_min.default": (0,),
    "aten::gelu.default": (),
    "aten::silu.default": (),
    "aten::sigmoid.default": (),
    "aten::tanh.default": (),
    "aten::leaky_relu.default": (0.01,),
    "aten::hardtanh.default": (0.0, 6.0),
    "aten::hardswish.default": (),
    "aten::softplus.default": (),
    "aten::silu_.default": (),
}
_FORWARD_SHARES = (3, 2, 2, 3, 2, 2, 2, 0.5, 0.5, 0.5, 0.3, 0.5)

# Op -> arguments after the gradient and the saved input or output.
_BACKWARD: dict[str, tuple[Argument, ...]] = {
    "aten::threshold_backward.default": (0,),
    "aten::gelu_backward.default": (),
    "aten::silu_backward.default": (),
    "aten::sigmoid_backward.default": (),
    "aten::tanh_backward.default": (),
    "aten::leaky_relu_backward.default": (0.01, False),
    "aten::hardtanh_backward.default": (0.0, 6.0),
    "aten::hardswish_backward.default": (),
    "aten::softplus_backward.default": (1.0, 20.0),
}
_BACKWARD_SHARES = (4, 3, 2, 2, 2, 0.5, 0.5, 0.5, 0.3)


def _draw_input(rng: Rng) -> TensorArg:
    shape, dtype = activation_shape(rng), floating(rng)
    return channels_last(shape, dtype) if len(shape) == 4 and chance(rng, 0.4) else TensorArg(shape, dtype)


def _draw_approximation(rng: Rng, op: str) -> tuple[tuple[str, Argument], ...]:
    """GPT-2 takes the tanh form of GELU."""
    return options(approximate="tanh") if "gelu" in op and chance(rng, 0.4) else ()


def _draw_forward(rng: Rng) -> Call:
    op = pick(rng, tuple(_FORWARD), _FORWARD_SHARES)
    return Call(op, (_draw_input(rng), *_FORWARD[op]), _draw_approximation(rng, op))


def _draw_backward(rng: Rng) -> Call:
    op = pick(rng, tuple(_BACKWARD), _BACKWARD_SHARES)
    x = _draw_input(rng)
    return Call(op, (x, x, *_BACKWARD[op]), _draw_approximation(rng, op))


FAMILY = Family(
    name="activation",
    ops=(*_FORWARD, *_BACKWARD),
    sweep=mixture((1, _draw_forward), (1, _draw_backward)),
    weight=5.0,
    rules=launches,
)
