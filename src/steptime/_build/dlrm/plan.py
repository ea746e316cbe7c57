"""`Plan`: how every embedding table is divided and on which ranks its shards are; `Division`: the same without the ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steptime._build.dlrm.model import Table
from steptime.errors import InputError

TABLE_WISE = "table_wise"
"""A whole table on one rank. This name and the next three are TorchRec's."""

COLUMN_WISE = "column_wise"
"""Slices of its columns, each on a rank and looked up there as a narrower table."""

ROW_WISE = "row_wise"
"""A share of its rows on every rank; each rank sums the rows it holds of a bag, and a reduce_scatter adds these sums."""

DATA_PARALLEL = "data_parallel"
"""A copy on every rank, looked up for that rank's samples; an all_reduce adds the gradients."""

KINDS = (TABLE_WISE, COLUMN_WISE, ROW_WISE, DATA_PARALLEL)

USUAL_KINDS = (TABLE_WISE, COLUMN_WISE)
"""Allowed where a task does not say: steps with the others were never measured."""

EVERYWHERE = (ROW_WISE, DATA_PARALLEL)
"""Kinds that put a share or a copy of the table on every rank."""

QUAD = 4
"""Columns that a table-batched lookup takes at once: slices are multiples of it."""

_SHORT = 80


@dataclass(frozen=True, slots=True)
class Placement:
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

    table: int  # index in the model's tables
    first_column: int
    columns: int

    def as_table(self, tables: Sequence[Table], slices: int) -> Table:
        """The slice as a table of its own: the same rows and lookups, fewer columns."""
        whole = tables[self.table]
        if slices == 1:
            return whole
        counted = None if whole.statistics is None else replace(whole.statistics, dim=self.columns)
        name = f"{whole.name}[{self.first_column}:{self.first_column + self.columns}]"
        return replace(whole, name=name, dim=self.columns, statistics=counted)


