"""Balances looked-up elements, those of larger tables counting more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Plan
from steptime._shard.rules import Machine, Rule
from steptime._shard.search.greedy import place_greedily


def _place(tables: Sequence[Table], machine: Machine) -> Plan:
    costs = [table.dim * table.pooling_factor * math.log10(table.rows) for table in tables]
    return place_greedily(tables, costs, machine.ranks, machine.memory_bytes)


RULE = Rule("size_lookup_greedy", "greedy on dim * pooling factor * log10(rows)", _place)
