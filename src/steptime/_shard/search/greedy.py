"""The greedy placement that most rules share: the costliest table first, each on the rank with the least cost so far."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Plan
from steptime._units import MIB
from steptime.errors import InputError


def place_greedily(tables: Sequence[Table], costs: Sequence[float], ranks: int, memory_bytes: int | None) -> Plan:
    """Ties go to the rank with the fewest bytes, then to the lowest; a rank without room is passed over."""
    load, used = [0.0] * ranks, [0] * ranks
    rank_of = [0] * len(tables)
    for i in sorted(range(len(tables)), key=lambda i: (-costs[i], i)):
        size = tables[i].nbytes
        roomy = [rank for rank in range(ranks) if memory_bytes is None or used[rank] + size <= memory_bytes]
        if not roomy:
            raise InputError(no_room(tables[i], ranks, memory_bytes))
        rank = min(roomy, key=lambda rank: (load[rank], used[rank], rank))
        rank_of[i] = rank
        load[rank] += costs[i]
        used[rank] += size
    return Plan.whole(tables, rank_of, ranks)


def no_room(table: Table, ranks: int, memory_bytes: int | None) -> str:
    """What to say of a table that fits on no rank."""
    return (
        f"Table {table.name!r} of {table.nbytes / MIB:.1f} MiB fits on none of the {ranks} ranks of "
        f"{(memory_bytes or 0) / MIB:.1f} MiB beside the tables placed before it; use more ranks or another rule."
    )
