"""Trace formats, one file each. A module of this folder that has a `FORMAT` is a format; nothing is registered elsewhere."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from steptime._program.execution import ExecutionTrace
from steptime._program.formats.files import TraceFile
from steptime._program.program import Program
from steptime._program.workload import Workload

# How much of a file is looked at to tell its format. Kineto writes device properties first, a few kilobytes per GPU.
HEAD_BYTES = 1 << 18

# Told how many decompressed bytes have just been read.
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Format:
    """How one kind of file is told from others and read."""

    name: str
    recognises: Callable[[bytes, str], bool]  # the first bytes, decompressed, and the file's name
    read: Callable[[TraceFile, Progress | None], Program | ExecutionTrace | Workload]


@cache
def formats() -> tuple[Format, ...]:
    """Every format in this folder, by file name."""
    result: dict[str, Format] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        candidate = getattr(importlib.import_module(f"{__name__}.{module}"), "FORMAT", None)
        if candidate is None:
            continue
        if candidate.name in result:
            raise ValueError(f"two files in {__name__} claim the format {candidate.name!r}; one of them is {module}.py")
        result[candidate.name] = candidate
    return tuple(result.values())


def format_of(head: bytes, name: str) -> Format | None:
    """The format of a file, or None if no format knows it."""
    return next((f for f in formats() if f.recognises(head, name)), None)
