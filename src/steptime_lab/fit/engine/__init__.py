"""The half of the engine that fits: non-negative weights of terms, trees, small networks, and their blends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from steptime.errors import InputError

_NAMES = {"lightgbm": "LightGBM", "scipy.optimize": "SciPy", "torch": "PyTorch"}


def fitting_library(module: str) -> Any:
    """A library that only fitting needs, or one line that says how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(f"fitting needs {_NAMES[module]}: install steptime[fit]") from error


@contextmanager
def seeded_torch(seed: int) -> Iterator[Any]:
    """PyTorch on one core and with draws of its own, so that the same rows and seed give the same network everywhere."""
    torch = fitting_library("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield torch
    finally:
        torch.set_num_threads(threads)
