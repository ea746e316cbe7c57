"""How a step is to be compiled: what a user may ask for. PyTorch is not imported here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec

from steptime.errors import InputError

MODES = ("default", "reduce-overhead")
"""Of `torch.compile`, those that are captured."""

OFF = "off"
"""Nothing is compiled, whatever a script says."""

asked: ContextVar[str | None] = ContextVar("asked", default=None)
"""How a script is to be compiled that may say nothing of it: a mode or `OFF`; None: as it says itself."""


def check_triton() -> None:
    """Refuses to compile where Triton is absent: a script that compiles and one that is to be compiled are told the same."""
    if find_spec("triton") is None:
        raise InputError(
            "torch.compile: PyTorch's compiler writes its kernels for Triton, which is not installed here; pip install triton "
            "(no GPU is needed), or take the step as run eagerly with --compile off"
        )


@contextmanager
def compiled_as(mode: str | None) -> Iterator[None]:
    """While it lasts, captures compile in this mode."""
    token = asked.set(mode)
    try:
        yield
    finally:
        asked.reset(token)


class Spent:
    """How long PyTorch's compiler has been at work in this process."""

    def __init__(self) -> None:
        self._done_s = 0.0
        self._since_s: float | None = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """While it lasts, it is."""
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._done_s, self._since_s = self.seconds(), None

    def seconds(self) -> float:
        """So far."""
        since_s = self._since_s
        return self._done_s + (0.0 if since_s is None else time.monotonic() - since_s)


spent = Spent()
