"""Arguments in an execution trace: parallel lists of values, shapes, types and strides become a `Signature`, or a `Comm`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from steptime._program.collectives import MOST_BYTES, collective_kind
from steptime._program.execution import Comm
from steptime._program.program import Signature, Tensor, Value, tensors_in
from steptime._units import dtype_bytes, dtype_name

# Deeper lists than this come from damage, not from PyTorch; what lies below is left out.
_DEEPEST = 16
_INT64 = 2**63

# Begins the name of a group that is known by its address alone.
ADDRESS = "@"


def integer(value: Any, default: int = -1) -> int:
    """A whole number that fits a column, or the default for anything else."""
    return value if type(value) is int and -_INT64 <= value < _INT64 else default


def text(value: Any) -> str:
    """A string, or nothing."""
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class ArgumentLists:
    """The parallel lists behind one side of a node."""

    values: Sequence[Any]
    shapes: Sequence[Any]
    types: Sequence[Any]
    strides: Sequence[Any] | None

    @classmethod
    def of(cls, values: Any, shapes: Any, types: Any, strides: Any) -> ArgumentLists:
        """Lists of one length, whatever was recorded."""
        known = values if isinstance(values, list) else []
        count = len(known)
        return cls(known, _padded(shapes, count), _padded(types, count), _padded(strides, count) if strides else None)

    def parsed(self) -> tuple[Value, ...]:
        """The arguments as values with tensors in them."""
        return ArgumentForm.of(self.shapes, self.types, self.strides, len(self.values)).parsed(self.values)


def _padded(values: Any, count: int) -> Sequence[Any]:
    known = values if isinstance(values, list) else []
    return known if len(known) == count else [*known[:count], *[None] * (count - len(known))]


class ArgumentForm:
    """How values of one length are read: what their shapes, types and strides say, which equal calls share."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[_TensorForm | _PlainForm]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, shapes: Any, types: Any, strides: Any, count: int, depth: int = 0) -> ArgumentForm:
        """Of so many values."""
        columns = zip(_padded(shapes, count), map(text, _padded(types, count)), _padded(strides, count), strict=True)
        return cls([
            _TensorForm(_sizes(shape), _dtype(kind), _sizes(stride))
            if kind.startswith("Tensor(")
            else _PlainForm(shape, kind, stride, depth)
            for shape, kind, stride in columns
        ])  # fmt: skip

    def parsed(self, values: Sequence[Any]) -> tuple[Value, ...]:
        """The values, with tensors in them."""
        return tuple([part.value(value) for part, value in zip(self._parts, values, strict=True)])


class _TensorForm:
    """How a tensor is read."""

    __slots__ = ("_dtype", "_sizes", "_strides")

    def __init__(self, sizes: tuple[int, ...] | None, dtype: str | None, strides: tuple[int, ...] | None) -> None:
        self._sizes, self._dtype, self._strides = sizes, dtype, strides

    def value(self, value: Any) -> Value:
        """The tensor; None where it is not defined."""
        if self._dtype is None:
            return None
        # The oldest traces hold the id alone.
        id, storage, offset, numel, _, device = _padded(value if isinstance(value, list) else [value], 6)
        return Tensor(
            self._sizes if self._sizes is not None else (integer(numel, 0),),
            self._dtype,
            self._strides,
            integer(id, 0),
            integer(storage, 0) or None,
            integer(offset, 0),
            text(device) or None,
        )


class _PlainForm:
    """How a number, a text, or a list of whatever is read."""

    __slots__ = ("_depth", "_inside", "_kind", "_shape", "_strides")

    def __init__(self, shape: Any, kind: str, strides: Any, depth: int) -> None:
        self._shape, self._kind, self._strides, self._depth = shape, kind, strides, depth
        self._inside: dict[int, ArgumentForm] = {}  # by length

    def value(self, value: Any) -> Value:
        """The value; None for what is none."""
        if isinstance(value, list):
            return self._listed(value)
        if isinstance(value, dict) or value == "<None>":
            return None
        scalar: Value = value
        return scalar

    def _listed(self, values: list[Any]) -> Value:
        if self._depth >= _DEEPEST:
            return None
        form = self._inside.get(len(values))
        if form is None:
            kinds = _element_types(self._kind)
            form = ArgumentForm.of(self._shape, kinds, self._strides, len(values), self._depth + 1)
            self._inside[len(values)] = form
        return form.parsed(values)


