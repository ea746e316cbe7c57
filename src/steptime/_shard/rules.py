"""The usual sharding rules: a plan from sizes and lookup counts alone. Baselines for everything cleverer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Plan
from steptime._lookups.generators import key_of
from steptime._units import MIB
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rule knows of the machine. Without `memory_bytes` per rank everything fits; `seed` is for rules that draw."""

    ranks: int
    memory_bytes: int | None = None
    seed: int = 0


PlaceTables = Callable[[Sequence[Table], Machine], Plan]
"""A way to place tables that asks nobody how long anything takes."""


def place(rule: str, tables: Sequence[Table], machine: Machine) -> Plan:
    """The plan a rule makes; `InputError` where there is no such rule or the tables do not fit by it."""
    if rule not in RULES:
        raise InputError(f"No sharding rule is called {rule!r}; there are {', '.join(RULES)}.")
    plan = RULES[rule](tables, machine)
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
    elements, sizes = _over_mean([_elements(table) for table in tables]), _over_mean([float(table.nbytes) for table in tables])
    costs = [element + other for element, other in zip(elements, sizes, strict=True)]
    return _place_greedily(tables, costs, machine.ranks, machine.memory_bytes)


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
"""Every rule, by name."""
