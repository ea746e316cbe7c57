"""What any op has to do at least, from its arguments alone: operations and bytes. For rooflines; models know better."""

from __future__ import annotations

import math
from collections.abc import Callable

from steptime._models.kernels.call import Call, TensorArg


def base_of(op: str) -> str:
    """An op without its overload."""
    return op.partition(".")[0]


def precision_of(call: Call, tf32: bool) -> str:
    """What a product of this call computes in."""
    return "tf32" if tf32 and call.dtype == "float32" else call.dtype


def moved_bytes(call: Call) -> float:
    """Every argument on the device read once, and an output of the size of the largest result written."""
    return float(call.nbytes + _output_bytes(call))


def flop_of(call: Call) -> float:
    """Multiplications and additions of products, convolutions and attention; one operation per element of anything else."""
    tensors = list(call.tensors())
    count = _FLOP.get(base_of(call.op))
    if count is not None:
        found = count(call, tensors)
        if found is not None:
            return found
    return float(max((tensor.numel for tensor in tensors), default=0))


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


def _product(_: Call, tensors: list[TensorArg]) -> float | None:
    if len(tensors) < 2:
        return None
    left, right = tensors[-2:]
    if len(left.shape) < 2 or len(right.shape) < 2:
        return None
    return 2.0 * left.numel * right.shape[-1]


def _convolution(call: Call, tensors: list[TensorArg]) -> float | None:
    """Every element of the weight meets every output position of every sample."""
    if len(tensors) < 2:
        return None
    inputs, weight = tensors[0], tensors[1]
    stride = call.args[3] if len(call.args) > 3 else None
    if not isinstance(stride, tuple) or len(inputs.shape) < 3:
        return None
    positions = math.prod(
        max(1, size // int(step)) for size, step in zip(inputs.shape[2:], stride, strict=False) if isinstance(step, int)
    )
    return 2.0 * inputs.shape[0] * positions * weight.numel


def _convolution_backward(call: Call, tensors: list[TensorArg]) -> float | None:
    """Two products of the forward's size: one for the input, one for the weight."""
    if len(tensors) < 3 or len(tensors[0].shape) < 3:
        return None
    gradient, weight = tensors[0], tensors[2]
    positions = gradient.shape[0] * math.prod(gradient.shape[2:])
    mask = call.args[-1]
    wanted = sum(bool(one) for one in mask[:2]) if isinstance(mask, tuple) else 2
    return 2.0 * wanted * positions * weight.numel


def _attention(call: Call, tensors: list[TensorArg]) -> float | None:
    """Scores and their sum with the values; backward has five such products instead of two."""
    backward = "backward" in call.op
    shaped = [tensor for tensor in tensors if len(tensor.shape) == 4]
    if len(shaped) < 3:
        return None
    query, key = shaped[1:3] if backward else shaped[:2]
    batch, heads, keys, _ = key.shape
    return (10.0 if backward else 4.0) * query.numel * keys if batch * heads else 0.0


# Ops whose output is the product of their last two operands, and how many dimensions those have.
_PRODUCTS = {"aten::mm": 2, "aten::addmm": 2, "aten::bmm": 3, "aten::baddbmm": 3}

_FLOP: dict[str, Callable[[Call, list[TensorArg]], float | None]] = {
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
