"""`Range`: a range that an execution trace shows like an op, opened past the dispatcher and the modes that lie over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import Variable
from torch.autograd.profiler import record_function

AFTER_BACKWARD = "steptime_after_backward"
"""A mark in a trace around what runs in backward's thread once all gradients are there."""

_enter = torch._C._autograd._record_function_with_args_enter
_exit = torch._C._autograd._record_function_with_args_exit


class Range:
    """A range with its name and arguments."""

    __slots__ = ("_handle", "_name", "_values")

    def __init__(self, name: str, *values: Any) -> None:
        self._name, self._values = name, values

    def __enter__(self) -> None:
        self._handle = _enter(self._name, *self._values)

    def __exit__(self, *_: object) -> None:
        _exit(self._handle)


@contextmanager
def ranges() -> Iterator[None]:
    """While it lasts, `torch.profiler.record_function` opens such ranges: an op of the dispatcher would end inside its mode."""

    def enter(self: Any) -> Any:
        self.record = _enter(self.name)
        return self

    def leave(self: Any, *_: object) -> None:
        _exit(self.record)

    with (
        patch.object(record_function, "__enter__", enter),
        patch.object(record_function, "__exit__", leave),
        patch.object(Variable, "_execution_engine", _Engine(Variable._execution_engine)),
    ):
        yield


class _Engine:
    """PyTorch's engine, whose callbacks at the end of backward are marked as such."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def queue_callback(self, callback: Callable[[], None]) -> None:
        """Call it in backward's thread, last."""

        def marked() -> None:
            with Range(AFTER_BACKWARD):
                callback()

        self._engine.queue_callback(marked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
