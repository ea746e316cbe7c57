"""Any rank that has room, by seed."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Plan
from steptime._lookups.hashing import key_of
from steptime._shard.rules import Machine, Rule
from steptime._shard.search.greedy import no_room
from steptime.errors import InputError


def _place(tables: Sequence[Table], machine: Machine) -> Plan:
    rank_of, used = [], [0] * machine.ranks
    for i, table in enumerate(tables):
        fits = [
            rank
            for rank in range(machine.ranks)
            if machine.memory_bytes is None or used[rank] + table.nbytes <= machine.memory_bytes
        ]
        if not fits:
            raise InputError(no_room(table, machine.ranks, machine.memory_bytes))
        rank = fits[key_of(machine.seed, i, table.rows) % len(fits)]
        rank_of.append(rank)
        used[rank] += table.nbytes
    return Plan.whole(tables, rank_of, machine.ranks)


RULE = Rule("random", "each table on a rank drawn by the seed, its place and its rows", _place)
