"""Balances memory."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Plan
from steptime._shard.rules import Machine, Rule
from steptime._shard.search.greedy import place_greedily


def _place(tables: Sequence[Table], machine: Machine) -> Plan:
    costs = [float(table.nbytes) for table in tables]
    return place_greedily(tables, costs, machine.ranks, machine.memory_bytes)


RULE = Rule("size_greedy", "greedy on bytes", _place)
