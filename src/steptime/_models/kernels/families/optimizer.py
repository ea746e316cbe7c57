"""Optimiser steps over lists of parameters: the `_foreach` sequences of SGD, Adam, AdamW and Adagrad, and their fused forms.

Row-wise Adagrad has no op of its own: its steps are in the sweeps of element-wise ops and reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from steptime._models.kernels.call import Argument, Call, TensorArg
from steptime._models.kernels.draw import Rng, Shape, chance, floating, log_int, mixture, options, pick, scalar, size
from steptime._models.kernels.family import Family
from steptime._models.kernels.launches import GpuCall, Launch, fresh, operand
from steptime._models.kernels.launches.arguments import base_name, optional_tensor, overload, tensor_list
from steptime._models.kernels.launches.chunks import CHUNK, over_lists
from steptime._models.kernels.launches.names import VECTORIZED
from steptime._models.kernels.launches.pointwise import pointwise
from steptime.errors import InputError

_MOST_BYTES = 400 << 20  # all lists of a call together
_Tensors = tuple[TensorArg, ...]


def _draw_transformer(rng: Rng) -> list[Shape]:
    """Layers of a Transformer: projections, two wide matrices, biases, two norms."""
    hidden, layers = pick(rng, (128, 256, 384, 512, 768, 1024)), log_int(rng, 1, 12)
    layer: list[Shape] = [(3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,)]
    layer += [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,), *((hidden,),) * 4]
    embedding: list[Shape] = [(pick(rng, (512, 5000, 30522)), hidden)] if chance(rng, 0.3) else []
    return embedding + layers * layer


def _draw_perceptron(rng: Rng) -> list[Shape]:
    """The dense part of a DLRM."""
    widths = [size(rng, 1, 2048) for _ in range(int(rng.integers(2, 12)))]
    return [shape for inputs, outputs in pairwise(widths) for shape in ((outputs, inputs), (outputs,))]


def _draw_convolutions(rng: Rng) -> list[Shape]:
    """Convolutions with their batch norms."""
    shapes: list[Shape] = []
    for _ in range(log_int(rng, 2, 60)):
        inputs, outputs, tap = pick(rng, (64, 128, 256, 512)), pick(rng, (64, 128, 256, 512)), pick(rng, (1, 1, 3))
        shapes += [(outputs, inputs, tap, tap), (outputs,), (outputs,)]
    return shapes


def _draw_scattered(rng: Rng) -> list[Shape]:
    """Tensors of any size."""
    return [(log_int(rng, 1, 1_000_000),) for _ in range(log_int(rng, 1, 200))]


def _draw_parameters(rng: Rng, lists: int) -> tuple[list[Shape], str]:
    """As many of a model's parameters as so many lists of them may hold, at most 200, and their dtype."""
    shapes = pick(rng, (_draw_transformer, _draw_perceptron, _draw_convolutions, _draw_scattered), (0.35, 0.2, 0.25, 0.2))(rng)[
        :200
    ]
    dtype = "float32" if chance(rng, 0.8) else floating(rng)
    kept, left = [], _MOST_BYTES // (4 * lists)
    for shape in shapes:
        left -= math.prod(shape)
        if left < 0:
            break
        kept.append(shape)
    return kept or [(1024,)], dtype


def _tensors(shapes: list[Shape], dtype: str, values: str = "normal") -> _Tensors:
    return tuple(TensorArg(shape, dtype, values=values) for shape in shapes)


def _draw_unary(op: str, *rest: Argument, values: str = "normal", rng: Rng) -> Call:
    return Call(op, (_tensors(*_draw_parameters(rng, 2), values), *rest))


def _draw_binary(op: str, *rest: Argument, rng: Rng, **named: Argument) -> Call:
    shapes, dtype = _draw_parameters(rng, 3)
    return Call(op, (_tensors(shapes, dtype), _tensors(shapes, dtype), *rest), options(**named), written=(0, 1))


def _draw_ternary(op: str, *rest: Argument, last: str, rng: Rng) -> Call:
    shapes, dtype = _draw_parameters(rng, 3)
    lists = _tensors(shapes, dtype), _tensors(shapes, dtype), _tensors(shapes, dtype, last)
    return Call(op, (*lists, *rest), written=(1, 2))


