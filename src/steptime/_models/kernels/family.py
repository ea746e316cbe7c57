"""Op families, one file each: which ops a family answers for, and the calls that are measured to model them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import numpy as np

from steptime._models.kernels.call import Call
from steptime._models.kernels.launches import Rules

# A seeded generator and how many calls to give; a sweep is data: the same arguments give the same calls.
Sweep = Callable[[np.random.Generator, int], Iterator[Call]]


@dataclass(frozen=True)
class Family:
    """Ops that are modelled alike. `weight` is its share of a measuring run beside the other families'.

    `warm` is how many of the sweep's calls are run with their input just written as well as cold.
    """

    name: str
    ops: tuple[str, ...]
    sweep: Sweep
    weight: float = 1.0
    warm: float = 1.0
    form: str = "launched"  # the module in `forms` that models it
    rules: Rules | None = None  # what its calls launch, where the form goes by rules


@cache
def families() -> dict[str, Family]:
    """Every family, by name: a file in the folder `families`."""
    package = import_module("steptime._models.kernels.families")
    modules = sorted(entry.name for entry in iter_modules(package.__path__))
    members = (import_module(f"{package.__name__}.{module}").FAMILY for module in modules)
    return {family.name: family for family in members}


@cache
def family_of(op: str) -> str:
    """The family that answers for an op; empty where none does."""
    return next((family.name for family in families().values() if op in family.ops), "")
