"""The zoo: training steps of many architectures in ten groups of kin, in plain torch, each measured on its own.

None of them has a part in any fit. `architectures()` has all of them by name.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from steptime_lab.workloads.zoo.architecture import GROUPS, Architecture, Place, ZooStep, registered

__all__ = ["GROUPS", "Architecture", "Place", "ZooStep", "architectures"]


@cache
def architectures() -> dict[str, Architecture]:
    """By name, group by group."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
    return registered()
