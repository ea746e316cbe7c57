"""Balances looked-up elements, those of larger tables counting more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from steptime.build.dlrm import Table
from steptime.sharding.greedy import place_greedily
from steptime.sharding.plan import Plan
from steptime.sharding.rules import Machine, Rule


def _place(tables: Sequence[Table], machine: Machine) -> Plan:
    costs = [table.dim * table.pooling_factor * math.log10(table.rows) for table in tables]
    return place_greedily(tables, costs, machine.ranks, machine.memory_bytes)


RULE = Rule("size_lookup_greedy", "greedy on dim * pooling factor * log10(rows)", _place)
