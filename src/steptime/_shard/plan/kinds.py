"""`MixedPlan`: every table divided in its own way; and the shards that come of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steptime._build.dlrm.model import Table
from steptime._shard.plan.kind_names import COLUMN_WISE, EVERYWHERE, KINDS, TABLE_WISE
from steptime._shard.plan.plan import Plan
from steptime.errors import InputError

QUAD = 4
"""Columns that a table-batched lookup takes at once: slices are multiples of it."""


@dataclass(frozen=True, slots=True)
class Placed:
    """How one table is divided, and on which ranks its shards are, in the order of its columns (or rows)."""

    kind: str
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"A table is placed by kind {self.kind!r}; expected {', '.join(KINDS)}.")
        if self.kind == TABLE_WISE and len(self.ranks) != 1:
            raise InputError(f"A table is placed whole on ranks {list(self.ranks)}; expected one rank.")


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice of a table's columns, or all of them, that one rank holds."""

    table: int  # place in the model's tables
    first_column: int
    columns: int

    def as_table(self, tables: Sequence[Table], parts: int) -> Table:
        """The slice as a table of its own: the same rows and lookups, fewer columns."""
        whole = tables[self.table]
        if parts == 1:
            return whole
        counted = None if whole.statistics is None else replace(whole.statistics, dim=self.columns)
        return Table(
            f"{whole.name}[{self.first_column}:{self.first_column + self.columns}]", self.columns, whole.generator, counted
        )


@dataclass(frozen=True, slots=True)
class Division:
    """How the tables of a model are cut: into so many slices of columns, or (0) by rows or copies on every rank."""

    slices: tuple[int, ...]
    kinds: tuple[str, ...]

    @classmethod
    def whole(cls, count: int) -> Division:
        """No table is cut."""
        return cls((1,) * count, (TABLE_WISE,) * count)

    def with_table(self, place: int, kind: str, slices: int = 0) -> Division:
        """The same but for one table."""
        count = 0 if kind in EVERYWHERE else 1 if kind == TABLE_WISE else slices
        return Division(_changed(self.slices, place, count), _changed(self.kinds, place, kind))

    def shards(self, tables: Sequence[Table]) -> tuple[Shard, ...]:
        """The slices that have to be placed, in table order."""
        return tuple(
            Shard(place, first, width)
            for place, count in enumerate(self.slices)
            for first, width in _columns(tables[place].dim, count)
        )

    def shard_tables(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        """The same as tables, for whoever asks how long they take."""
        return tuple(shard.as_table(tables, self.slices[shard.table]) for shard in self.shards(tables))

    def everywhere(self) -> dict[int, str]:
        """Places of the tables that every rank has a part of, and how."""
        return {place: self.kinds[place] for place, count in enumerate(self.slices) if not count}

    def plan(self, tables: Sequence[Table], rank_of: Sequence[int], ranks: int) -> MixedPlan:
        """The plan that puts `shards()[i]` on `rank_of[i]`."""
        owners: list[list[int]] = [[] for _ in tables]
        for shard, rank in zip(self.shards(tables), rank_of, strict=True):
            owners[shard.table].append(int(rank))
        every = tuple(range(ranks))
        placed = (Placed(kind, tuple(found) if found else every) for kind, found in zip(self.kinds, owners, strict=True))
        return MixedPlan(ranks, dict(zip((table.name for table in tables), placed, strict=True)))


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """Where every table is and how it is divided."""

    ranks: int
    placed: Mapping[str, Placed]

    def __post_init__(self) -> None:
        for name, placed in self.placed.items():
            wrong = next((rank for rank in placed.ranks if not 0 <= rank < self.ranks), None)
            if wrong is not None:
                raise InputError(f"The plan puts table {name!r} on rank {wrong}; expected 0 to {self.ranks - 1}.")
            if placed.kind in EVERYWHERE and placed.ranks != tuple(range(self.ranks)):
                raise InputError(f"The plan puts table {name!r} ({placed.kind}) on some ranks; expected all {self.ranks}.")

    @classmethod
    def of(cls, plan: Plan) -> MixedPlan:
        """A plan of whole tables."""
        owners = zip(plan.tables, plan.rank_of, strict=True)
        return cls(plan.ranks, {name: Placed(TABLE_WISE, (rank,)) for name, rank in owners})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], tables: Sequence[Table], ranks: int, where: str = "The plan") -> MixedPlan:
        """A rank, a list of ranks (slices of columns), or `{"kind": ..., "ranks": [...]}` for every table."""
        names = [table.name for table in tables]
        odd = next((name for name in values if name not in set(names)), None)
        if odd is not None:
            raise InputError(f"{where} places {odd!r}, which is no table of the task; expected its tables alone")
        missing = next((name for name in names if name not in values), None)
        if missing is not None:
            raise InputError(f"{where} does not place table {missing!r}; expected every table")
        placed = {name: _read(values[name], ranks, f"{where}, table {name!r}") for name in names}
        for table in tables:
            most_slices(table, len(placed[table.name].ranks), placed[table.name].kind, where)
        return cls(ranks, placed)

    def to_dict(self) -> dict[str, list[int]]:
        """Table -> ranks of its shards, in table order."""
        return {name: list(placed.ranks) for name, placed in self.placed.items()}

    def kinds(self) -> dict[str, str]:
        """Table -> kind, in table order."""
        return {name: placed.kind for name, placed in self.placed.items()}

    def to_json(self) -> str:
        """Compact text; the same plan always gives the same text."""
        return json.dumps([self.to_dict(), self.kinds()], separators=(",", ":"))

    def divided(self, tables: Sequence[Table]) -> tuple[Division, tuple[int, ...]]:
        """How tables are cut, and the rank of every shard."""
        placed = [self.placed[table.name] for table in tables]
        slices = tuple(0 if one.kind in EVERYWHERE else len(one.ranks) for one in placed)
        owners = tuple(rank for one in placed if one.kind not in EVERYWHERE for rank in one.ranks)
        return Division(slices, tuple(one.kind for one in placed)), owners


