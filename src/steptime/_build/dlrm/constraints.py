"""`Constraints`: `[constraints]` of a DLRM config: what every plan of its tables must respect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steptime._build.config_values import Values
from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import EVERYWHERE, KINDS, TABLE_WISE, USUAL_KINDS, Plan
from steptime.errors import InputError

_KEYS = ("memory_bytes", "pinned", "kinds", "kinds_of")


@dataclass(frozen=True, slots=True)
class Constraints:
    """What every plan must respect. Without `memory_bytes` a rank has what its device has."""

    memory_bytes: int | None = None  # of one rank
    pinned: Mapping[str, int] = field(default_factory=dict)  # table -> rank, whole
    kinds: tuple[str, ...] = USUAL_KINDS  # allowed for tables that `kinds_of` does not name
    kinds_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def allowed(self, table: str) -> tuple[str, ...]:
        """Kinds that a table may be divided by; a pinned one stays whole."""
        return (TABLE_WISE,) if table in self.pinned else self.kinds_of.get(table, self.kinds)

    def check(self, tables: Sequence[Table], where: str) -> None:
        """Refuses constraints on tables that are not there, and those that contradict each other."""
        names = {table.name for table in tables}
        for key, constrained in (("pinned", self.pinned), ("kinds_of", self.kinds_of)):
            odd = next((name for name in constrained if name not in names), None)
            if odd is not None:
                raise InputError(f"{where}, constraints.{key}: {odd!r} is no table of the model")
        for kinds in (self.kinds, *self.kinds_of.values()):
            odd = next((kind for kind in kinds if kind not in KINDS), None)
            if odd is not None or not kinds:
                raise InputError(f"{where}, constraints: kind {odd!r}; expected one or more of {', '.join(KINDS)}")
        for name in self.pinned:
            if TABLE_WISE not in self.kinds_of.get(name, (TABLE_WISE,)):
                raise InputError(f"{where}: table {name!r} is pinned and may not be {TABLE_WISE}; drop one of the two")

    def check_ranks(self, ranks: int, where: str) -> None:
        """Refuses tables pinned to ranks that are not there."""
        for name, rank in self.pinned.items():
            if not 0 <= rank < ranks:
                raise InputError(f"{where}: table {name!r} is pinned to rank {rank}; expected 0 to {ranks - 1}")

    def check_pins(self, plan: Plan, where: str) -> None:
        """Refuses a plan with a table elsewhere than where it is pinned."""
        for name, rank in self.pinned.items():
            placed = plan.placements[name]
            if placed.kind in EVERYWHERE or set(placed.ranks) != {rank}:
                raise InputError(
                    f"{where}: table {name!r} is on ranks {list(placed.ranks)} and pinned to {rank}; change the plan or the pin"
                )


def constraints_of(given: Values) -> Constraints:
    """`[constraints]` of a config."""
    given.only(_KEYS)
    pinned = given.table("pinned") if "pinned" in given.values else Values({}, given.where)
    kinds_of = given.table("kinds_of").values if "kinds_of" in given.values else {}
    return Constraints(
        memory_bytes=given.whole("memory_bytes", 1) if "memory_bytes" in given.values else None,
        pinned={name: pinned.whole(name, 0) for name in pinned.values},
        kinds=_kinds(given.values.get("kinds", list(USUAL_KINDS)), f"{given.where}, kinds"),
        kinds_of={name: _kinds(kinds, f"{given.where}, kinds_of, {name}") for name, kinds in kinds_of.items()},
    )


def _kinds(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or any(kind not in KINDS for kind in value):
        raise InputError(f"{where} is {value!r}; expected a list of {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in value)
