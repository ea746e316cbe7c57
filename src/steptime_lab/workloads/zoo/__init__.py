"""The zoo: training steps of many architectures in ten groups of kin, in plain torch, each measured on its own.

None of them has a part in any fit. `architectures()` has all of them by name. They came in two visits to a card: what is
known of the first has been used to find causes of errors; the second was written, predicted and measured after that.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from steptime_lab.workloads.zoo.architecture import (
    FIRST_VISIT,
    GROUPS,
    SECOND_VISIT,
    Architecture,
    Place,
    ZooStep,
    registered,
)

__all__ = ["FIRST_VISIT", "GROUPS", "SECOND_VISIT", "Architecture", "Place", "ZooStep", "architectures", "of_visit"]


@cache
def architectures() -> dict[str, Architecture]:
    """By name, group by group."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return registered()


def of_visit(visit: str) -> dict[str, Architecture]:
    """Those that came with a visit."""
    return {name: each for name, each in architectures().items() if each.visit == visit}
