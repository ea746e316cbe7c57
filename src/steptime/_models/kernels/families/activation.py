"""Activation functions, forward and backward."""

from __future__ import annotations

from steptime._models.kernels.call import TensorArg
from steptime._models.kernels.families.elementwise import launches
from steptime._models.kernels.family import Family
from steptime._models.kernels.sweep import Draw, Drawn, KernelSweep


def _draw_input(draw: Draw) -> Drawn:
    """An input, or a gradient and the saved input or output; GPT-2 takes the tanh form of GELU."""
    form = draw.form()
    x = TensorArg(draw.activation_shape(), draw.floating())
    x = x.channels_last() if len(x.shape) == 4 and draw.chance(0.4) else x
    return {"x": x, "approximate": "tanh" if "gelu" in form and draw.chance(0.4) else None}


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
)
