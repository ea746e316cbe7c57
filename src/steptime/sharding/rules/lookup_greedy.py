"""Balances looked-up elements."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.build.dlrm import Table
from steptime.sharding.greedy import place_greedily
from steptime.sharding.plan import Plan
from steptime.sharding.rules import Machine, Rule


def _place(tables: Sequence[Table], machine: Machine) -> Plan:
    costs = [table.dim * table.pooling_factor for table in tables]
    return place_greedily(tables, costs, machine.ranks, machine.memory_bytes)


RULE = Rule("lookup_greedy", "greedy on dim * pooling factor", _place)