@dataclass(frozen=True, slots=True)
class Division:
    """How the tables of a model are cut: into so many slices of columns, or (0) by rows or copies on every rank."""

    slices: tuple[int, ...]
    kinds: tuple[str, ...]

    @classmethod
    def whole(cls, count: int) -> Division:
        """No table is cut."""
        return cls((1,) * count, (TABLE_WISE,) * count)

    def with_table(self, index: int, kind: str, slices: int = 0) -> Division:
        """The same but for one table."""
        count = 0 if kind in EVERYWHERE else 1 if kind == TABLE_WISE else slices
        return Division(_changed(self.slices, index, count), _changed(self.kinds, index, kind))

    def shards(self, tables: Sequence[Table]) -> tuple[Shard, ...]:
        """The slices that have to be placed, in table order."""
        return tuple(
            Shard(index, first, width)
            for index, count in enumerate(self.slices)
            for first, width in _columns(tables[index].dim, count)
        )

    def shard_tables(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        """The same as tables: fewer columns, the same rows and lookups."""
        return tuple(shard.as_table(tables, self.slices[shard.table]) for shard in self.shards(tables))

    def everywhere(self) -> dict[int, str]:
        """Indices of the tables that every rank has a share or a copy of, and which of the two."""
        return {index: self.kinds[index] for index, count in enumerate(self.slices) if not count}

    def plan(self, tables: Sequence[Table], rank_of: Sequence[int], ranks: int) -> Plan:
        """The plan that puts `shards()[i]` on `rank_of[i]`."""
        owners: list[list[int]] = [[] for _ in tables]
        for shard, rank in zip(self.shards(tables), rank_of, strict=True):
            owners[shard.table].append(int(rank))
        every = tuple(range(ranks))
        placed = (Placement(kind, tuple(held) if held else every) for kind, held in zip(self.kinds, owners, strict=True))
        return Plan(ranks, dict(zip((table.name for table in tables), placed, strict=True)))


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every table is and how it is divided, in the order of the model's tables."""

    ranks: int
    placements: Mapping[str, Placement]

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InputError(f"The plan is for {self.ranks} ranks; expected at least 1.")
        for name, placed in self.placements.items():
            wrong = next((rank for rank in placed.ranks if not 0 <= rank < self.ranks), None)
            if wrong is not None:
                raise InputError(
                    f"The plan puts table {name!r} on rank {wrong}; expected 0 to {self.ranks - 1}, or more ranks."
                )
            if placed.kind in EVERYWHERE and placed.ranks != tuple(range(self.ranks)):
                raise InputError(f"The plan puts table {name!r} ({placed.kind}) on some ranks; expected all {self.ranks}.")

    @classmethod
    def whole(cls, tables: Sequence[Table], rank_of: Sequence[int], ranks: int) -> Plan:
        """The plan that puts `tables[i]`, undivided, on `rank_of[i]`."""
        return Division.whole(len(tables)).plan(tables, rank_of, ranks)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], tables: Sequence[Table], ranks: int, where: str = "The plan") -> Plan:
        """A rank, a list of ranks (slices of columns), or `{"kind": ..., "ranks": [...]}` for every table."""
        names = [table.name for table in tables]
        odd = next((name for name in values if name not in set(names)), None)
        if odd is not None:
            raise InputError(f"{where} places {odd!r}, which is no table of the model; expected its tables alone")
        missing = next((name for name in names if name not in values), None)
        if missing is not None:
            raise InputError(f"{where} does not place table {missing!r}; expected every table")
        placed = {name: _read(values[name], ranks, f"{where}, table {name!r}") for name in names}
        for table in tables:
            _check_slices(table, placed[table.name], where)
        try:
            return cls(ranks, placed)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of every shard, in the order of `Division.shards`: of every table, where none is divided."""
        return tuple(
            rank for placement in self.placements.values() if placement.kind not in EVERYWHERE for rank in placement.ranks
        )

    def to_dict(self) -> dict[str, list[int]]:
        """Table -> ranks of its shards, in table order."""
        return {name: list(placed.ranks) for name, placed in self.placements.items()}

    def owners(self) -> dict[str, Any]:
        """As a config has it, in table order: a rank for a whole table, ranks for slices, else kind and ranks."""
        return {name: _plain(placed) for name, placed in self.placements.items()}

    def kinds(self) -> dict[str, str]:
        """Table -> kind, in table order."""
        return {name: placed.kind for name, placed in self.placements.items()}

    def to_json(self) -> str:
        """Compact text; the same plan always gives the same text."""
        return json.dumps([self.to_dict(), self.kinds()], separators=(",", ":"))

    def divided(self, tables: Sequence[Table]) -> tuple[Division, tuple[int, ...]]:
        """How tables are cut, and the rank of every shard."""
        placed = [self.placements[table.name] for table in tables]
        slices = tuple(0 if item.kind in EVERYWHERE else len(item.ranks) for item in placed)
        owners = tuple(rank for item in placed if item.kind not in EVERYWHERE for rank in item.ranks)
        return Division(slices, tuple(item.kind for item in placed)), owners

    def split(self, tables: Sequence[Table]) -> tuple[tuple[Table, ...], ...]:
        """The shards of every rank as tables, in table order; without what every rank has."""
        division, owners = self.divided(tables)
        shards = division.shard_tables(tables)
        return tuple(
            tuple(shard for shard, owner in zip(shards, owners, strict=True) if owner == rank) for rank in range(self.ranks)
        )

    def of_kind(self, tables: Sequence[Table], kind: str) -> tuple[Table, ...]:
        """The tables that are divided so, in table order."""
        return tuple(table for table in tables if self.placements[table.name].kind == kind)


def _check_slices(table: Table, placed: Placement, where: str) -> None:
    """Refuses more slices of columns than a table has fours of columns."""
    most, count = max(table.dim // QUAD, 1), len(placed.ranks)
    if placed.kind == COLUMN_WISE and not 1 <= count <= most:
        raise InputError(
            f"{where}: table {table.name!r} of {table.dim} columns in {count} slices; expected 1 to {most}: slices have at "
            f"least {QUAD} columns"
        )


def _columns(dim: int, slices: int) -> Iterator[tuple[int, int]]:
    """First column and width of every slice: as equal as multiples of four are; what is left over goes to the last."""
    if slices < 2:
        yield from ((0, dim),) if slices else ()
        return
    quads, first = dim // QUAD, 0
    for number in range(slices):
        width = QUAD * ((number + 1) * quads // slices - number * quads // slices)
        width += dim % QUAD if number == slices - 1 else 0
        yield first, width
        first += width


def _changed(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _plain(placed: Placement) -> Any:
    if placed.kind == TABLE_WISE:
        return placed.ranks[0]
    if placed.kind == COLUMN_WISE and len(placed.ranks) > 1:
        return list(placed.ranks)
    return {"kind": placed.kind, "ranks": list(placed.ranks)}


def _read(value: Any, ranks: int, where: str) -> Placement:
    if isinstance(value, Mapping):
        kind = value.get("kind")
        if kind in EVERYWHERE and "ranks" not in value:
            return Placement(str(kind), tuple(range(ranks)))
        if kind not in KINDS or set(value) - {"kind", "ranks"}:
            raise InputError(f"{where}: {dict(value)!r}; expected kind ({', '.join(KINDS)}) and ranks")
        owners = value.get("ranks")
        if isinstance(owners, Mapping):
            raise InputError(f"{where}: ranks is {str(dict(owners))[:_SHORT]}; expected a rank or a list of ranks")
        placed_on = _read(owners, ranks, where).ranks
        if kind == TABLE_WISE and len(placed_on) != 1:
            raise InputError(f"{where}: a whole table on ranks {list(placed_on)}; expected one rank")
        return Placement(str(kind), placed_on)
    owners = value if isinstance(value, list) else [value]
    if not owners or any(type(rank) is not int for rank in owners):
        raise InputError(f"{where}: {value!r}; expected a rank, a list of ranks or a table with kind and ranks")
    return Placement(TABLE_WISE if len(owners) == 1 else COLUMN_WISE, tuple(owners))
