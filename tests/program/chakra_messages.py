"""Chakra traces as bytes, written without protobuf."""

from __future__ import annotations

import struct
from typing import Any

COMP, SEND, RECV, COLL, LOAD = 4, 5, 6, 7, 2


def varint(value: int) -> bytes:
    value %= 2**64
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def block(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def attribute(name: str, value: Any) -> bytes:
    head = block(1, name.encode())
    if isinstance(value, bool):
        return head + number(27, value)
    if isinstance(value, int):
        return head + number(9, value)
    if isinstance(value, float):
        return head + varint(3 << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, list):
        return head + block(28, block(1, b"".join(varint(each) for each in value)))
    return head + block(29, value.encode())


def node(
    id: int, kind: int = COMP, deps: tuple[int, ...] = (), *, name: str = "n", start: int = 0, took: int = 0,
    io: tuple[str, str, str] | None = None, ctrl: tuple[int, ...] = (), **attrs: Any,
) -> bytes:  # fmt: skip
    parts = [number(1, id), block(2, name.encode()), number(3, kind), *(number(4, each) for each in ctrl)]
    parts += [block(5, b"".join(varint(each) for each in deps)), number(6, start), number(7, took)]
    if io:
        parts.append(block(8, b"".join(block(at + 1, text.encode()) for at, text in enumerate(io))))
    return b"".join([*parts, *(block(10, attribute(key, value)) for key, value in attrs.items())])


def file(*nodes: bytes, metadata: bytes = block(1, b"0.0.4")) -> bytes:
    return b"".join(varint(len(each)) + each for each in (metadata, *nodes))
