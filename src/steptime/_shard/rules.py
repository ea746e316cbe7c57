"""The usual sharding rules: a plan from sizes and lookup counts alone. Baselines for everything cleverer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Plan
from steptime._lookups.generators import key_of
from steptime._shard.search.greedy import no_room, place_greedily
from steptime._units import MIB
from steptime.errors import InputError


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rule knows of the machine. Without `memory_bytes` per rank everything fits; `seed` is for rules that draw."""

    ranks: int
    memory_bytes: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to place tables that asks nobody how long anything takes."""

    name: str
    about: str
    place: Callable[[Sequence[Table], Machine], Plan]


def rules() -> dict[str, Rule]:
    """Every rule, by name."""
    return dict(_RULES)


def place(rule: str, tables: Sequence[Table], machine: Machine) -> Plan:
    """The plan a rule makes; `InputError` where there is no such rule or the tables do not fit by it."""
    if rule not in rules():
        raise InputError(f"No sharding rule is called {rule!r}; there are {', '.join(rules())}.")
    plan = rules()[rule].place(tables, machine)
    for rank, held in enumerate(plan.split(tables) if machine.memory_bytes is not None else ()):
        used = sum(table.nbytes for table in held)
        if machine.memory_bytes is not None and used > machine.memory_bytes:
            raise InputError(
                f"The rule {rule} puts {used / MIB:.1f} MiB of tables on rank {rank}, which has "
                f"{machine.memory_bytes / MIB:.1f} MiB; use more ranks or another rule."
            )
    return plan


def plans_by_rule(tables: Sequence[Table], machine: Machine) -> dict[str, Plan]:
    """The plan of every rule; some may be the same plan."""
    return {name: place(name, tables, machine) for name in rules()}


def _greedy(cost: Callable[[Table], float]) -> Callable[[Sequence[Table], Machine], Plan]:
    """Tables in order of their cost, each to the rank with least so far."""
    return lambda tables, machine: place_greedily(tables, list(map(cost, tables)), machine.ranks, machine.memory_bytes)


def _elements(table: Table) -> float:
    """That a sample looks up."""
    return table.dim * table.pooling_factor


def _naive(tables: Sequence[Table], machine: Machine) -> Plan:
    return Plan.whole(tables, [i % machine.ranks for i in range(len(tables))], machine.ranks)


def _naive_chunk(tables: Sequence[Table], machine: Machine) -> Plan:
    return Plan.whole(tables, [i * machine.ranks // len(tables) for i in range(len(tables))], machine.ranks)


def _norm_lookup_greedy(tables: Sequence[Table], machine: Machine) -> Plan:
    """Looked-up elements and memory, each measured by its mean."""
    elements, sizes = _over_mean([_elements(table) for table in tables]), _over_mean([float(table.nbytes) for table in tables])
    costs = [element + other for element, other in zip(elements, sizes, strict=True)]
    return place_greedily(tables, costs, machine.ranks, machine.memory_bytes)


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
            raise InputError(no_room(table, machine.ranks, machine.memory_bytes))
        rank = fits[key_of(machine.seed, i, table.rows) % len(fits)]
        rank_of.append(rank)
        used[rank] += table.nbytes
    return Plan.whole(tables, rank_of, machine.ranks)


_RULES = {
    rule.name: rule
    for rule in (
        Rule("lookup_greedy", "greedy on dim * pooling factor", _greedy(_elements)),
        Rule("naive", "table i on rank i mod N", _naive),
        Rule("naive_chunk", "contiguous blocks of equal count", _naive_chunk),
        Rule(
            "norm_lookup_greedy",
            "greedy on dim * pooling factor over its mean plus bytes over their mean",
            _norm_lookup_greedy,
        ),
        Rule("random", "each table on a rank drawn by the seed, its place and its rows", _random),
        Rule("size_greedy", "greedy on bytes", _greedy(lambda table: float(table.nbytes))),
        Rule(
            "size_lookup_greedy",
            "greedy on dim * pooling factor * log10(rows)",
            _greedy(lambda table: _elements(table) * math.log10(table.rows)),
        ),
    )
}
