"""Balances memory."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.build.dlrm import Table
from steptime.sharding.greedy import place_greedily
from steptime.sharding.plan import Plan
from steptime.sharding.rules import Machine, Rule


def _place(tables: Sequence[Table], machine: Machine) -> Plan:
    costs = [float(table.nbytes) for table in tables]
    return place_greedily(tables, costs, machine.ranks, machine.memory_bytes)


RULE = Rule("size_greedy", "greedy on bytes", _place)
