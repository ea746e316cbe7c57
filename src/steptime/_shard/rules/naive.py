"""Tables dealt out like cards."""

from __future__ import annotations

from collections.abc import Sequence

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Plan
from steptime._shard.rules import Machine, Rule


def _place(tables: Sequence[Table], machine: Machine) -> Plan:
    return Plan.whole(tables, [i % machine.ranks for i in range(len(tables))], machine.ranks)


RULE = Rule("naive", "table i on rank i mod N", _place)
