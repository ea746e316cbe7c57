"""Python's collector of circles of garbage, held back where it would go through millions of objects that all stay."""

from __future__ import annotations

import atexit
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
            if not gc.get_freeze_count():  # what was made meanwhile counts as old, and is not looked at for being new
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextmanager
def little_collection() -> Iterator[None]:
    """It looks among what is made meanwhile: PyTorch itself is half a million objects."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def no_last_collection() -> None:
    """Nothing is looked for when the process ends, where Python goes through all objects once more: they are gone with it."""
    atexit.register(gc.freeze)
