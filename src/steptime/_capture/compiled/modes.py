"""How a step is to be compiled: what a user may ask for. PyTorch is not imported here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

MODES = ("default", "reduce-overhead")
"""Of `torch.compile`, those that are captured."""

OFF = "off"
"""Nothing is compiled, whatever a script says."""

asked: ContextVar[str | None] = ContextVar("asked", default=None)
"""How a script is to be compiled that may say nothing of it: a mode or `OFF`; None: as it says itself."""


@contextmanager
def compiled_as(mode: str | None) -> Iterator[None]:
    """While it lasts, captures compile in this mode."""
    token = asked.set(mode)
    try:
        yield
    finally:
        asked.reset(token)
