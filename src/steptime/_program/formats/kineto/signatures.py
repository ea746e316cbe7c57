"""The arguments of ops as Kineto writes them (`Input Dims`, `Input type`, `Input Strides`, `Concrete Inputs`) -> Signature."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from steptime._program.formats.kineto.events import RawSignature
from steptime._program.program import Signature, Tensor, Value
from steptime._units import dtype_name

_NOT_TENSORS = {"", "Scalar", "ScalarList", "Int", "Double", "Bool", "None", "String", "Device"}


def read_signatures(raw: Iterable[RawSignature]) -> tuple[Signature, ...]:
    """One Signature per distinct raw text, in the same order; unreadable ones are empty."""
    return tuple(_signature(*parts) for parts in raw)


def _signature(dims: bytes, types: bytes, strides: bytes, concrete: bytes) -> Signature:
    shapes, kinds = _list(dims), _list(types)
    steps, values = _list(strides), _list(concrete)
    inputs: list[Value] = []
    for index, shape in enumerate(shapes):
        kind = kinds[index] if index < len(kinds) and isinstance(kinds[index], str) else ""
        stride = steps[index] if index < len(steps) else None
        value = values[index] if index < len(values) else None
        inputs.append(_value(shape, kind, stride, value))
    return Signature(tuple(inputs))


def _value(shape: Any, kind: str, stride: Any, value: Any) -> Value:
    if kind.startswith("TensorList") and isinstance(shape, list):
        strides = stride if isinstance(stride, list) else []
        return tuple(
            Tensor(_ints(s), "", _ints(strides[i]) if i < len(strides) else None)
            for i, s in enumerate(shape)
            if isinstance(s, list)
        )
    if kind in _NOT_TENSORS or kind.startswith("GenericList"):
        return _literal(value)
    return Tensor(_ints(shape), dtype_name(kind), _ints(stride) if isinstance(stride, list) and stride else None)


def _literal(value: Any) -> Value:
    """A scalar or list written as text."""
    if not isinstance(value, str):
        return value if isinstance(value, int | float) else None
    if value in ("", "None"):
        return None
    if value in ("True", "False"):
        return value == "True"
    try:
        decoded = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value
    if isinstance(decoded, list):
        return tuple(item for item in decoded if isinstance(item, int | float | str | bool))
    return decoded if isinstance(decoded, int | float) else value


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        return ()
    return tuple(v for v in values if type(v) is int and -(2**63) <= v < 2**63)


def _list(text: bytes) -> list[Any]:
    if not text:
        return []
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return []
    return decoded if isinstance(decoded, list) else []
