"""Activation functions, forward and backward."""

from __future__ import annotations

from dataclasses import replace

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.families import elementwise
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import GpuCall, Launch, fresh
from steptime._models.kernels.launches.iterator import pointwise
from steptime._models.kernels.sweep import Draw, Drawn, KernelSweep


def _draw_input(draw: Draw) -> Drawn:
    """An input, or a gradient and the saved input or output; GPT-2 takes the tanh form of GELU."""
    form = draw.form()
    x = TensorArg(draw.activation_shape(), draw.floating())
    x = x.channels_last() if len(x.shape) == 4 and draw.chance(0.4) else x
    return {"x": x, "approximate": "tanh" if "gelu" in form and draw.chance(0.4) else None}


def _halved(call: GpuCall, backward: bool) -> list[Launch]:
    """A gated unit: two halves of a tensor side by side make one, and get a gradient each."""
    x = call.tensor(1 if backward else 0)
    axis = call.integer(2 if backward else 1, -1) % len(x.shape)
    shape = tuple(size // 2 if place == axis else size for place, size in enumerate(x.shape))
    half = replace(x, shape=shape)
    if not backward:
        return [pointwise((half, half), fresh(shape, x.dtype), tag=x.dtype)]
    return [replace(pointwise((call.tensor(0), half, half), half, tag=x.dtype), writes=(half, half))]


def launches(call: GpuCall) -> list[Launch]:
    """One kernel over all elements."""
    if call.name in ("glu", "glu_backward"):
        return _halved(call, call.name == "glu_backward")
    made = elementwise.launches(call)
    if call.name == "_prelu_kernel_backward":  # of the input, and of the weight of every element
        return [replace(each, writes=each.writes * 2) for each in made]
    return made


FAMILY = Family(
    name="activation",
    # The shares are those of the models that are trained most.
    sweep=KernelSweep(
        (
            *(1, _draw_input),
            *((3, "relu(*x)"), (2, "relu_(*x)"), (2, "clamp_min(*x, 0)"), (3, "gelu(*x, approximate=approximate)")),
            *((2, "silu(*x)"), (2, "sigmoid(*x)"), (2, "tanh(*x)"), (0.5, "leaky_relu(*x, 0.01)")),
            *((0.5, "hardtanh(*x, 0.0, 6.0)"), (0.5, "hardswish(*x)"), (0.3, "softplus(*x)"), (0.5, "silu_(*x)")),
        ),
        (
            *(1, _draw_input),
            *((4, "threshold_backward(*x, x, 0)"), (3, "gelu_backward(*x, x, approximate=approximate)")),
            *((2, "silu_backward(*x, x)"), (2, "sigmoid_backward(*x, x)"), (2, "tanh_backward(*x, x)")),
            *((0.5, "leaky_relu_backward(*x, x, 0.01, False)"), (0.5, "hardtanh_backward(*x, x, 0.0, 6.0)")),
            *((0.5, "hardswish_backward(*x, x)"), (0.3, "softplus_backward(*x, x, 1.0, 20.0)")),
        ),
    ),
    weight=5.0,
    rules=launches,
    kin="""
        _prelu_kernel _prelu_kernel_backward elu elu_ elu_backward gelu_ glu glu_backward hardshrink hardshrink_backward
        hardsigmoid hardsigmoid_ hardsigmoid_backward hardswish_ hardtanh_ leaky_relu_ log_sigmoid_backward log_sigmoid_forward
        mish mish_ mish_backward sigmoid_ softshrink softshrink_backward tanh_ threshold threshold_
    """,
)
