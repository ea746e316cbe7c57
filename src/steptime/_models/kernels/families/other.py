"""Ops that real steps call now and then and no other family sweeps: other overloads of its ops, and a few of their own.

They launch what their siblings do; a few calls of each show that.
"""

from __future__ import annotations

import math
from dataclasses import replace

from steptime._models.kernels.call import DtypeArg, TensorArg
from steptime._models.kernels.families import elementwise, indexing, optimizer
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import DEFAULTS, WITH_INDEX, GpuCall, Grids, Launch, Rule, fresh, hot
from steptime._models.kernels.launches.indexed import over_indices
from steptime._models.kernels.launches.iterator import cleared, copies, pointwise
from steptime._models.kernels.launches.sorting import sorted_rows
from steptime._models.kernels.launches.transforms import transformed
from steptime._models.kernels.sweep import Draw, Drawn, KernelSweep, indices
from steptime.errors import InputError

_MOST_ELEMENTS = 16 << 20


def _draw_tensor(draw: Draw) -> Drawn:
    x = TensorArg(draw.activation_shape(_MOST_ELEMENTS), draw.floating())
    return {"x": x, "positive": replace(x, values="positive"), "unit": replace(x, values="unit")}


def _draw_with_number(draw: Draw) -> Drawn:
    draw.form()
    return _draw_tensor(draw)


def _draw_given_result(draw: Draw) -> Drawn:
    """Gradients scaled into a bucket of DDP."""
    return {"x": TensorArg(draw.pick(((draw.size(1, 4096), draw.size(1, 4096)), (draw.size(1, 4096),))))}


def _draw_new(draw: Draw) -> Drawn:
    x = TensorArg(draw.activation_shape(_MOST_ELEMENTS), draw.floating())
    shape = draw.activation_shape(_MOST_ELEMENTS) if "zeros" in draw.form() else ()
    return {"x": x, "shape": shape, "dtype": DtypeArg(x.dtype)}


def _draw_sorted(draw: Draw) -> Drawn:
    """Indices of a table-batched lookup."""
    return {"x": TensorArg((draw.log_int(8192, 4 << 20),), draw.pick(("int32", "int64")), high=1 << 25)}


def _draw_scattered(draw: Draw) -> Drawn:
    x = TensorArg((draw.log_int(8, 8192), draw.size(8, 1024)), draw.floating())
    return {"x": x, "index": indices((x.shape[0], 1), x.shape[1])}


def _draw_lists(draw: Draw) -> Drawn:
    draw.form()
    tensors = tuple(TensorArg((draw.log_int(1, 500_000),)) for _ in range(draw.log_int(1, 60)))
    return {"tensors": tensors, "numbers": (0.5,) * len(tensors), "unit": TensorArg((), values="unit")}


# Launches of the ops of the family `other`: those of a sibling in another family, and a few of their own.

_BLOCK = 1024  # elements, as in the element-wise kernels
_RESIZED = "upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward"
_TRANSFORMS = "_fft_r2c _fft_c2c _fft_c2r"
_CHANNELS_BESIDE, _SMOOTHED_BESIDE = 4, 16  # channels side by side from which kernels go along them (ATen)


