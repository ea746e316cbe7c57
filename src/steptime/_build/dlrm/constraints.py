"""`Constraints`: what every plan of a sharding task must respect, in a config or in the columns of a list of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steptime._build.config_values import MOST_WIDTH, Values
from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import KINDS, TABLE_WISE, Plan
from steptime.errors import InputError

KEYS = ("memory_bytes", "headroom", "pinned", "kinds", "kinds_of", "min_partition", "max_partition")
"""Of `[constraints]`."""

OF_TABLES = ("pinned", "kinds", "min_partition", "max_partition")
"""Columns of a list of tables."""

_MOST_HEADROOM = 0.99


@dataclass(frozen=True, slots=True)
class Constraints:
    """What every plan must respect. Without `memory_bytes` a rank has what its device has."""

    memory_bytes: int | None = None  # of one rank
    pinned: Mapping[str, int] = field(default_factory=dict)  # table -> rank, whole
    kinds: tuple[str, ...] = KINDS  # allowed for tables that `kinds_of` does not name
    kinds_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    headroom: float = 0.0  # share of a rank's memory that is left free
    min_partition: Mapping[str, int] = field(default_factory=dict)  # table -> the fewest columns of a slice
    max_partition: Mapping[str, int] = field(default_factory=dict)  # table -> the most

    def allowed(self, table: str) -> tuple[str, ...]:
        """Kinds that a table may be divided by; a pinned one stays whole."""
        return (TABLE_WISE,) if table in self.pinned else self.kinds_of.get(table, self.kinds)

    def slices(self, table: Table, wanted: int, least_columns: int) -> int:
        """As many slices of a table's columns as are wanted, or the nearest number that may be; 1: it may not be cut."""
        most = table.dim // max(self.min_partition.get(table.name, least_columns), least_columns, 1)
        least = -(-table.dim // self.max_partition.get(table.name, table.dim))
        return max(min(max(wanted, least), most), 1)

    def check(self, tables: Sequence[Table], where: str) -> None:
        """Refuses constraints on tables that are not there, and those that contradict each other."""
        names = {table.name for table in tables}
        for key in ("pinned", "kinds_of", "min_partition", "max_partition"):
            odd = next((name for name in getattr(self, key) if name not in names), None)
            if odd is not None:
                raise InputError(f"{where}, constraints.{key}: {odd!r} is no table of the model")
        for kinds in (self.kinds, *self.kinds_of.values()):
            odd = next((kind for kind in kinds if kind not in KINDS), None)
            if odd is not None or not kinds:
                raise InputError(f"{where}, constraints: kind {odd!r}; expected one or more of {', '.join(KINDS)}")
        for name in self.pinned:
            if TABLE_WISE not in self.kinds_of.get(name, (TABLE_WISE,)):
                raise InputError(f"{where}: table {name!r} is pinned and may not be {TABLE_WISE}; drop one of the two")
        for name, most in self.max_partition.items():
            if most < self.min_partition.get(name, 1):
                raise InputError(f"{where}: table {name!r} has min_partition above max_partition; expected no more than it")

    def check_ranks(self, ranks: int, where: str) -> None:
        """Refuses tables pinned to ranks that are not there."""
        for name, rank in self.pinned.items():
            if not 0 <= rank < ranks:
                raise InputError(f"{where}: table {name!r} is pinned to rank {rank}; expected 0 to {ranks - 1}")

    def check_pins(self, plan: Plan, where: str) -> None:
        """Refuses a plan with a table elsewhere than where it is pinned."""
        for name, rank in self.pinned.items():
            placed = plan.placements[name]
            if set(placed.ranks) != {rank}:
                raise InputError(
                    f"{where}: table {name!r} is on ranks {list(placed.ranks)} and pinned to {rank}; change the plan or the pin"
                )


def constraints_of(section: Values) -> Constraints:
    """`[constraints]` of a config."""
    section.expect(KEYS)
    pinned, kinds_of = section.table("pinned"), section.table("kinds_of").values
    least, most = section.table("min_partition"), section.table("max_partition")
    return Constraints(
        memory_bytes=section.size("memory_bytes") if "memory_bytes" in section.values else None,
        pinned={name: pinned.whole(name, 0) for name in pinned.values},
        kinds=_kinds(section.values.get("kinds", list(KINDS)), f"{section.where}, kinds"),
        kinds_of={name: _kinds(kinds, f"{section.where}, kinds_of, {name}") for name, kinds in kinds_of.items()},
        headroom=section.number("headroom", 0.0, _MOST_HEADROOM) if "headroom" in section.values else 0.0,
        min_partition={name: least.whole(name, 1, MOST_WIDTH) for name in least.values},
        max_partition={name: most.whole(name, 1, MOST_WIDTH) for name in most.values},
    )


def constraints_of_tables(tables: Mapping[str, Mapping[str, str]], where: str) -> Constraints | None:
    """Of the cells of a list of tables, by table; kinds stand side by side. None where there are none."""
    found: dict[str, dict[str, Any]] = {key: {} for key in OF_TABLES}
    for name, cells in tables.items():
        at = f"{where}, table {name!r}"
        for key in OF_TABLES:
            if key in cells:
                found[key][name] = (
                    _kinds(cells[key].replace("|", " ").split(), f"{at}: kinds")
                    if key == "kinds"
                    else (_whole(cells[key], f"{at}: {key}", 0 if key == "pinned" else 1))
                )
    if not any(found.values()):
        return None
    return Constraints(
        pinned=found["pinned"],
        kinds_of=found["kinds"],
        min_partition=found["min_partition"],
        max_partition=found["max_partition"],
    )


def _whole(text: str, where: str, least: int) -> int:
    if not text.isascii() or not text.isdecimal() or not least <= int(text[:9]) <= MOST_WIDTH or len(text) > 9:
        raise InputError(f"{where} is {text[:40]!r}; expected a whole number of {least} or more, at most {MOST_WIDTH}")
    return int(text)


def _kinds(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or any(kind not in KINDS for kind in value):
        raise InputError(f"{where} is {str(value)[:200]}; expected a list of {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in value)
