"""`Plan`: which rank owns each embedding table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steptime._build.dlrm.model import Table
from steptime._units import MIB
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Plan:
    """Whole tables on ranks: `rank_of[i]` owns `tables[i]`."""

    ranks: int
    tables: tuple[str, ...]
    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise InputError(f"A plan for {self.ranks} ranks; expected at least 1.")
        if len(self.tables) != len(self.rank_of):
            raise InputError(
                f"A plan names {len(self.tables)} tables and places {len(self.rank_of)}; expected one rank per table."
            )
        twice = [name for name, count in Counter(self.tables).items() if count > 1]
        if twice:
            raise InputError(f"A plan names table {twice[0]!r} more than once; expected every table once.")
        for name, rank in zip(self.tables, self.rank_of, strict=True):
            if not 0 <= rank < self.ranks:
                raise InputError(f"A plan puts table {name!r} on rank {rank}; expected 0 to {self.ranks - 1}.")

    @classmethod
    def of(cls, tables: Sequence[Table], rank_of: Sequence[int], ranks: int) -> Plan:
        """The plan that puts `tables[i]` on `rank_of[i]`."""
        return cls(ranks, tuple(table.name for table in tables), tuple(rank_of))

    @classmethod
    def from_dict(cls, placement: Mapping[str, int], tables: Sequence[Table], ranks: int) -> Plan:
        """The plan that `to_dict` gave, for the same tables in whatever order."""
        missing = [table.name for table in tables if table.name not in placement]
        unknown = sorted(set(placement) - {table.name for table in tables})
        if missing or unknown:
            said = f"it does not place table {missing[0]!r}" if missing else f"it places {unknown[0]!r}, which is not a table"
            raise InputError(f"The plan does not fit the model's tables: {said}; expected every table once.")
        return cls.of(tables, [int(placement[table.name]) for table in tables], ranks)

    def to_dict(self) -> dict[str, int]:
        """Table -> rank, in table order."""
        return dict(zip(self.tables, self.rank_of, strict=True))

    def to_json(self) -> str:
        """Compact text; the same plan of the same tables always gives the same text."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    def on(self, rank: int) -> tuple[int, ...]:
        """Positions of the tables that a rank owns, in table order."""
        return tuple(i for i, owner in enumerate(self.rank_of) if owner == rank)

    def split(self, tables: Sequence[Table]) -> tuple[tuple[Table, ...], ...]:
        """The tables of every rank, in table order."""
        self.check(tables)
        return tuple(tuple(tables[i] for i in self.on(rank)) for rank in range(self.ranks))

    def nbytes(self, tables: Sequence[Table]) -> tuple[int, ...]:
        """Bytes of weights on every rank."""
        return tuple(sum(table.nbytes for table in owned) for owned in self.split(tables))

    def check(self, tables: Sequence[Table], memory_bytes: int | None = None) -> None:
        """Raises `InputError` where this is no plan for these tables, or a rank's tables are larger than its memory."""
        names = tuple(table.name for table in tables)
        if names != self.tables:
            odd = sorted(set(names) ^ set(self.tables))
            said = f"table {odd[0]!r} is in one of them only" if odd else "they come in another order"
            raise InputError(f"The plan does not fit the model's tables: {said}; expected the same tables in the same order.")
        for rank, used in enumerate(self.nbytes(tables) if memory_bytes is not None else ()):
            if memory_bytes is not None and used > memory_bytes:
                raise InputError(
                    f"The plan puts {used / MIB:.1f} MiB of tables on rank {rank}, which has {memory_bytes / MIB:.1f} MiB; "
                    "use more ranks or smaller tables."
                )
