"""Balances looked-up elements and memory, each measured by its mean."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Plan
from steptime._shard.rules import Machine, Rule
from steptime._shard.search.greedy import place_greedily


def _place(tables: Sequence[Table], machine: Machine) -> Plan:
    elements = _over_mean([table.dim * table.pooling_factor for table in tables])
    sizes = _over_mean([float(table.nbytes) for table in tables])
    costs = [one + other for one, other in zip(elements, sizes, strict=True)]
    return place_greedily(tables, costs, machine.ranks, machine.memory_bytes)


def _over_mean(values: list[float]) -> list[float]:
    total = sum(values)
    return [value * len(values) / total if total else 0.0 for value in values]


RULE = Rule("norm_lookup_greedy", "greedy on dim * pooling factor over its mean plus bytes over their mean", _place)
