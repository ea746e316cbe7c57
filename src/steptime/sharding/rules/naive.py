"""Tables dealt out like cards."""

from __future__ import annotations

from collections.abc import Sequence

from steptime.build.dlrm import Table
from steptime.sharding.plan import Plan
from steptime.sharding.rules import Machine, Rule


def _place(tables: Sequence[Table], machine: Machine) -> Plan:
    return Plan.of(tables, [i % machine.ranks for i in range(len(tables))], machine.ranks)


RULE = Rule("naive", "table i on rank i mod N", _place)
