"""`Plan`: how every embedding table is divided and on which ranks its shards are; `Division`: the same without the ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steptime._build.dlrm.model import Table
from steptime.errors import InputError

TABLE_WISE = "table_wise"
"""A whole table on one rank. This name and the next ones are TorchRec's."""

COLUMN_WISE = "column_wise"
"""Slices of its columns, each on a rank and looked up there as a narrower table."""

ROW_WISE = "row_wise"
"""A share of its rows on every rank; each rank sums the rows it holds of a bag, and a reduce_scatter adds these sums."""

DATA_PARALLEL = "data_parallel"
"""A copy on every rank, looked up for that rank's samples; an all_reduce adds the gradients."""

TABLE_COLUMN_WISE = "table_column_wise"
"""Slices of its columns, all on ranks of one node."""

TABLE_ROW_WISE = "table_row_wise"
"""A share of its rows on every rank of one node, which add their sums before they leave the node."""

GRID = "grid_shard"
"""Slices of its columns, each with a share of its rows on every rank of one node."""

KINDS = (TABLE_WISE, COLUMN_WISE, ROW_WISE, DATA_PARALLEL, TABLE_COLUMN_WISE, TABLE_ROW_WISE, GRID)

EVERYWHERE = (ROW_WISE, DATA_PARALLEL)
"""Kinds that put a share or a copy of the table on every rank."""

SLICED = (COLUMN_WISE, TABLE_COLUMN_WISE)
"""Kinds that put slices of the columns on single ranks."""

BY_NODE = (TABLE_ROW_WISE, GRID)
"""Kinds of which the ranks of a node share rows."""

QUAD = 4
"""Columns that a table-batched lookup takes at once: slices are multiples of it."""

_SHORT = 80


