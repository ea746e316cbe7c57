"""Neighbours stay together."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.build.dlrm import Table
from steptime.sharding.plan import Plan
from steptime.sharding.rules import Machine, Rule


def _place(tables: Sequence[Table], machine: Machine) -> Plan:
    return Plan.of(tables, [i * machine.ranks // len(tables) for i in range(len(tables))], machine.ranks)


RULE = Rule("naive_chunk", "contiguous blocks of equal count", _place)
