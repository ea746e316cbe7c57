"""The usual sharding rules, one file each: a plan from sizes and lookup counts alone. Baselines for everything cleverer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Plan
from steptime._units import MIB
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rule knows of the machine. Without `memory_bytes` per rank everything fits; `seed` is for rules that draw."""

    ranks: int
    memory_bytes: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to place tables that asks nobody how long anything takes."""

    name: str
    about: str
    place: Callable[[Sequence[Table], Machine], Plan]


@cache
def rules() -> dict[str, Rule]:
    """Every rule, by name: a file in this folder with a `RULE`."""
    found = (import_module(f"{__name__}.{module.name}").RULE for module in iter_modules(__path__))
    return {rule.name: rule for rule in sorted(found, key=lambda rule: rule.name)}


def place(rule: str, tables: Sequence[Table], machine: Machine) -> Plan:
    """The plan a rule makes; `InputError` where there is no such rule or the tables do not fit by it."""
    if rule not in rules():
        raise InputError(f"No sharding rule is called {rule!r}; there are {', '.join(rules())}.")
    plan = rules()[rule].place(tables, machine)
    for rank, held in enumerate(plan.split(tables) if machine.memory_bytes is not None else ()):
        used = sum(table.nbytes for table in held)
        if machine.memory_bytes is not None and used > machine.memory_bytes:
            raise InputError(
                f"The rule {rule} puts {used / MIB:.1f} MiB of tables on rank {rank}, which has "
                f"{machine.memory_bytes / MIB:.1f} MiB; use more ranks or another rule."
            )
    return plan


def plans_by_rule(tables: Sequence[Table], machine: Machine) -> dict[str, Plan]:
    """The plan of every rule; some may be the same plan."""
    return {name: place(name, tables, machine) for name in rules()}