@dataclass(frozen=True, slots=True)
class Placement:
    """How one table is divided, and on which ranks its shards are, in the order of its columns, then of its rows."""

    kind: str
    ranks: tuple[int, ...]
    per_node: int = 0  # of kinds by node: ranks that share the rows of a slice

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"A table is placed by kind {self.kind!r}; expected {', '.join(KINDS)}.")
        if self.kind == TABLE_WISE and len(self.ranks) != 1:
            raise InputError(f"A table is placed whole on ranks {list(self.ranks)}; expected one rank.")

    @property
    def nodes(self) -> tuple[int, ...]:
        """The node of every slice whose rows a node shares."""
        return tuple(rank // self.per_node for rank in self.ranks[:: self.per_node]) if self.per_node else ()

    @property
    def slices(self) -> int:
        """Into how many slices of columns the table is cut."""
        return len(self.ranks) if self.kind in SLICED else max(len(self.nodes), 1)

    @property
    def listed(self) -> list[Any]:
        """Ranks as files have them: those of each slice together where the table is cut both ways."""
        if self.kind != GRID:
            return list(self.ranks)
        return [list(self.ranks[first : first + self.per_node]) for first in range(0, len(self.ranks), self.per_node)]


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
    """How the tables of a model are cut: into so many slices of columns to place, or (0) on every rank, or on given nodes."""

    slices: tuple[int, ...]
    kinds: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...] = ()  # of every table, where the ranks of nodes share rows: the node of every slice
    per_node: int = 0

    @classmethod
    def whole(cls, count: int) -> Division:
        """No table is cut."""
        return cls((1,) * count, (TABLE_WISE,) * count)

    def with_table(self, index: int, kind: str, slices: int = 0) -> Division:
        """The same but for one table, which goes to no nodes."""
        count = 0 if kind in EVERYWHERE else 1 if kind == TABLE_WISE else slices
        nodes = _changed(self.nodes, index, ()) if self.nodes else ()
        return Division(_changed(self.slices, index, count), _changed(self.kinds, index, kind), nodes, self.per_node)

    def on_nodes(self, index: int, kind: str, nodes: tuple[int, ...], per_node: int, slices: int = 0) -> Division:
        """The same but for one table on nodes of so many ranks, which share the rows of a slice of its columns each.

        Where the table is cut by columns alone: in so many slices, all on the first of these nodes.
        """
        every = self.nodes or ((),) * len(self.slices)
        return Division(
            _changed(self.slices, index, slices), _changed(self.kinds, index, kind), _changed(every, index, nodes), per_node
        )

    @property
    def shares_nodes(self) -> bool:
        """Whether nodes share the rows of any table."""
        return any(kind in BY_NODE for kind in self.kinds)

    def shards(self, tables: Sequence[Table]) -> tuple[Shard, ...]:
        """The slices that have to be placed, in table order."""
        return tuple(
            Shard(index, first, width)
            for index, count in enumerate(self.slices)
            for first, width in columns_of(tables[index].dim, count)
        )

    def shard_tables(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        """The same as tables: fewer columns, the same rows and lookups."""
        return tuple(shard.as_table(tables, self.slices[shard.table]) for shard in self.shards(tables))

    def everywhere(self) -> dict[int, str]:
        """Indices of the tables that every rank has a share or a copy of, and which of the two."""
        return {index: kind for index, kind in enumerate(self.kinds) if kind in EVERYWHERE}

    def node_tables(self, tables: Sequence[Table], node: int) -> tuple[Table, ...]:
        """Tables, or slices of their columns, of which the ranks of a node share the rows."""
        found = []
        for index, nodes in enumerate(self.nodes):
            if self.kinds[index] not in BY_NODE:
                continue
            cut = zip(columns_of(tables[index].dim, len(nodes)), nodes, strict=True)
            found += [Shard(index, *columns).as_table(tables, len(nodes)) for columns, held_by in cut if held_by == node]
        return tuple(found)

    def plan(self, tables: Sequence[Table], rank_of: Sequence[int], ranks: int) -> Plan:
        """The plan that puts `shards()[i]` on `rank_of[i]`."""
        owners: list[list[int]] = [[] for _ in tables]
        for shard, rank in zip(self.shards(tables), rank_of, strict=True):
            owners[shard.table].append(int(rank))
        every = tuple(range(ranks))
        placed = {}
        for index, (table, held) in enumerate(zip(tables, owners, strict=True)):
            nodes = self.nodes[index] if self.kinds[index] in BY_NODE else ()
            shared = tuple(rank for node in nodes for rank in every[node * self.per_node : (node + 1) * self.per_node])
            per_node = self.per_node if nodes else 0
            placed[table.name] = Placement(self.kinds[index], tuple(held) or shared or every, per_node)
        return Plan(ranks, placed)


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
            self._check_nodes(name, placed)

    def _check_nodes(self, name: str, placed: Placement) -> None:
        """Refuses rows on ranks that are no whole node, and nodes of other sizes than before."""
        held, size = placed.ranks, placed.per_node
        if placed.kind not in BY_NODE:
            return
        whole = size > 0 and self.ranks % size == 0 and len(held) % size == 0
        blocks = [held[first : first + size] for first in range(0, len(held), max(size, 1))]
        if not whole or any(block[0] % size or block != tuple(range(block[0], block[0] + size)) for block in blocks):
            raise InputError(
                f"The plan puts rows of table {name!r} ({placed.kind}) on ranks {placed.listed}; expected all ranks of one "
                "node, or a list of them for every slice, with nodes of equal size."
            )
        if size != self.per_node:
            raise InputError(f"The plan has nodes of {self.per_node} and of {size} ranks (table {name!r}); expected one size.")

    @property
    def per_node(self) -> int:
        """Ranks of a node, where nodes share the rows of a table; else 0."""
        return next((placed.per_node for placed in self.placements.values() if placed.kind in BY_NODE), 0)

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
        placed = (each for each in self.placements.values() if each.kind not in (*EVERYWHERE, *BY_NODE))
        return tuple(rank for each in placed for rank in each.ranks)

    def to_dict(self) -> dict[str, list[Any]]:
        """Table -> ranks of its shards, in table order."""
        return {name: placed.listed for name, placed in self.placements.items()}

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
        single = [item.kind not in (*EVERYWHERE, *BY_NODE) for item in placed]
        slices = tuple(len(item.ranks) if alone else 0 for item, alone in zip(placed, single, strict=True))
        owners = tuple(rank for item, alone in zip(placed, single, strict=True) if alone for rank in item.ranks)
        nodes = tuple(item.nodes for item in placed) if self.per_node else ()
        return Division(slices, tuple(item.kind for item in placed), nodes, self.per_node), owners

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
    most, count = max(table.dim // QUAD, 1), placed.slices
    if placed.kind in (*SLICED, GRID) and not 1 <= count <= most:
        raise InputError(
            f"{where}: table {table.name!r} of {table.dim} columns in {count} slices; expected 1 to {most}: slices have at "
            f"least {QUAD} columns"
        )


def columns_of(dim: int, slices: int) -> Iterator[tuple[int, int]]:
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
    return {"kind": placed.kind, "ranks": placed.listed}


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
        if kind == GRID:
            return _grid(owners, ranks, where)
        placed_on = _read(owners, ranks, where).ranks
        if kind == TABLE_WISE and len(placed_on) != 1:
            raise InputError(f"{where}: a whole table on ranks {list(placed_on)}; expected one rank")
        return Placement(str(kind), placed_on, len(placed_on) if kind == TABLE_ROW_WISE else 0)
    owners = value if isinstance(value, list) else [value]
    if not owners or any(type(rank) is not int for rank in owners):
        raise InputError(f"{where}: {value!r}; expected a rank, a list of ranks or a table with kind and ranks")
    return Placement(TABLE_WISE if len(owners) == 1 else COLUMN_WISE, tuple(owners))


def _grid(owners: Any, ranks: int, where: str) -> Placement:
    """A list of ranks for every slice."""
    parts = [_read(part, ranks, where).ranks for part in owners if isinstance(part, list)] if isinstance(owners, list) else []
    if not parts or len(parts) != len(owners) or len({len(part) for part in parts}) > 1:
        raise InputError(f"{where}: {str(owners)[:_SHORT]}; expected a list of a node's ranks for every slice of columns")
    return Placement(GRID, tuple(rank for part in parts for rank in part), len(parts[0]))
