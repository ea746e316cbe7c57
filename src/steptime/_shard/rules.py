"""The usual sharding rules: a plan from sizes and lookup counts alone. Baselines for everything cleverer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import DATA_PARALLEL, GRID, QUAD, ROW_WISE, TABLE_ROW_WISE, Placement, Plan
from steptime._lookups.generators import key_of
from steptime._units import GIB, MIB
from steptime.errors import InputError

GPUS_PER_NODE = 8
"""Of the machines that recommenders are trained on, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rule knows of the machine. Without `memory_bytes` per rank everything fits; `seed` is for rules that draw.

    `per_node`: ranks of a node; ranks that no such nodes add up to are taken as those of one.
    """

    ranks: int
    memory_bytes: int | None = None
    seed: int = 0
    per_node: int = GPUS_PER_NODE

    @property
    def nodes(self) -> int:
        """How many there are."""
        return self.ranks // self.per_node if self.ranks % self.per_node == 0 else 1


PlaceTables = Callable[[Sequence[Table], Machine], Plan]
"""A way to place tables that asks nobody how long anything takes."""


def place(rule: str, tables: Sequence[Table], machine: Machine) -> Plan:
    """The plan a rule makes; `InputError` where there is no such rule or the tables do not fit by it."""
    rules = RULES | DIVIDING_RULES
    if rule not in rules:
        raise InputError(f"No sharding rule is called {rule!r}; there are {', '.join(rules)}.")
    plan = rules[rule](tables, machine)
    for rank, held in enumerate(plan.split(tables) if machine.memory_bytes is not None else ()):
        used = sum(table.nbytes for table in held)
        if machine.memory_bytes is not None and used > machine.memory_bytes:
            raise InputError(
                f"The rule {rule} puts {used / MIB:.1f} MiB of tables on rank {rank}, which has "
                f"{machine.memory_bytes / MIB:.1f} MiB; use more ranks or another rule."
            )
    return plan


def _place_greedily(tables: Sequence[Table], costs: Sequence[float], ranks: int, memory_bytes: int | None) -> Plan:
    """Ties go to the rank with the fewest bytes, then to the lowest; a rank without room is passed over."""
    load, used = [0.0] * ranks, [0] * ranks
    rank_of = [0] * len(tables)
    for i in sorted(range(len(tables)), key=lambda i: (-costs[i], i)):
        size = tables[i].nbytes
        roomy = [rank for rank in range(ranks) if memory_bytes is None or used[rank] + size <= memory_bytes]
        if not roomy:
            raise InputError(_no_room(tables[i], ranks, memory_bytes))
        rank = min(roomy, key=lambda rank: (load[rank], used[rank], rank))
        rank_of[i] = rank
        load[rank] += costs[i]
        used[rank] += size
    return Plan.whole(tables, rank_of, ranks)


def _no_room(table: Table, ranks: int, memory_bytes: int | None) -> str:
    """What to say of a table that fits on no rank."""
    return (
        f"Table {table.name!r} of {table.nbytes / MIB:.1f} MiB fits on none of the {ranks} ranks of "
        f"{(memory_bytes or 0) / MIB:.1f} MiB beside the tables placed before it; use more ranks or another rule."
    )


def _greedy(cost: Callable[[Table], float]) -> PlaceTables:
    """Tables in order of their cost, each to the rank with least so far."""
    return lambda tables, machine: _place_greedily(tables, list(map(cost, tables)), machine.ranks, machine.memory_bytes)


def _elements(table: Table) -> float:
    """That a sample looks up."""
    return table.dim * table.pooling_factor


def _naive(tables: Sequence[Table], machine: Machine) -> Plan:
    """Table i on rank i mod N."""
    return Plan.whole(tables, [i % machine.ranks for i in range(len(tables))], machine.ranks)


def _naive_chunk(tables: Sequence[Table], machine: Machine) -> Plan:
    """Contiguous blocks of equal count."""
    return Plan.whole(tables, [i * machine.ranks // len(tables) for i in range(len(tables))], machine.ranks)


def _norm_lookup_greedy(tables: Sequence[Table], machine: Machine) -> Plan:
    """Looked-up elements and memory, each measured by its mean."""
    return _place_greedily(tables, _elements_and_bytes(tables), machine.ranks, machine.memory_bytes)


def _elements_and_bytes(tables: Sequence[Table]) -> list[float]:
    elements, sizes = _over_mean([_elements(table) for table in tables]), _over_mean([float(table.nbytes) for table in tables])
    return [element + other for element, other in zip(elements, sizes, strict=True)]


def _over_mean(values: list[float]) -> list[float]:
    total = sum(values)
    return [value * len(values) / total if total else 0.0 for value in values]


def _random(tables: Sequence[Table], machine: Machine) -> Plan:
    """Any rank that has room, by seed."""
    rank_of, used = [], [0] * machine.ranks
    for i, table in enumerate(tables):
        fits = [
            rank
            for rank in range(machine.ranks)
            if machine.memory_bytes is None or used[rank] + table.nbytes <= machine.memory_bytes
        ]
        if not fits:
            raise InputError(_no_room(table, machine.ranks, machine.memory_bytes))
        rank = fits[key_of(machine.seed, i, table.rows) % len(fits)]
        rank_of.append(rank)
        used[rank] += table.nbytes
    return Plan.whole(tables, rank_of, machine.ranks)


RULES: dict[str, PlaceTables] = {
    "lookup_greedy": _greedy(_elements),
    "naive": _naive,
    "naive_chunk": _naive_chunk,
    "norm_lookup_greedy": _norm_lookup_greedy,
    "random": _random,
    "size_greedy": _greedy(lambda table: float(table.nbytes)),
    "size_lookup_greedy": _greedy(lambda table: _elements(table) * math.log10(table.rows)),
}
"""Every rule that leaves tables whole, by name."""

# Of a table that every rank had better have a copy of: as HugeCTR is told in MLPerf's DLRM-DCNv2 (DP_SHARDING_THRESHOLD, 0.008
# GiB; mlcommons/training_results_v4.0, NVIDIA/benchmarks/dlrm_dcnv2/implementations/hugectr/config_DGXH100_1x8x6912.sh).
_COPIED_BYTES = 0.008 * GIB


def _copied_and_split(tables: Sequence[Table], machine: Machine) -> Plan:
    """Small tables are copied, those with more lookups than a rank's share divided by rows, the others spread whole.

    On several nodes the others are each divided by rows within a node, those with more lookups than a node's share by columns
    over several, as HugeCTR's plan `hier_auto` divides tables.
    """
    small = {table.name for table in tables if table.nbytes <= _COPIED_BYTES and table.precision != "int8"}
    rest = [table for table in tables if table.name not in small]
    every = tuple(range(machine.ranks))
    if machine.nodes > 1 and all(table.pooled for table in rest):
        held = dict.fromkeys(small, Placement(DATA_PARALLEL, every)) | _by_node(rest, machine)
        return Plan(machine.ranks, {table.name: held[table.name] for table in tables})
    share = sum(map(_elements, rest)) / machine.ranks
    hot = {table.name for table in rest if table.pooled and _elements(table) > share}
    whole = [table for table in rest if table.name not in hot]
    spread = _place_greedily(whole, _elements_and_bytes(whole), machine.ranks, machine.memory_bytes).placements
    kinds = dict.fromkeys(small, DATA_PARALLEL) | dict.fromkeys(hot, ROW_WISE)
    return Plan(
        machine.ranks,
        {table.name: Placement(kinds[table.name], every) if table.name in kinds else spread[table.name] for table in tables},
    )


def _by_node(tables: Sequence[Table], machine: Machine) -> dict[str, Placement]:
    """Each on the nodes with least so far, as many as its lookups fill, and by rows over their ranks."""
    costs = list(map(_elements, tables))
    share, load = sum(costs) / machine.nodes, [0.0] * machine.nodes
    result = {}
    for index in sorted(range(len(tables)), key=lambda index: (-costs[index], index)):
        parts = min(max(round(costs[index] / share), 1), machine.nodes, max(tables[index].dim // QUAD, 1))
        nodes = sorted(sorted(range(machine.nodes), key=lambda node: (load[node], node))[:parts])
        for node in nodes:
            load[node] += costs[index] / parts
        ranks = tuple(node * machine.per_node + place for node in nodes for place in range(machine.per_node))
        result[tables[index].name] = Placement(TABLE_ROW_WISE if parts == 1 else GRID, ranks, machine.per_node)
    return result


DIVIDING_RULES: dict[str, PlaceTables] = {"copied_and_split": _copied_and_split}
"""Those that divide and copy tables too."""