@lru_cache(maxsize=256)
def _dtype(kind: str) -> str | None:
    """The dtype in `Tensor(...)`; None for a tensor that is not defined."""
    name = dtype_name(kind)
    return None if name.startswith("nullptr") else name


def _sizes(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list) or any(type(size) is not int or not -_INT64 <= size < _INT64 for size in values):
        return None
    return tuple(values)


@lru_cache(maxsize=4096)
def _element_types(kind: str) -> list[str]:
    begin = kind.find("[")
    if begin < 0 or not kind.endswith("]"):
        return []
    parts, depth, start = [], 0, begin + 1
    for at in range(begin + 1, len(kind)):
        letter = kind[at]
        if letter in "[(<":
            depth += 1
        elif depth and letter in "])>":
            depth -= 1
        elif depth == 0 and letter in ",]":
            parts.append(kind[start:at])
            start = at + 1
    return parts if parts != [""] else []


def comm(inputs: ArgumentLists, signature: Signature, attrs: Mapping[str, Any]) -> Comm | None:
    """What a `record_param_comms` node says: tensors, sequence, group, rank, name, splits, then rank pattern and group size.

    The name is the last string argument, so that one rule serves groups given as number, as name, and as name and description.
    """
    at = max((i for i, kind in enumerate(inputs.types) if kind == "String"), default=-1)
    if at >= 3 and isinstance(inputs.values[at], str):
        values = signature.inputs
        sequence = values[at - 3]
        name = text(attrs.get("collective_name")) or inputs.values[at]
        call = Comm(
            name=name,
            kind=collective_kind(name),
            group=_group(values[at - 2]),
            rank=integer(values[at - 1]),
            sequence=integer(sequence[0] if isinstance(sequence, tuple) and sequence else sequence),
            in_splits=_splits(values, at + 1),
            out_splits=_splits(values, at + 2),
        )
        sent = values[: at - 3]
    elif name := text(attrs.get("collective_name")):
        call, sent = Comm(name=name, kind=collective_kind(name), group=str(attrs.get("pg_name", ""))), signature.inputs
    else:
        return None
    tensors, results = tuple(tensors_in(sent)), tuple(tensors_in(signature.outputs))
    dtype = next((tensor.dtype for tensor in (*tensors, *results)), dtype_name(text(attrs.get("dtype"))))
    return replace(
        call,
        inputs=tensors,
        outputs=results,
        bytes_in=_bytes(tensors) or _counted(attrs.get("in_msg_nelems"), dtype),
        bytes_out=_bytes(results) or _counted(attrs.get("out_msg_nelems"), dtype),
        dtype=dtype,
        pattern=_rank_pattern(inputs, at, attrs),
    )


def _group(value: Value) -> str:
    if isinstance(value, tuple) and value:
        return _group(value[0])
    # Before groups had names their address was recorded, which differs between ranks; waits record 0.
    return f"{ADDRESS}{value}" if type(value) is int and value else "" if value in (0, None) else str(value)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return min(MOST_BYTES, sum(max(0, tensor.numel) * dtype_bytes(tensor.dtype) for tensor in tensors))


def _counted(elements: Any, dtype: str) -> int:
    return min(MOST_BYTES, max(0, integer(elements, 0)) * dtype_bytes(dtype))


def _splits(values: Sequence[Value], at: int) -> tuple[int, ...]:
    splits = values[at] if at < len(values) else ()
    return tuple(integer(split, 0) for split in splits) if isinstance(splits, tuple) else ()


def _rank_pattern(inputs: ArgumentLists, at: int, attrs: Mapping[str, Any]) -> tuple[int, int, int]:
    """First global rank, stride and size of the group, as recorded after the splits; -1 for what is not."""
    tail = [integer(value) for value in inputs.values[at + 3 :]] if at >= 0 else []
    start, stride, size = tail[:3] if len(tail) >= 3 else (-1, -1, tail[-1] if tail else -1)
    return (
        integer(attrs.get("global_rank_start"), start),
        integer(attrs.get("global_rank_stride"), stride),
        integer(attrs.get("pg_size"), size),
    )
