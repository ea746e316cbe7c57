"""`Options`: what every measuring job is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """Which ranks, on what, how much. A job ignores what does not concern it."""

    ranks: tuple[int, ...] = (1,)
    share_gpu: bool = False
    device: str = "cuda"  # cuda | cpu (for trying things out)
    small: bool = False  # a handful of cases of each kind
    seed: int = 0
    only: tuple[str, ...] = ()  # names of families, collectives or workloads; empty: all
