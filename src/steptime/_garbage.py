"""Python's collector of circles of garbage, held back where it would go through millions of objects that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Nothing is looked for meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def little_collection() -> Iterator[None]:
    """It looks among what is made meanwhile: PyTorch itself is half a million objects."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