def _draw_per_tensor(op: str, lists: int, rng: Rng) -> Call:
    """One number per tensor: bias corrections and step sizes."""
    shapes, dtype = _draw_parameters(rng, 3)
    operands = tuple(_tensors(shapes, dtype, "positive" if place else "normal") for place in range(lists))
    return Call(op, (*operands, (0.999,) * len(shapes)))


def _draw_clipped(rng: Rng) -> Call:
    """Gradients scaled by a number that is on the device."""
    return Call("aten::_foreach_mul_.Tensor", (_tensors(*_draw_parameters(rng, 2)), scalar(values="unit")))


def _draw_unscaled(rng: Rng) -> Call:
    """The gradient scaler's check for infinities."""
    shapes, _ = _draw_parameters(rng, 2)
    item = TensorArg((1,), values="positive")
    return Call("aten::_amp_foreach_non_finite_check_and_unscale_.default", (_tensors(shapes, "float32"), item, item))


_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False}


def _draw_fused_adam(rng: Rng) -> Call:
    shapes, dtype = _draw_parameters(rng, 4)
    weights = _tensors(shapes, dtype)
    steps = (scalar(values="positive"),) * len(shapes)
    op = pick(rng, ("aten::_fused_adam_.default", "aten::_fused_adamw_.default"), (0.35, 0.65))
    lists: tuple[Argument, ...] = (weights, weights, weights, _tensors(shapes, dtype, "positive"), (), steps)
    return Call(op, lists, options(lr=1e-3, weight_decay=pick(rng, (0.0, 0.01)), **_ADAM), written=(1,))


def _draw_fused_sgd(rng: Rng) -> Call:
    shapes, dtype = _draw_parameters(rng, 3)
    weights, momentum = _tensors(shapes, dtype), pick(rng, (0.0, 0.9))
    named = options(
        weight_decay=0.0, momentum=momentum, lr=0.01, dampening=0.0, nesterov=False, maximize=False, is_first_step=False
    )
    return Call("aten::_fused_sgd_.default", (weights, weights, weights if momentum else ()), named, written=(1,))


def _draw_fused_adagrad(rng: Rng) -> Call:
    shapes, dtype = _draw_parameters(rng, 3)
    weights, steps = _tensors(shapes, dtype), (scalar(values="positive"),) * len(shapes)
    named = options(lr=0.01, lr_decay=0.0, weight_decay=0.0, eps=1e-10, maximize=False)
    return Call("aten::_fused_adagrad_.default", (weights, weights, _tensors(shapes, dtype, "positive"), steps), named, (1,))


# The calls of the multi-tensor optimisers, in the order in which Adam, SGD, Adagrad and gradient clipping make them.
_FOREACH: dict[str, Callable[..., Call]] = {
    "aten::_foreach_lerp_.Scalar": partial(_draw_binary, "aten::_foreach_lerp_.Scalar", 0.1),
    "aten::_foreach_mul_.Scalar": partial(_draw_unary, "aten::_foreach_mul_.Scalar", 0.999),
    "aten::_foreach_addcmul_.Scalar": partial(_draw_ternary, "aten::_foreach_addcmul_.Scalar", 0.001, last="normal"),
    "aten::_foreach_sqrt.default": partial(_draw_unary, "aten::_foreach_sqrt.default", values="positive"),
    "aten::_foreach_div_.ScalarList": partial(_draw_per_tensor, "aten::_foreach_div_.ScalarList", 1),
    "aten::_foreach_add_.Scalar": partial(_draw_unary, "aten::_foreach_add_.Scalar", 1e-8),
    "aten::_foreach_addcdiv_.ScalarList": partial(_draw_per_tensor, "aten::_foreach_addcdiv_.ScalarList", 3),
    "aten::_foreach_addcdiv_.Scalar": partial(_draw_ternary, "aten::_foreach_addcdiv_.Scalar", -0.01, last="positive"),
    "aten::_foreach_add_.List": partial(_draw_binary, "aten::_foreach_add_.List", alpha=-0.01),
    "aten::_foreach_add.List": partial(_draw_binary, "aten::_foreach_add.List", alpha=0.01),
    "aten::_foreach_mul.Scalar": partial(_draw_unary, "aten::_foreach_mul.Scalar", -0.01),
    "aten::_foreach_mul.ScalarList": partial(_draw_per_tensor, "aten::_foreach_mul.ScalarList", 1),
    "aten::_foreach_mul_.List": partial(_draw_binary, "aten::_foreach_mul_.List"),
    "aten::_foreach_div_.List": partial(_draw_binary, "aten::_foreach_div_.List"),
    "aten::_foreach_norm.Scalar": partial(_draw_unary, "aten::_foreach_norm.Scalar", 2),
    "aten::_foreach_zero_.default": partial(_draw_unary, "aten::_foreach_zero_.default"),
}


