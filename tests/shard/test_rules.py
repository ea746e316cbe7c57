"""Sharding rules: where each puts its tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.shard.bytes_model import plans_by_rule

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import Plan
from steptime._lookups.generators import Generator
from steptime._shard.rules import RULES, Machine, place
from steptime.errors import InputError

COSTS: dict[str, Callable[[Table, list[Table]], float]] = {
    "size_greedy": lambda table, _: float(table.nbytes),
    "lookup_greedy": lambda table, _: table.dim * table.pooling_factor,
    "size_lookup_greedy": lambda table, _: table.dim * table.pooling_factor * math.log10(table.rows),
    "norm_lookup_greedy": lambda table, tables: (
        table.dim * table.pooling_factor / (sum(t.dim * t.pooling_factor for t in tables) / len(tables))
        + table.nbytes / (sum(t.nbytes for t in tables) / len(tables))
    ),
}


def table(name: str, rows: int, dim: int, pooling: float) -> Table:
    return Table(name, dim, Generator(rows=rows, pooling=pooling))


@st.composite
def table_sets(draw: st.DrawFn) -> list[Table]:
    sizes = draw(
        st.lists(
            st.tuples(st.integers(1, 10**7), st.sampled_from([4, 16, 64, 128]), st.floats(0.1, 200)), min_size=1, max_size=40
        )
    )
    return [table(f"t{i}", *size) for i, size in enumerate(sizes)]


def test_the_seven_published_rules_are_there() -> None:
    assert set(RULES) >= {*COSTS, "naive", "naive_chunk", "random"}


@given(table_sets(), st.integers(1, 8), st.integers(0, 3))
def test_every_rule_places_every_table_once(tables: list[Table], ranks: int, seed: int) -> None:
    for plan in plans_by_rule(tables, Machine(ranks, seed=seed)).values():
        assert list(plan.placements) == [t.name for t in tables]
        assert sorted(t.name for owned in plan.split(tables) for t in owned) == sorted(t.name for t in tables)


@given(table_sets(), st.integers(1, 8))
def test_naive_is_i_mod_n_and_chunks_are_contiguous_and_even(tables: list[Table], ranks: int) -> None:
    assert place("naive", tables, Machine(ranks)).rank_of == tuple(i % ranks for i in range(len(tables)))
    chunks = place("naive_chunk", tables, Machine(ranks)).rank_of
    assert list(chunks) == sorted(chunks)
    counts = [Counter(chunks)[rank] for rank in range(ranks)]
    assert max(counts) - min(counts) <= 1


@given(table_sets(), st.integers(1, 8))
def test_greedy_ranks_differ_by_at_most_their_last_table(tables: list[Table], ranks: int) -> None:
    for name, cost in COSTS.items():
        costs = [cost(t, tables) for t in tables]
        plan = place(name, tables, Machine(ranks))
        loads = [sum(cost for cost, owner in zip(costs, plan.rank_of, strict=True) if owner == rank) for rank in range(ranks)]
        for rank in range(ranks):
            last = min((cost for cost, owner in zip(costs, plan.rank_of, strict=True) if owner == rank), default=0.0)
            assert loads[rank] - last <= min(loads) * (1 + 1e-9) + 1e-9


@given(table_sets(), st.integers(1, 6), st.floats(0.2, 1.5))
def test_memory_is_respected_or_said_to_be_short(tables: list[Table], ranks: int, share: float) -> None:
    memory = int(share * sum(t.nbytes for t in tables) / ranks)
    for name in RULES:
        try:
            plan = place(name, tables, Machine(ranks, memory_bytes=memory))
        except InputError as error:
            assert "MiB" in str(error)
        else:
            assert max(sum(t.nbytes for t in owned) for owned in plan.split(tables)) <= memory


def test_greedy_ties_go_to_the_rank_with_the_fewest_bytes() -> None:
    # Equal lookup cost, so only bytes tell the ranks apart when the third table comes.
    tables = [table("large", 1000, 16, 4.0), table("small", 10, 16, 4.0), table("next", 10, 16, 4.0)]
    assert place("lookup_greedy", tables, Machine(2)).owners() == {"large": 0, "small": 1, "next": 1}


def test_greedy_by_hand() -> None:
    tables = [table("a", 1000, 16, 1.0), table("b", 10, 16, 9.0), table("c", 100, 16, 5.0), table("d", 10, 16, 4.5)]
    assert place("lookup_greedy", tables, Machine(2)).rank_of == (0, 0, 1, 1)
    assert place("size_greedy", tables, Machine(2)).rank_of == (0, 1, 1, 1)
    # log10 of rows: 3 * 1, 1 * 9, 2 * 5, 1 * 4.5.
    assert place("size_lookup_greedy", tables, Machine(2)).rank_of == (0, 1, 0, 1)
    # Elements over their mean 78 plus bytes over their mean 17920: a 0.21 + 3.57, b 1.85 + 0.04, c 1.03 + 0.36, d 0.92 + 0.04.
    assert place("norm_lookup_greedy", tables, Machine(2)).rank_of == (0, 1, 1, 1)


def test_random_follows_its_seed() -> None:
    tables = [table(f"t{i}", 10, 16, 1.0) for i in range(30)]
    drawn = [place("random", tables, Machine(4, seed=seed)).rank_of for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {0, 1, 2, 3}


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(InputError, match="'best'; there are lookup_greedy"):
        place("best", [], Machine(2))


def test_no_tables_make_an_empty_plan() -> None:
    assert all(plan == Plan(3, {}) for plan in plans_by_rule([], Machine(3)).values())
