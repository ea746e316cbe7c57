"""What element-wise ops launch: one kernel over the broadcast shape, by dtypes and strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steptime._models.kernels.call import Call
from steptime._models.kernels.launches import Launch, Operand, fresh, hot
from steptime._models.kernels.launches.arguments import base_name, keyword, tensors, value
from steptime._models.kernels.launches.copies import empty_like, memcpy
from steptime._models.kernels.launches.iteration import broadcast
from steptime._models.kernels.launches.pointwise import pointwise
from steptime.errors import InputError

# Ops whose result is boolean.
_TRUTHS = ("eq", "ne", "lt", "gt", "ge", "le", "logical_not", "logical_and", "logical_or", "isinf", "isnan")
# Ops that take a mask beside their operands without converting anything.
_MASKED = ("masked_fill", "where", "native_dropout_backward")
# Operands whose dtypes tell one functor from another.
_TAGGED = 3


def launches(call: Call) -> list[Launch]:
    """The kernel of an element-wise op; a masked fill that is not in place copies first."""
    inputs = tensors(call)
    if not inputs:
        raise InputError(f"{call.op}: no tensor among its arguments, expected at least one")
    name = base_name(call.op)
    kind, in_place = name.rstrip("_"), name.endswith("_")
    tag = _tag(call, kind, inputs)
    if kind == "masked_fill" and not in_place:
        x = inputs[0]
        copied = replace(hot(x.shape, x.dtype, 2 * x.nbytes), strides=x.strides)
        return [memcpy(x, empty_like(x)), pointwise((copied, inputs[1]), copied, tag=tag, existing=True)]
    dtype = _result_dtype(kind, inputs)
    output = inputs[0] if in_place else fresh(broadcast([one.shape for one in inputs]), dtype)
    return [pointwise(inputs, output, tag=tag, casts=_casts(kind, inputs), existing=in_place)]


def _tag(call: Call, kind: str, inputs: Sequence[Operand]) -> str:
    own = str(value(call, 1)) if kind == "pow" else str(keyword(call, "approximate", ""))
    return own + ",".join(one.dtype for one in inputs[:_TAGGED])


def _casts(kind: str, inputs: Sequence[Operand]) -> bool:
    return kind not in _MASKED and len({one.dtype for one in inputs}) > 1


def _result_dtype(kind: str, inputs: Sequence[Operand]) -> str:
    """The dtype that ATen promotes to: of tensors with dimensions before those without, of floats before integers."""
    if kind in _TRUTHS:
        return "bool"
    if kind in _MASKED:
        return inputs[1 if kind == "where" else 0].dtype
    sized = [one for one in inputs if one.shape] or list(inputs)
    floats = {one.dtype for one in sized if "float" in one.dtype}
    if floats:
        return floats.pop() if len(floats) == 1 else "float32"
    return max(sized, key=lambda one: one.item_bytes).dtype
