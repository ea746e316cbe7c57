"""Optimiser steps over lists of parameters: the `_foreach` sequences of SGD, Adam, AdamW and Adagrad, and their fused forms.

Row-wise Adagrad has no op of its own: its steps are in the sweeps of element-wise ops and reductions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from steptime._models.kernels.call import Argument, TensorArg
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import VECTORIZED, GpuCall, Launch, fresh, operand
from steptime._models.kernels.launches.iterator import pointwise
from steptime._models.kernels.launches.lists import CHUNK, over_lists
from steptime._models.kernels.sweep import Draw, Drawn, KernelSweep, Shape
from steptime.errors import InputError

_MOST_BYTES, _MOST_TENSORS = 400 << 20, 200  # all lists of a call together, one list
_ADAM = (
    "(weights, *weights, weights, positive, [], steps, lr=0.001, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=weight_decay,"
    " amsgrad=False, maximize=False)"
)


def _draw_transformer(draw: Draw) -> list[Shape]:
    """Layers of a Transformer: projections, two wide matrices, biases, two norms."""
    hidden, layers = draw.pick((128, 256, 384, 512, 768, 1024)), draw.log_int(1, 12)
    layer: list[Shape] = [(3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    layer += [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,), *((hidden,),) * 4]
    embedding: list[Shape] = [(draw.pick((512, 5000, 30522)), hidden)] if draw.chance(0.3) else []
    return embedding + layers * layer


def _draw_perceptron(draw: Draw) -> list[Shape]:
    """The dense part of a DLRM."""
    widths = [draw.size(1, 2048) for _ in range(int(draw.rng.integers(2, 12)))]
    return [shape for inputs, outputs in pairwise(widths) for shape in ((outputs, inputs), (outputs,))]


def _draw_convolutions(draw: Draw) -> list[Shape]:
    """Convolutions with their batch norms."""
    shapes: list[Shape] = []
    for _ in range(draw.log_int(2, 60)):
        inputs, outputs, tap = draw.pick((64, 128, 256, 512)), draw.pick((64, 128, 256, 512)), draw.pick((1, 1, 3))
        shapes += [(outputs, inputs, tap, tap), (outputs,), (outputs,)]
    return shapes


def _draw_scattered(draw: Draw) -> list[Shape]:
    """Tensors of any size."""
    return [(draw.log_int(1, 1_000_000),) for _ in range(draw.log_int(1, 200))]


def _draw_parameters(draw: Draw, lists: int) -> dict[str, Argument]:
    """As many of a model's parameters as so many lists of them may hold, and what goes with each."""
    models = (_draw_transformer, _draw_perceptron, _draw_convolutions, _draw_scattered)
    shapes, left = draw.pick(models, (0.35, 0.2, 0.25, 0.2))(draw)[:_MOST_TENSORS], _MOST_BYTES // (4 * lists)
    dtype = "float32" if draw.chance(0.8) else draw.floating()
    weights = []
    for shape in shapes:
        left -= math.prod(shape)
        if left < 0:
            break
        weights.append(TensorArg(shape, dtype))
    weights = weights or [TensorArg((1024,), dtype)]
    return {
        "weights": tuple(weights),
        "positive": tuple(TensorArg(weight.shape, dtype, values="positive") for weight in weights),
        "single": tuple(TensorArg(weight.shape) for weight in weights),
        "numbers": (0.999,) * len(weights),  # bias corrections and step sizes
        "steps": (TensorArg((), values="positive"),) * len(weights),
        "unit": TensorArg((), values="unit"),
        "scale": TensorArg((1,), values="positive"),
    }


def _draw_lists(draw: Draw) -> Drawn:
    several = sum(draw.form().count(name) for name in ("weights", "positive", "numbers")) > 1
    return _draw_parameters(draw, 3 if several else 2)


def _draw_adam(draw: Draw) -> Drawn:
    drawn = _draw_parameters(draw, 4)
    draw.form()
    return drawn | {"weight_decay": draw.pick((0.0, 0.01))}


def _draw_sgd(draw: Draw) -> Drawn:
    drawn = _draw_parameters(draw, 3)
    momentum = draw.pick((0.0, 0.9))
    return drawn | {"momentum": momentum, "momenta": drawn["weights"] if momentum else ()}


# Launches of optimiser steps over lists of parameters: `_foreach` ops, fused steps, and the gradient scaler's check.

# Lists that go side by side, and how many of them are read and written, of ATen's fused and unusual ops: parameters, gradients
# and moments. SGD goes by whether it has momentum.
_SPECIAL = {
    "_fused_adam_": (4, 4, 3),
    "_fused_adamw_": (4, 4, 3),
    "_fused_adagrad_": (3, 3, 2),
    "_foreach_norm": (1, 1, 0),
    "_foreach_zero_": (1, 0, 1),
    "_amp_foreach_non_finite_check_and_unscale_": (1, 1, 1),
}


_NEXT_SCALE = "_amp_update_scale_"


