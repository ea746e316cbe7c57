"""A step in bytes over bandwidth on four quarters of an H200: good enough to see whether plans differ, no model of the product.

Of the testbed: a quarter streams 1 TB/s from memory and about 3 from L2 (50 MB, shared); all_to_all of 64 MiB takes 21 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tests.lookups.expected_reuse import expected_reuse

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import Plan
from steptime._shard.rules import RULES, Machine, place

MEMORY, CACHE, WIRE = 1e12, 3e12, 3.1e9  # bytes a second
CACHED_BYTES = 12e6
SORT_BYTES = 300  # moved per lookup by the backward pass's sort
DENSE_MS, LATENCY_MS = 1.0, 0.1


def plans_by_rule(tables: Sequence[Table], machine: Machine) -> dict[str, Plan]:
    """The plan of every rule; some may be the same plan."""
    return {name: place(name, tables, machine) for name in RULES}


@cache
def lookup_ms(table: Table, batch: int) -> tuple[float, float]:
    """Forward and backward."""
    stream = table.generator
    lookups = batch * stream.pooling
    distinct = float(expected_reuse(stream.kind, stream.rows, stream.alpha, stream.shift, lookups).rows.sum())
    row = 4 * table.dim
    read = distinct * row / MEMORY + (lookups - distinct) * row / (CACHE if distinct * row < CACHED_BYTES else MEMORY)
    write = 2 * distinct * row / MEMORY
    return 1e3 * (read + 8 * lookups / MEMORY), 1e3 * (SORT_BYTES * lookups / MEMORY + lookups * row / CACHE + write)


def step_ms(task: Dlrm, plan: Plan) -> tuple[float, float]:
    """The whole step, and its lookups on the slowest rank."""
    owned = plan.split(task.tables)
    forward = max(sum(lookup_ms(table, task.batch)[0] for table in tables) for tables in owned)
    backward = max(sum(lookup_ms(table, task.batch)[1] for table in tables) for tables in owned)
    wire = max(1e3 * 4 * task.batch * sum(table.dim for table in tables) / WIRE for tables in owned) + LATENCY_MS
    return forward + backward + 2 * wire + DENSE_MS, forward + backward


def times_by_rule(task: Dlrm, ranks: int) -> dict[str, float]:
    """Estimated step of every rule's plan."""
    return {name: step_ms(task, plan)[0] for name, plan in plans_by_rule(task.tables, Machine(ranks)).items()}
