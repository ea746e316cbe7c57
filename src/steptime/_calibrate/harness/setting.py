"""What the passes of device-timed sweeps share: under which conditions rows are taken, and the error that ends a process."""

from __future__ import annotations

from dataclasses import dataclass


class LostContextError(RuntimeError):
    """What ran ended the CUDA context; only a new process can go on, without it."""


@dataclass(frozen=True)
class Setting:
    """What holds for every row of one pass."""

    share: int = 1
    others: str = "none"  # none | same | idle | streaming
    repeats: int = 3
    seed: int = 0
