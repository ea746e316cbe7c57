"""Launches of optimiser steps over lists of parameters: `_foreach` ops, fused steps, and the gradient scaler's check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steptime._models.kernels.call import Call, TensorArg
from steptime._models.kernels.launches import Launch, fresh, operand
from steptime._models.kernels.launches.arguments import base_name, optional_tensor, overload, tensor_list
from steptime._models.kernels.launches.chunks import CHUNK, over_lists
from steptime._models.kernels.launches.names import VECTORIZED
from steptime._models.kernels.launches.pointwise import pointwise
from steptime.errors import InputError


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


def launches(call: Call) -> list[Launch]:
    """What an op over lists of tensors launches."""
    name = base_name(call.op)
    lists = _lists(call)
    first = next(iter(lists.values()))
    scale = optional_tensor(call, 1)
    if name == "_foreach_mul_" and scale is not None and scale.dtype != first[0].dtype:
        # ATen falls back to one kernel per tensor where the number on the device has another dtype.
        every = tensor_list(call, 0)
        return [pointwise((one, scale), one, tag="slow", casts=True, existing=True) for one in every]
    way = _way(name, len(lists))
    reads = [operand(tensors[0], place) for place, tensors in lists.items()][: way.reads]
    writes = [fresh(first[0].shape, first[0].dtype)] * way.writes
    found = over_lists(first, depth=way.depth, reads=reads, writes=writes, scalars=overload(call.op) == "ScalarList")
    return _norms(first, found) if name == "_foreach_norm" else found


def _lists(call: Call) -> dict[int, tuple[TensorArg, ...]]:
    """The lists of tensors by place; those of single numbers (steps) count as well, empty ones do not."""
    found: dict[int, tuple[TensorArg, ...]] = {}
    for place, given in enumerate(call.args):
        if isinstance(given, tuple) and given and isinstance(given[0], TensorArg):
            found[place] = tuple(one for one in given if isinstance(one, TensorArg))
    if not found:
        raise InputError(f"{call.op}: no list of tensors among the arguments")
    lengths = [len(tensors) for tensors in found.values()]
    if len(set(lengths)) > 1:
        raise InputError(f"{call.op}: lists of {lengths} tensors, expected lists of one length")
    return found


def _way(name: str, lists: int) -> _Lists:
    if name in _SPECIAL:
        return _SPECIAL[name]
    if name == "_fused_sgd_":
        return _Lists(min(lists, 3), min(lists, 3), min(lists, 3) - 1)
    return _Lists(lists + (not name.endswith("_")), lists, 1)


def _norms(first: Sequence[TensorArg], found: list[Launch]) -> list[Launch]:
    """Partial norms of every chunk are zeroed first and gathered last."""
    chunks = max(math.ceil(one.numel / CHUNK) for one in first)
    partial = fresh((len(first) * chunks,), "float32")
    zeroed = Launch(VECTORIZED, partial.numel, (), (partial,), grids=((partial.numel / 1024, 1.0),), tag="fill")
    facts = {"tensors": len(first), "chunks": chunks}
    gathered = Launch("lpnorm_cleanup", len(first), facts=facts, grids=((float(len(first)), float(chunks)),))
    return [zeroed, *found, gathered]