def _number(call: GpuCall, position: int, default: float) -> float:
    value = call.value(position, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{call.op}: argument {position} is {value!r}, expected a number")
    return float(value)


def _arange(call: GpuCall) -> list[Launch]:
    start, end, step = _number(call, 0, 0), _number(call, 1, 0), _number(call, 2, 1)
    count = math.ceil((end - start) / step) if step else 0
    if count <= 0:
        raise InputError(f"{call.op}: no number lies from {start} to {end} by steps of {step}")
    result = fresh((count,), call.dtype_keyword("int64"))
    return [Launch(WITH_INDEX, count, (), (result,), {}, ((count / _BLOCK, 1.0),))]


def _power(call: GpuCall) -> list[Launch]:
    """A number to the power of a tensor: the number becomes a tensor first."""
    x = call.tensor(1)
    number = "int64" if isinstance(call.value(0), int) else "float32"
    powers = pointwise((hot((), number, 8), x), fresh(x.shape, x.dtype), tag=number, casts=number != x.dtype)
    return [cleared(fresh((), number)), powers]


def _given_result(call: GpuCall) -> list[Launch]:
    """The element-wise op whose result is given by name."""
    if call.keyword("out") is None:
        raise InputError(f"{call.op}: no result is given")
    return elementwise.launches(replace(call, op=f"aten::{call.name}.Tensor"))


def _scatter_reduced(call: GpuCall) -> list[Launch]:
    """As values are added at an index, after a second copy of what they are put into."""
    copied, kernel = indexing.scatter(replace(call, op="aten::scatter_add.default"))
    return [copied, copied, replace(kernel, path="reduced")]


def _resized(call: GpuCall) -> list[Launch]:
    """Images made larger or smaller, and their gradients; many channels side by side have kernels of their own."""
    x, backward, linear = call.tensor(0), call.name.endswith("_backward"), "bilinear" in call.name
    if len(x.shape) != 4 or x.numel == 0:
        raise InputError(f"{call.op}: {x.shape} is no batch of images")
    channels = x.shape[1]
    shape = call.integers(2) if backward else (*x.shape[:2], *call.integers(1))
    beside = x.strides[1] == 1 and channels > 1
    smoothed = linear and not backward
    own = beside and channels >= (_SMOOTHED_BESIDE if smoothed else _CHANNELS_BESIDE)
    result = fresh(shape, x.dtype)
    facts: dict[str, float] = {"size_0": shape[-1], "columns": channels, "grown": result.numel / x.numel}
    elements = max(x.numel, result.numel)
    grids: Grids = ((elements / _BLOCK, 1.0), (x.numel / _BLOCK, 1.0))
    if smoothed and not own:
        # A thread for every place of the result, which goes through all channels of all images.
        images = math.prod(x.shape[:2])
        facts["chain_ns"] = DEFAULTS["chain_ns"] * images
        grids = ((result.numel / images / _BLOCK, images), *grids)
    kernel = f"{call.name}_{'nhwc_' if own else ''}out_frame"
    results = [Launch(kernel, elements, (x,), (result,), facts, grids, "", x.dtype)]
    if beside and not own and not smoothed:
        results = [*copies(fresh(x.shape, x.dtype), x), *results, *copies(x, fresh(x.shape, x.dtype))]
    return [cleared(result), *results] if linear and backward else results


def launches(call: GpuCall) -> list[Launch]:
    """What an op of the family launches: what its siblings do, but for a few."""
    if call.name in _OWN and call.op not in _ELEMENTWISE:
        return _OWN[call.name](call)
    return optimizer.launches(call) if call.name.startswith("_foreach_") else elementwise.launches(call)


_COUNTED = "DeviceRadixSortHistogramKernel"  # a pass over keys that counts them, as `histc`'s own kernel is
_ELEMENTWISE = ("aten::pow.Tensor_Tensor", "aten::div.Scalar")
_OWN: dict[str, Rule] = {
    "new_zeros": lambda call: [cleared(fresh(call.integers(1), call.dtype_keyword(call.tensor(0).dtype)))],
    "scalar_tensor": lambda call: [cleared(fresh((), call.dtype_keyword("float32")))],
    "arange": _arange,
    "pow": _power,
    "sort": sorted_rows,
    "histc": lambda call: [
        cleared(fresh((call.integer(1, 100),), call.tensor(0).dtype)),  # as many bins as PyTorch makes by default
        over_indices(_COUNTED, call.tensor(0).numel),
    ],
    **dict.fromkeys(("div", "mul"), _given_result),
    "_assert_async": lambda _: [Launch("_assert_async_cuda_kernel", 1, grids=((1.0, 1.0),))],
    "scatter": indexing.scatter,
    "scatter_reduce": _scatter_reduced,
    **dict.fromkeys(_RESIZED.split(), _resized),
    **dict.fromkeys(_TRANSFORMS.split(), transformed),
}

FAMILY = Family(
    name="other",
    sweep=KernelSweep(
        (
            *(2, _draw_with_number, "div.Scalar(*x, 0.5)", "add.Scalar(*x, 0.5)", "add_.Scalar(*x, 0.5)"),
            *("sub.Scalar(*x, 0.5)", "sub_.Scalar(*x, 0.5)", "mul_.Scalar(*x, 0.5)", "lt.Scalar(*x, 0.5)"),
            "ne.Scalar(*x, 0.5)",
        ),
        (
            *(1.5, _draw_tensor, "ge.Tensor(*positive, *positive)", "clamp_min.Tensor(*positive, *positive)"),
            *("pow.Tensor_Tensor(*positive, *positive)", "remainder.Tensor(*positive, *positive)"),
            "clamp.Tensor(*positive, *positive)",
        ),
        (0.7, _draw_tensor, "lerp.Tensor(*unit, *unit, unit)", "lerp_.Tensor(*unit, *unit, unit)"),
        (1, _draw_given_result, "mul.out(*x, 0.25, out=x)"),
        (0.8, _draw_new, "new_zeros(*x, shape)", 'scalar_tensor(0.0, device="device", dtype=dtype)'),
        (
            *(0.3, lambda draw: {"end": draw.log_int(16, 65_536), "step": draw.pick((1, 2))}),
            'arange.start_step(0, end, step, device="device", dtype=int64)',
        ),
        (0.3, lambda draw: {"x": TensorArg((draw.size(16, 4096),), values="unit")}, "pow.Scalar(10_000, *x)"),
        (0.7, _draw_sorted, "sort(x)", "sort.stable(x, stable=True)"),
        (0.4, _draw_scattered, "scatter.value(*x, 1, index, 1.0)"),
        (
            # Lists of parameters with lists, a number, a number for each, or a number on the device.
            *(3, _draw_lists, "_foreach_add.Scalar(*tensors, 0.5)", "_foreach_add.ScalarList(*tensors, numbers)"),
            *("_foreach_add.Tensor(*tensors, unit)", "_foreach_add_.ScalarList(*tensors, numbers)"),
            *("_foreach_add_.Tensor(*tensors, unit)", "_foreach_div_.Scalar(*tensors, 0.5)"),
            *("_foreach_div_.Tensor(*tensors, unit)", "_foreach_mul.List(*tensors, tensors)"),
            *("_foreach_mul.Tensor(*tensors, unit)", "_foreach_mul_.ScalarList(*tensors, numbers)"),
            *("_foreach_lerp_.List(*tensors, tensors, tensors)", "_foreach_lerp_.ScalarList(*tensors, tensors, numbers)"),
            "_foreach_addcmul_.ScalarList(*tensors, tensors, tensors, numbers)",
        ),
    ),
    weight=0.5,
    rules=launches,
    kin=f"_assert_async arange.start div.out histc scatter_reduce.two {_RESIZED} {_TRANSFORMS}",
)
