"""`Options`: what every measuring job is told."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Options:
    """Which ranks, on what, how much. A job ignores what does not concern it."""

    ranks: tuple[int, ...] = (1,)
    share_gpu: bool = False
    device: str = "cuda"  # cuda | cpu (for trying things out)
    small: bool = False  # a handful of cases of each kind
    seed: int = 0
    only: tuple[str, ...] = ()  # names of families, collectives or workloads; empty: all
    plans: Path | None = None  # of sharding tasks, timed beside those of the rules; then no other tasks are


class LineParser(argparse.ArgumentParser):
    """Says what was wrong in the one line that every command says it in."""

    def error(self, message: str) -> NoReturn:
        """What argparse calls when it does not understand."""
        raise InputError(f"{message} (see {self.prog} --help)")