def most_slices(table: Table, asked: int, kind: str, where: str) -> None:
    """Refuses more slices of columns than a table has fours of columns."""
    if kind == COLUMN_WISE and not 1 <= asked <= max(table.dim // QUAD, 1):
        raise InputError(
            f"{where}: table {table.name!r} of {table.dim} columns in {asked} slices; expected 1 to "
            f"{max(table.dim // QUAD, 1)}: slices have at least {QUAD} columns"
        )


def _columns(dim: int, slices: int) -> Iterator[tuple[int, int]]:
    """First column and width of every slice: as equal as multiples of four are; what is left over goes to the last."""
    if slices < 2:
        yield from ((0, dim),) if slices else ()
        return
    quads, first = dim // QUAD, 0
    for place in range(slices):
        width = QUAD * ((place + 1) * quads // slices - place * quads // slices)
        width += dim % QUAD if place == slices - 1 else 0
        yield first, width
        first += width


def _changed(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _read(value: Any, ranks: int, where: str) -> Placed:
    if isinstance(value, Mapping):
        kind = value.get("kind")
        if kind in EVERYWHERE and "ranks" not in value:
            return Placed(str(kind), tuple(range(ranks)))
        if kind not in KINDS or set(value) - {"kind", "ranks"}:
            raise InputError(f"{where}: {dict(value)!r}; expected kind ({', '.join(KINDS)}) and ranks")
        found = _read(value.get("ranks"), ranks, where)
        return Placed(str(kind), found.ranks)
    owners = value if isinstance(value, list) else [value]
    if not owners or any(type(rank) is not int for rank in owners):
        raise InputError(f"{where}: {value!r}; expected a rank, a list of ranks or a table with kind and ranks")
    return Placed(TABLE_WISE if len(owners) == 1 else COLUMN_WISE, tuple(owners))
