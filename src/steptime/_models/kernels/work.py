"""What any op has to do at least, from its arguments alone: operations and bytes. For rooflines; models know better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from steptime._models.kernels.call import Call, TensorArg

# PyTorch lets convolutions of float32 use TF32 unless told otherwise, and no matrix product.
_TF32_BY_DEFAULT = ("aten::convolution", "aten::convolution_backward")


class Shaped(Protocol):
    """A tensor argument of a call, or of an op of a program."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""

    @property
    def numel(self) -> int:
        """Elements."""


def base_of(op: str) -> str:
    """An op without its overload."""
    return op.partition(".")[0]


def precision_of(call: Call, tf32: bool) -> str:
    """What a product of this call computes in."""
    return "tf32" if tf32 and call.dtype == "float32" else call.dtype


def computed_in(op: str, dtype: str) -> str:
    """What a product of this type is computed in, unless its user said otherwise."""
    return "tf32" if dtype == "float32" and base_of(op) in _TF32_BY_DEFAULT else dtype


def moved_bytes(call: Call) -> float:
    """Every argument on the device read once, and an output of the size of the largest result written."""
    return float(call.nbytes + _output_bytes(call))


def flop_of(call: Call) -> float:
    """Multiplications and additions of products, convolutions and attention; one operation per element of anything else."""
    found = product_flop(call.op, call.args)
    return float(max((tensor.numel for tensor in call.tensors()), default=0)) if found is None else found


def is_product(op: str) -> bool:
    """Whether an op is a product, a convolution or attention."""
    return base_of(op) in _FLOP


def product_flop(op: str, args: Sequence[Any]) -> float | None:
    """Multiplications and additions of a product, a convolution or attention with these arguments; None of anything else."""
    count = _FLOP.get(base_of(op))
    return None if count is None else count(op, args, list(_tensors(args)))


def _tensors(args: Sequence[Any]) -> Iterator[Shaped]:
    for value in args:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif hasattr(value, "shape"):
            yield value


def _output_bytes(call: Call) -> int:
    tensors = [tensor for tensor in call.tensors() if tensor.device == "device"]
    base = base_of(call.op)
    if not tensors or base.endswith("_"):
        # In place: the first argument (of a list, all its tensors) is written.
        first = call.args[0] if call.args else None
        every = first if isinstance(first, tuple) else (first,)
        return sum(tensor.nbytes for tensor in every if isinstance(tensor, TensorArg))
    shape = _PRODUCTS.get(base)
    if shape is not None:
        operands = [tensor for tensor in tensors if len(tensor.shape) == shape]
        if len(operands) >= 2:
            left, right = operands[-2:]
            return left.nbytes // max(1, left.shape[-1]) * right.shape[-1]
    return max(tensor.nbytes for tensor in tensors)


def _product(_op: str, _args: Sequence[Any], tensors: list[Shaped]) -> float | None:
    if len(tensors) < 2:
        return None
    left, right = tensors[-2:]
    if len(left.shape) < 2 or len(right.shape) < 2:
        return None
    return 2.0 * left.numel * right.shape[-1]


def _convolution(_op: str, args: Sequence[Any], tensors: list[Shaped]) -> float | None:
    """Every element of the weight meets every output position of every sample."""
    if len(tensors) < 2:
        return None
    inputs, weight = tensors[0], tensors[1]
    stride = args[3] if len(args) > 3 else None
    if not isinstance(stride, tuple) or len(inputs.shape) < 3:
        return None
    positions = math.prod(
        max(1, size // int(step)) for size, step in zip(inputs.shape[2:], stride, strict=False) if isinstance(step, int)
    )
    return 2.0 * inputs.shape[0] * positions * weight.numel


def _convolution_backward(_op: str, args: Sequence[Any], tensors: list[Shaped]) -> float | None:
    """Two products of the forward's size: one for the input, one for the weight."""
    if len(tensors) < 3 or len(tensors[0].shape) < 3:
        return None
    gradient, weight = tensors[0], tensors[2]
    positions = gradient.shape[0] * math.prod(gradient.shape[2:])
    mask = args[-1]
    wanted = sum(bool(one) for one in mask[:2]) if isinstance(mask, tuple) else 2
    return 2.0 * wanted * positions * weight.numel


def _attention(op: str, _args: Sequence[Any], tensors: list[Shaped]) -> float | None:
    """Scores and their sum with the values; backward has five such products instead of two."""
    backward = "backward" in op
    shaped = [tensor for tensor in tensors if len(tensor.shape) == 4]
    if len(shaped) < 3:
        return None
    query, key = shaped[1:3] if backward else shaped[:2]
    batch, heads, keys, _ = key.shape
    return (10.0 if backward else 4.0) * query.numel * keys if batch * heads else 0.0


# Ops whose output is the product of their last two operands, and how many dimensions those have.
_PRODUCTS = {"aten::mm": 2, "aten::addmm": 2, "aten::bmm": 3, "aten::baddbmm": 3}

_FLOP: dict[str, Callable[[str, Sequence[Any], list[Shaped]], float | None]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_backward": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention_backward": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention,
}
