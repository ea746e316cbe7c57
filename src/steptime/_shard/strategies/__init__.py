"""Search strategies, one file each: ways to ask for plans. Whatever is asked for is evaluated in full, and the best is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from steptime._shard.search.state import Search


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to search. `order`: when its turn is; those that start from others' plans come later."""

    name: str
    about: str
    order: int
    run: Callable[[Search], None]


@cache
def strategies() -> dict[str, Strategy]:
    """Every strategy, by name and in the order of their turns: a file in this folder with a `STRATEGY`."""
    results = (import_module(f"{__name__}.{module.name}").STRATEGY for module in iter_modules(__path__))
    return {one.name: one for one in sorted(results, key=lambda one: (one.order, one.name))}