def launches(call: GpuCall) -> list[Launch]:
    """What an op over lists of tensors launches."""
    if call.name == _NEXT_SCALE:  # of the gradient scaler: one thread, as that of an assertion
        return [Launch("_assert_async_cuda_kernel", 1, grids=((1.0, 1.0),))]
    lists = _lists(call)
    first = next(iter(lists.values()))
    scale = call.optional_tensor(1)
    if call.name == "_foreach_mul_" and scale is not None and scale.dtype != first[0].dtype:
        # ATen falls back to one kernel per tensor where the number on the device has another dtype.
        every = call.tensor_list(0)
        return [pointwise((item, scale), item, tag="slow", casts=True, existing=True) for item in every]
    depth, read, written = _side_by_side(call.name, len(lists))
    reads = [operand(tensors[0], place) for place, tensors in lists.items()][:read]
    writes = [fresh(first[0].shape, first[0].dtype)] * written
    scalars = call.overload == "ScalarList"
    result = over_lists(first, call.gpu.sms, depth=depth, reads=reads, writes=writes, scalars=scalars)
    return _norms(first, result) if call.name == "_foreach_norm" else result


def _lists(call: GpuCall) -> dict[int, tuple[TensorArg, ...]]:
    """The lists of tensors by place; those of single numbers (steps) count as well, empty ones do not."""
    result: dict[int, tuple[TensorArg, ...]] = {}
    for index, arg in enumerate(call.args):
        if isinstance(arg, tuple) and arg and isinstance(arg[0], TensorArg):
            result[index] = tuple(item for item in arg if isinstance(item, TensorArg))
    if not result:
        raise InputError(f"{call.op}: no list of tensors among the arguments")
    lengths = [len(tensors) for tensors in result.values()]
    if len(set(lengths)) > 1:
        raise InputError(f"{call.op}: lists of {lengths} tensors, expected lists of one length")
    return result


def _side_by_side(name: str, lists: int) -> tuple[int, int, int]:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name == "_fused_sgd_":
        return min(lists, 3), min(lists, 3), min(lists, 3) - 1
    return lists + (not name.endswith("_")), lists, 1


def _norms(first: Sequence[TensorArg], launches: list[Launch]) -> list[Launch]:
    """Partial norms of every chunk are zeroed first and gathered last."""
    chunks = max(math.ceil(item.numel / CHUNK) for item in first)
    partial = fresh((len(first) * chunks,), "float32")
    zeroed = Launch(VECTORIZED, partial.numel, (), (partial,), grids=((partial.numel / 1024, 1.0),), tag="fill")
    facts = {"tensors": len(first), "chunks": chunks}
    gathered = Launch("lpnorm_cleanup", len(first), facts=facts, grids=((len(first), chunks),))
    return [zeroed, *launches, gathered]


FAMILY = Family(
    name="optimizer",
    sweep=KernelSweep(
        (
            # Calls of the multi-tensor optimisers, in the order in which Adam, SGD, Adagrad and gradient clipping make them.
            *(6, _draw_lists, "_foreach_lerp_.Scalar(*weights, *weights, 0.1)", "_foreach_mul_.Scalar(*weights, 0.999)"),
            *("_foreach_addcmul_.Scalar(weights, *weights, *weights, 0.001)", "_foreach_sqrt(*positive)"),
            *("_foreach_div_.ScalarList(*weights, numbers)", "_foreach_add_.Scalar(*weights, 1e-8)"),
            "_foreach_addcdiv_.ScalarList(*weights, positive, positive, numbers)",
            "_foreach_addcdiv_.Scalar(weights, *weights, *positive, -0.01)",
            "_foreach_add_.List(*weights, *weights, alpha=-0.01)",
            "_foreach_add.List(*weights, *weights, alpha=0.01)",
            *("_foreach_mul.Scalar(*weights, -0.01)", "_foreach_mul.ScalarList(*weights, numbers)"),
            *("_foreach_mul_.List(*weights, *weights)", "_foreach_div_.List(*weights, *weights)"),
            *("_foreach_norm.Scalar(*weights, 2)", "_foreach_zero_(*weights)"),
        ),
        # Gradients scaled by a number that is on the device.
        (0.4, _draw_lists, "_foreach_mul_.Tensor(*weights, unit)"),
        # The gradient scaler's check for infinities.
        (0.3, _draw_lists, "_amp_foreach_non_finite_check_and_unscale_(*single, scale, scale)"),
        (2.2, _draw_adam, (0.35, "_fused_adam_" + _ADAM), (0.65, "_fused_adamw_" + _ADAM)),
        (
            *(1.2, _draw_sgd),
            "_fused_sgd_(weights, *weights, momenta, weight_decay=0.0, momentum=momentum, lr=0.01, dampening=0.0,"
            " nesterov=False, maximize=False, is_first_step=False)",
        ),
        (
            *(0.6, _draw_lists),
            "_fused_adagrad_(weights, *weights, positive, steps, lr=0.01, lr_decay=0.0, weight_decay=0.0, eps=1e-10,"
            " maximize=False)",
        ),
    ),
    weight=7.0,
    rules=launches,
    kin=f"""
        {_NEXT_SCALE} _foreach_abs _foreach_abs_ _foreach_addcdiv _foreach_addcmul _foreach_clamp_max _foreach_clamp_max_
        _foreach_clamp_min _foreach_clamp_min_ _foreach_div _foreach_exp _foreach_exp_ _foreach_lerp _foreach_maximum
        _foreach_maximum_ _foreach_minimum _foreach_minimum_ _foreach_neg _foreach_neg_ _foreach_pow _foreach_pow_
        _foreach_reciprocal _foreach_reciprocal_ _foreach_rsqrt _foreach_rsqrt_ _foreach_sign _foreach_sign_ _foreach_sqrt_
        _foreach_sub _foreach_sub_
    """,
)