def _draw_foreach(rng: Rng) -> Call:
    return pick(rng, tuple(_FOREACH.values()))(rng=rng)


# Launches of optimiser steps over lists of parameters: `_foreach` ops, fused steps, and the gradient scaler's check.


@dataclass(frozen=True, slots=True)
class _Lists:
    """How many lists go side by side, how many of them are read and written."""

    depth: int
    reads: int
    writes: int


# ATen's fused and unusual ops: parameters, gradients and moments side by side. SGD goes by whether it has momentum.
_SPECIAL = {
    "_fused_adam_": _Lists(4, 4, 3),
    "_fused_adamw_": _Lists(4, 4, 3),
    "_fused_adagrad_": _Lists(3, 3, 2),
    "_foreach_norm": _Lists(1, 1, 0),
    "_foreach_zero_": _Lists(1, 0, 1),
    "_amp_foreach_non_finite_check_and_unscale_": _Lists(1, 1, 1),
}


def launches(call: GpuCall) -> list[Launch]:
    """What an op over lists of tensors launches."""
    name = base_name(call.op)
    lists = _lists(call)
    first = next(iter(lists.values()))
    scale = optional_tensor(call, 1)
    if name == "_foreach_mul_" and scale is not None and scale.dtype != first[0].dtype:
        # ATen falls back to one kernel per tensor where the number on the device has another dtype.
        every = tensor_list(call, 0)
        return [pointwise((item, scale), item, tag="slow", casts=True, existing=True) for item in every]
    way = _way(name, len(lists))
    reads = [operand(tensors[0], place) for place, tensors in lists.items()][: way.reads]
    writes = [fresh(first[0].shape, first[0].dtype)] * way.writes
    result = over_lists(
        first, call.gpu.sms, depth=way.depth, reads=reads, writes=writes, scalars=overload(call.op) == "ScalarList"
    )
    return _norms(first, result) if name == "_foreach_norm" else result


def _lists(call: Call) -> dict[int, tuple[TensorArg, ...]]:
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


def _way(name: str, lists: int) -> _Lists:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name == "_fused_sgd_":
        return _Lists(min(lists, 3), min(lists, 3), min(lists, 3) - 1)
    return _Lists(lists + (not name.endswith("_")), lists, 1)


def _norms(first: Sequence[TensorArg], found: list[Launch]) -> list[Launch]:
    """Partial norms of every chunk are zeroed first and gathered last."""
    chunks = max(math.ceil(item.numel / CHUNK) for item in first)
    partial = fresh((len(first) * chunks,), "float32")
    zeroed = Launch(VECTORIZED, partial.numel, (), (partial,), grids=((partial.numel / 1024, 1.0),), tag="fill")
    facts = {"tensors": len(first), "chunks": chunks}
    gathered = Launch("lpnorm_cleanup", len(first), facts=facts, grids=((float(len(first)), float(chunks)),))
    return [zeroed, *found, gathered]


FAMILY = Family(
    name="optimizer",
    ops=(
        *_FOREACH,
        *("aten::_foreach_mul_.Tensor", "aten::_amp_foreach_non_finite_check_and_unscale_.default"),
        *("aten::_fused_adam_.default", "aten::_fused_adamw_.default"),
        *("aten::_fused_sgd_.default", "aten::_fused_adagrad_.default"),
    ),
    sweep=mixture(
        *((6, _draw_foreach), (0.4, _draw_clipped), (0.3, _draw_unscaled), (2.2, _draw_fused_adam)),
        *((1.2, _draw_fused_sgd), (0.6, _draw_fused_adagrad)),
    ),
    weight=7.0,
    rules=launches,
)
