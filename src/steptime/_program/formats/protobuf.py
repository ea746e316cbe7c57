"""The messages of a Chakra trace (mlcommons `et_def.proto`, 0.0.4 and 1.0.0), decoded from protobuf's wire format.

A file is a row of messages, each after its length as a varint: one GlobalMetadata, then Nodes. Fields that
nothing needs are passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

Scalar = int | float | bool | str | bytes
Attribute = Scalar | tuple[Scalar, ...]

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_UINT64 = 2**64

# AttributeProto: field number of the single value -> its type; the list of the same type has the next number.
_ATTRIBUTE_TYPES = {
    3: "double", 5: "float", 7: "int", 9: "int", 11: "uint", 13: "uint", 15: "sint", 17: "sint", 19: "fixed32",
    21: "fixed64", 23: "sfixed32", 25: "sfixed64", 27: "bool", 29: "string", 31: "bytes",
}  # fmt: skip
_FIXED_FORMATS = {"double": "<d", "float": "<f", "fixed32": "<I", "fixed64": "<Q", "sfixed32": "<i", "sfixed64": "<q"}


class NodeType(IntEnum):
    """What a node is; numbers above these (storage, batches, checkpoints) are no part of a training step's program."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


# CollectiveCommType, by number.
COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
    "reduce_scatter", "barrier",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChakraNode:
    """One node. `values`, `shapes` and `types` of inputs and outputs are texts, as written by the converter."""

    id: int = 0
    name: str = ""
    type: int = 0
    deps: tuple[int, ...] = ()  # control and data dependencies
    start_us: int = 0
    duration_us: int = 0
    inputs: tuple[str, str, str] = ("", "", "")
    outputs: tuple[str, str, str] = ("", "", "")
    attrs: dict[str, Attribute] = field(default_factory=dict)


class WireError(ValueError):
    """Bytes that are not a protobuf message."""


def messages(data: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of each length-delimited message; WireError where the file breaks off."""
    at = 0
    while at < len(data):
        size, begin = _varint(data, at)
        if begin + size > len(data):
            raise WireError(f"message of {size} bytes at byte {at}, but only {len(data) - begin} are left")
        yield begin, begin + size
        at = begin + size


def is_metadata(data: bytes, begin: int, end: int) -> bool:
    """Whether a message is the GlobalMetadata at the head of a file instead of a node: it has texts and attributes only."""
    return all(wire == _LENGTH and number in (1, 2) for number, wire, _ in _fields(data, begin, end))


def decode_node(data: bytes, begin: int, end: int) -> ChakraNode:
    """The node in a range of bytes."""
    numbers = {1: 0, 3: 0, 6: 0, 7: 0}
    deps: list[int] = []
    sides = {8: ("", "", ""), 9: ("", "", "")}
    attrs: dict[str, Attribute] = {}
    name = ""
    for number, wire, value in _fields(data, begin, end):
        if number in numbers and isinstance(value, int):
            numbers[number] = value
        elif number == 2 and isinstance(value, bytes):
            name = value.decode("utf-8", errors="replace")
        elif number in (4, 5):
            deps.extend(int(each) for each in _repeated("uint", wire, value))
        elif number in sides and isinstance(value, bytes):
            sides[number] = _io(value)
        elif number == 10 and isinstance(value, bytes):
            key, attribute = _attribute(value)
            attrs[key] = attribute
    return ChakraNode(numbers[1], name, numbers[3], tuple(deps), numbers[6], numbers[7], sides[8], sides[9], attrs)


def _io(data: bytes) -> tuple[str, str, str]:
    texts = {1: "", 2: "", 3: ""}
    for number, _, value in _fields(data, 0, len(data)):
        if number in texts and isinstance(value, bytes):
            texts[number] = value.decode("utf-8", errors="replace")
    return texts[1], texts[2], texts[3]


def _attribute(data: bytes) -> tuple[str, Attribute]:
    name = ""
    result: Attribute = ""
    for number, wire, value in _fields(data, 0, len(data)):
        if number == 1 and isinstance(value, bytes):
            name = value.decode("utf-8", errors="replace")
        elif number in _ATTRIBUTE_TYPES:
            result = _single(_ATTRIBUTE_TYPES[number], wire, value)
        elif number - 1 in _ATTRIBUTE_TYPES and isinstance(value, bytes):
            result = _list_of(_ATTRIBUTE_TYPES[number - 1], value)
    return name, result


def _list_of(kind: str, data: bytes) -> tuple[Scalar, ...]:
    values: list[Scalar] = []
    for number, wire, value in _fields(data, 0, len(data)):
        if number == 1:
            values.extend(_repeated(kind, wire, value))
    return tuple(values)


def _repeated(kind: str, wire: int, value: int | bytes) -> list[Scalar]:
    """The values of a repeated field, which is written packed or one by one."""
    if wire != _LENGTH or kind in ("string", "bytes"):
        return [_single(kind, wire, value)]
    assert isinstance(value, bytes)
    if kind in _FIXED_FORMATS:
        size = struct.calcsize(_FIXED_FORMATS[kind])
        if len(value) % size:
            raise WireError(f"{len(value)} bytes of packed {kind}, expected a multiple of {size}")
        return [each for (each,) in struct.iter_unpack(_FIXED_FORMATS[kind], value)]
    values, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        values.append(_single(kind, _VARINT, number))
    return values


def _single(kind: str, wire: int, value: int | bytes) -> Scalar:
    if kind in ("string", "bytes"):
        if not isinstance(value, bytes):
            raise WireError(f"wire type {wire} for a {kind}")
        return value.decode("utf-8", errors="replace") if kind == "string" else value
    if not isinstance(value, int):
        raise WireError(f"wire type {wire} for a {kind}")
    if kind in _FIXED_FORMATS:
        layout = _FIXED_FORMATS[kind]
        if wire != (_FIXED64 if struct.calcsize(layout) == 8 else _FIXED32):
            raise WireError(f"wire type {wire} for a {kind}")
        number: float = struct.unpack(layout, value.to_bytes(struct.calcsize(layout), "little"))[0]
        return number
    if kind == "bool":
        return value != 0
    if kind == "sint":
        return (value >> 1) ^ -(value & 1)
    return value - _UINT64 if kind == "int" and value >= _UINT64 // 2 else value


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int | bytes]]:
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise WireError(f"field number 0 at byte {at}")
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, wire, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(wire, -1)
        if wire == _LENGTH:
            size, at = _varint(data, at)
        if size < 0 or at + size > end:
            raise WireError(f"field {number} of wire type {wire} at byte {at} does not fit its message")
        chunk = data[at : at + size]
        at += size
        yield number, wire, chunk if wire == _LENGTH else int.from_bytes(chunk, "little")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError(f"a number breaks off or is too long at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value % _UINT64, at
        shift += 7
