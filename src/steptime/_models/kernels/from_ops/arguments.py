"""A traced op's arguments as those of a `Call`, written the way calls are recorded beside the measured kernels.

Three things a trace does not tell: the values of numbers that PyTorch wrapped into tensors, more than six decimals of a float,
and which integers an index holds. Where shapes say what is indexed, that is the range; else it stays open (`high` 0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from steptime._models.kernels.call import Argument, DtypeArg, TensorArg, contiguous
from steptime._ops.catalogue import INDEX_ARGUMENT, Integers, OpKind, Overload, Parameter, op_kind
from steptime._program.program import Tensor, Value

# c10::ScalarType, c10::Layout and c10::MemoryFormat by number, as execution traces write them.
_DTYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32", 7: "float64", 9: "complex64",
    10: "complex128", 11: "bool", 15: "bfloat16",
}  # fmt: skip
_LAYOUTS = {0: "strided", 1: "sparse"}
_FORMATS = {0: "contiguous_format", 1: "preserve_format", 2: "channels_last", 3: "channels_last_3d"}
# What a number becomes when an op that takes tensors is given one; its value is not recorded.
_WRAPPED: dict[str, float | int | bool] = {"float64": 1.0, "int64": 1, "bool": True}
Named = tuple[tuple[str, Argument], ...]


def call_arguments(overload: Overload, values: Sequence[Value], *, ordered: bool = False) -> tuple[tuple[Argument, ...], Named]:
    """Positional and named arguments, defaults left out as PyTorch's dispatcher leaves them out.

    `ordered` says that the index along a dimension counts.
    """
    positional: list[Argument] = []
    kept = 0
    named: list[tuple[str, Argument]] = []
    for index, (value, parameter) in enumerate(zip(values, overload.parameters, strict=False)):
        given = parameter.required or value != parameter.default
        if parameter.name:
            if given and parameter.type != "generator":
                named.append((parameter.name, _argument(value, parameter, overload, values, index)))
            continue
        result = _argument(value, parameter, overload, values, index)
        if ordered and index == INDEX_ARGUMENT and isinstance(result, TensorArg):
            result = replace(result, values="ordered")
        positional.append(result)
        kept = len(positional) if given else kept
    return tuple(positional[:kept]), tuple(sorted(named, key=lambda item: item[0]))


def _argument(value: Value, parameter: Parameter, overload: Overload, values: Sequence[Value], place: int) -> Argument:
    if isinstance(value, Tensor):
        return _wrapped(value, overload.op) or _tensor(value, overload, values, place)
    if isinstance(value, tuple):
        return tuple(_argument(each, parameter, overload, values, place) for each in value)
    if parameter.type == "device" and value is not None:
        return "cpu" if value == "cpu" else "device"
    if isinstance(value, str):
        return float(value) if parameter.type in ("S", "f") else value
    if isinstance(value, int) and not isinstance(value, bool):
        return _enumerated(value, parameter.type)
    return value


def _wrapped(tensor: Tensor, op: str) -> float | int | None:
    """The number that a tensor stands for, whatever its value was; None for a tensor proper."""
    if tensor.shape or tensor.device != "cpu" or op_kind(op).host_tensors:
        return None
    return _WRAPPED.get(tensor.dtype)


def _enumerated(value: int, kind: str) -> Argument:
    if kind == "dtype":
        return DtypeArg(_DTYPES.get(value, str(value)))
    if kind in ("layout", "format"):
        return (_LAYOUTS if kind == "layout" else _FORMATS).get(value, str(value))
    return float(value) if kind == "f" else value


def _tensor(tensor: Tensor, overload: Overload, values: Sequence[Value], place: int) -> TensorArg:
    where = "device" if tensor.device != "cpu" else "pinned" if True in values else "pageable"
    drawn, high = "normal", 0
    if tensor.dtype == "bool":
        drawn = "mask"
    elif tensor.dtype.startswith(("int", "uint")):
        drawn, high = _integers(tensor, op_kind(overload.op), values, place)
    elif op_kind(overload.op).probabilities:
        drawn = "unit"
    return TensorArg(tensor.shape, tensor.dtype, own_strides(tensor.shape, tensor.strides), high, where, drawn)


@lru_cache(maxsize=1 << 14)
def own_strides(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Strides where they are not those of a contiguous tensor, else None. Dimensions of one element have no say."""
    if strides is None or len(strides) != len(shape) or 0 in shape:
        return None
    expected = contiguous(shape)
    plain = all(size == 1 or stride == wanted for size, stride, wanted in zip(shape, strides, expected, strict=True))
    return None if plain else strides


def _integers(tensor: Tensor, op: OpKind, values: Sequence[Value], place: int) -> tuple[str, int]:
    """Which integers an op takes at a place, by what it indexes."""
    if not tensor.numel:
        return "normal", 1
    match op.integers(place):
        case Integers.OFFSETS:
            return "offsets", _numel(values[1])
        case Integers.ROWS:
            return "normal", _size(values[0], 0)
        case Integers.COUNTED:
            return "normal", values[2] if isinstance(values[2], int) else 0
        case Integers.ALONG:
            return "normal", _size(values[0], values[1]) or 1
        case Integers.CLASSES if tensor.shape:
            classes = values[1] if op.plain.endswith("_backward") else values[0]
            wide = isinstance(classes, Tensor) and len(classes.shape) >= 3
            return "normal", _size(classes, 1 if wide else -1)
        case Integers.SEVERAL:
            return _index(tensor, values)
    return "normal", 0


def _index(tensor: Tensor, values: Sequence[Value]) -> tuple[str, int]:
    """One of several indices: rows and columns below the diagonal of a square are taken for what DLRM's interaction takes."""
    indices, indexed = values[1], values[0]
    if not isinstance(indices, tuple) or not isinstance(indexed, Tensor) or len(tensor.shape) != 1:
        return "normal", 0
    at = next(index for index, each in enumerate(indices) if each is tensor)
    high = indexed.shape[at] if at < len(indexed.shape) else 0
    square = len(indices) >= 2 and indexed.shape[len(indices) - 2 : len(indices)] == (high, high)
    if square and at >= len(indices) - 2 and 2 * tensor.numel == high * (high - 1):
        return ("lower_row" if at == len(indices) - 2 else "lower_column"), high
    return "normal", high


def _numel(value: Value) -> int:
    return math.prod(value.shape) if isinstance(value, Tensor) else 0


def _size(value: Value, dimension: Value) -> int:
    if not isinstance(value, Tensor) or not isinstance(dimension, int) or not value.shape:
        return 0
    return value.shape[dimension] if -len(value.shape) <= dimension < len(value.shape) else 0
