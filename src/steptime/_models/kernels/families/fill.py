"""Fills: zeros, constants and random numbers."""

from __future__ import annotations

from steptime._models.kernels.call import DtypeArg, TensorArg
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import WITH_INDEX, GpuCall, Launch, fresh
from steptime._models.kernels.launches.iterator import fill
from steptime._models.kernels.sweep import Draw, Drawn, KernelSweep

_BLOCK = 1024  # elements, as in the element-wise kernels
_DRAWN = "cauchy_ exponential_ geometric_ log_normal_ random_"


def _draw_filled(draw: Draw) -> Drawn:
    draw.form()
    return {"x": draw.activation()}


def _draw_integers(draw: Draw) -> Drawn:
    return {"x": TensorArg((draw.log_int(1, 8_000_000),), draw.pick(("int64", "int32")), high=100)}


def _draw_new(draw: Draw) -> Drawn:
    """Tensors that are made with their content: gradients of lookups, masks, positions."""
    if "zeros" in draw.form():
        return {"shape": draw.activation_shape(), "dtype": DtypeArg(draw.floating())}
    return {"count": draw.log_int(16, 4_000_000)}


def _like(call: GpuCall) -> list[Launch]:
    x = call.tensor(0)
    return [fill(fresh(x.shape, call.dtype_keyword(x.dtype)))]


def _arange(call: GpuCall) -> list[Launch]:
    count = call.integer(0)
    return [Launch(WITH_INDEX, count, (), (fresh((count,), "int64"),), {}, ((count / _BLOCK, 1.0),))]


def random_numbers(call: GpuCall) -> list[Launch]:
    """The kernel that draws every element."""
    x = call.tensor(0)
    kernel, facts = "distribution_elementwise_grid_stride_kernel", {"tail": x.numel % 4 != 0}
    return [Launch(kernel, x.numel, (), (x,), facts, ((x.numel / _BLOCK, 1.0),), "", x.dtype)]


FAMILY = Family(
    name="fill",
    sweep=KernelSweep(
        (
            *(3, _draw_filled, (3, "zero_(*x)"), (2, "fill_.Scalar(*x, 1.0)"), (1, "ones_like(*x)"), (1, "zeros_like(*x)")),
            (0.5, "full_like(*x, 0.5)"),
        ),
        (0.5, _draw_integers, "zero_(*x)"),
        (0.8, _draw_filled, "uniform_(*x, 0.0, 1.0)", "normal_(*x, 0.0, 1.0)"),
        (0.7, _draw_new, 'zeros(shape, device="device", dtype=dtype)', 'arange(count, device="device", dtype=int64)'),
    ),
    weight=2.0,
    rules={
        **dict.fromkeys(("zero_", "fill_"), lambda call: [fill(call.tensor(0), existing=True)]),
        **dict.fromkeys(("zeros_like", "ones_like", "full_like"), _like),
        "zeros": lambda call: [fill(fresh(call.integers(0), call.dtype_keyword("float32")))],
        "arange": _arange,
        **dict.fromkeys(("uniform_", "normal_", *_DRAWN.split()), random_numbers),
    },
    kin=f"{_DRAWN} fill_.Tensor",
)
