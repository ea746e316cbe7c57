"""`unlaunched`: kernels written in Triton launch nothing on a device that is not there; execution traces do not show them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from unittest.mock import patch


@contextmanager
def unlaunched() -> Iterator[None]:
    """While it lasts, calling such a kernel does nothing."""
    with ExitStack() as stack:
        if find_spec("triton") is not None:
            for module, name in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")):
                kind = getattr(import_module(module), name)
                stack.enter_context(patch.object(kind, "run", lambda *_, **__: None))
        yield
