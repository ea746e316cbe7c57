"""What any op has to do at least, from its arguments alone: operations and bytes. For rooflines; models know better."""

from __future__ import annotations

from steptime._models.kernels.call import Call, TensorArg
from steptime._ops.operations import PRODUCTS, TF32_BY_DEFAULT, operations_of


def base_of(op: str) -> str:
    """An op without its overload."""
    return op.partition(".")[0]


def precision_of(call: Call, tf32: bool) -> str:
    """What a product of this call computes in."""
    return "tf32" if tf32 and call.dtype == "float32" else call.dtype


def computed_in(op: str, dtype: str) -> str:
    """What a product of this type is computed in, unless its user said otherwise."""
    return "tf32" if dtype == "float32" and base_of(op) in TF32_BY_DEFAULT else dtype


def moved_bytes(call: Call) -> float:
    """Every argument on the device read once, and an output of the size of the largest result written."""
    return float(call.nbytes + _output_bytes(call))


def flop_of(call: Call) -> float:
    """Operations of a call (`operations_of`)."""
    return operations_of(base_of(call.op), call.args, tuple(call.tensors()))


def _output_bytes(call: Call) -> int:
    tensors = [tensor for tensor in call.tensors() if tensor.device == "device"]
    base = base_of(call.op)
    if not tensors or base.endswith("_"):
        # In place: the first argument (of a list, all its tensors) is written.
        first = call.args[0] if call.args else None
        every = first if isinstance(first, tuple) else (first,)
        return sum(tensor.nbytes for tensor in every if isinstance(tensor, TensorArg))
    shape = PRODUCTS.get(base)
    if shape is not None:
        operands = [tensor for tensor in tensors if len(tensor.shape) == shape]
        if len(operands) >= 2:
            left, right = operands[-2:]
            return left.nbytes // max(1, left.shape[-1]) * right.shape[-1]
    return max(tensor.nbytes for tensor in tensors)
