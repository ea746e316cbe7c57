"""Tables whose rows or columns the ranks of one node share: what their steps do, and that plans of them are found and read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import BY_NODE, GRID, KINDS, TABLE_COLUMN_WISE, TABLE_ROW_WISE, TABLE_WISE, Plan
from steptime._build.dlrm.plan_files import plans_of, torchrec_document
from steptime._build.dlrm.workload import dlrm_workload
from steptime._lookups.generators import Generator
from steptime._platforms.platform import Platform
from steptime._shard.divisions import TaskDivisions
from steptime._shard.evaluator import Evaluator
from steptime._shard.explain import explain
from steptime._shard.given_plans import evaluated
from steptime._shard.search import search
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Task
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import InputError

RANKS, NODE = 16, 8
FIRST, SECOND = list(range(NODE)), list(range(NODE, RANKS))
ON_FIRST, ON_SECOND = ({"kind": TABLE_ROW_WISE, "ranks": ranks} for ranks in (FIRST, SECOND))
BOTH = {"kind": GRID, "ranks": [SECOND, FIRST]}


def model(count: int = 4, lookup: str = "table_batched", rows: int = 100_000) -> Dlrm:
    tables = tuple(Table(f"t{i}", 64, Generator(rows=rows * (i + 1), pooling=30.0, kind="zipf", seed=i)) for i in range(count))
    return Dlrm("nodes", 256 * RANKS, 13, (64,), (64, 1), tables, lookup=lookup, interaction="cat")


@cache
def two_nodes() -> Platform:
    return Platform.load(f"{RANKS}xh200-ib400")


def plan_of(*placed: Any) -> dict[str, Any]:
    return {f"t{number}": each for number, each in enumerate(placed)}


@pytest.mark.parametrize("lookup", ["table_batched", "embedding_bag"])
def test_partial_sums_are_added_within_a_node_and_then_cross_nodes(lookup: str) -> None:
    found = dlrm_workload(model(lookup=lookup), RANKS, plan_of(ON_FIRST, ON_SECOND, BOTH, 3))
    program = found.programs[0]
    own = {(each.kind, len(each.ranks)) for each in program.collectives}
    assert {("reduce_scatter", NODE), ("all_gather", NODE), ("all_to_all", 2), ("all_to_all", RANKS)} <= own
    added = next(each for each in program.collectives if each.kind == "reduce_scatter")
    batch = 256 * RANKS
    # Rank 0 adds its node's table and its slice of the one on both.
    assert (added.bytes_in, added.bytes_out) == (4 * batch * (64 + 32), 4 * batch * (64 + 32) // NODE)
    across = next(each for each in program.collectives if each.kind == "all_to_all" and len(each.ranks) == 2)
    assert across.bytes_in == added.bytes_out
    assert Counter(each.kind for each in program.collectives)["all_to_all"] == 4


def test_a_node_without_such_a_table_still_meets_the_others() -> None:
    found = dlrm_workload(model(), RANKS, plan_of(ON_FIRST, 1, 2, 9))
    last = next(program for program in found.programs if program.rank == found.owners[RANKS - 1])
    kinds = Counter((each.kind, len(each.ranks)) for each in last.collectives)
    assert kinds["reduce_scatter", NODE] == 0
    assert kinds["all_to_all", 2] == 2
    assert predict_on(found, two_nodes()).step_time_ms > 0


def test_on_a_single_node_rows_of_its_ranks_are_rows_of_all_ranks() -> None:
    on, small = Platform.load("8xh200-nvlink"), replace(model(), batch=256 * NODE)
    by_node = {"kind": TABLE_ROW_WISE, "ranks": FIRST}
    times = [
        predict_on(dlrm_workload(small, NODE, plan_of(each, each, 1, 2)), on).step_time_ms
        for each in (by_node, {"kind": "row_wise"})
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-6)


PLANS = {
    TABLE_ROW_WISE: plan_of(ON_FIRST, ON_SECOND, 5, 6),
    GRID: plan_of(BOTH, 1, 2, 3),
    TABLE_COLUMN_WISE: plan_of({"kind": TABLE_COLUMN_WISE, "ranks": [8, 9]}, 1, 2, 3),
    "no shard": plan_of(ON_FIRST, BOTH, {"kind": "row_wise"}, {"kind": "data_parallel"}),
}


@pytest.mark.parametrize("kind", PLANS)
def test_plans_by_node_come_back_from_every_form_and_are_evaluated_as_predicted(kind: str) -> None:
    tables = model().tables
    plan = Plan.from_dict(PLANS[kind], tables, RANKS)
    forms = (
        {"mine": plan.owners()},
        {"plan": plan.to_dict(), "kinds": plan.kinds()},
        json.loads(json.dumps(torchrec_document(plan, tables))),
    )
    for form in forms:
        (values,) = plans_of(form, "here").values()
        assert Plan.from_dict(values, tables, RANKS) == plan
    (found,) = evaluated(Task(model(), RANKS), two_nodes(), {"mine": plan})
    played = predict_on(dlrm_workload(model(), RANKS, plan), two_nodes()).step_time_ms
    assert found.step_ns / 1e6 == pytest.approx(played, rel=0.005)


def test_torchrec_is_told_every_block_of_rows_of_every_slice() -> None:
    plan = Plan.from_dict(PLANS[GRID], model().tables, RANKS)
    parameter = torchrec_document(plan, model().tables)["plan"][""]["t0"]
    shards = parameter["sharding_spec"]["shards"]
    assert parameter["ranks"] == [*SECOND, *FIRST] and len(shards) == RANKS
    assert sum(rows * columns for rows, columns in (shard["shard_sizes"] for shard in shards)) == 100_000 * 64
    assert [shard["shard_offsets"] for shard in shards[NODE - 1 : NODE + 1]] == [[87_500, 0], [0, 32]]
    assert shards[0]["placement"] == "rank:8/cuda:0"


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ({"kind": TABLE_ROW_WISE, "ranks": [1, 2, 3, 4]}, "expected all ranks of one node"),
        ({"kind": TABLE_ROW_WISE, "ranks": [0, 1, 2]}, "expected all ranks of one node"),
        ({"kind": GRID, "ranks": FIRST}, "a list of a node's ranks for every slice"),
        ({"kind": GRID, "ranks": [FIRST, [8]]}, "a list of a node's ranks for every slice"),
        ({"kind": GRID, "ranks": []}, "a list of a node's ranks for every slice"),
        ({"kind": GRID, "ranks": [[n] for n in range(RANKS)] * 2}, "in 32 slices"),
        ({"kind": TABLE_ROW_WISE, "ranks": [0, 1, 2, 3]}, "nodes of 8 and of 4 ranks"),
    ],
)
def test_rows_on_what_is_no_node_are_one_line(placed: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        Plan.from_dict(plan_of(ON_FIRST, placed, 1, 2), model().tables, RANKS)
    assert "\n" not in str(raised.value)


def test_slices_that_meet_by_dot_are_refused_and_rows_are_not() -> None:
    dot = replace(model(), interaction="dot")
    assert dlrm_workload(dot, RANKS, plan_of(ON_FIRST, ON_SECOND, 1, 2)).world_size == RANKS
    with pytest.raises(InputError, match='interaction "dot" takes whole vectors'):
        dlrm_workload(dot, RANKS, plan_of(BOTH, 0, 1, 2))


@pytest.mark.parametrize("kind", [TABLE_ROW_WISE, TABLE_COLUMN_WISE, GRID])
def test_a_search_uses_a_kind_that_alone_is_allowed(kind: str) -> None:
    task = Task(model(), RANKS, Constraints(kinds=(kind,)))
    found = search(task, two_nodes())
    assert set(found.best.plan.kinds().values()) == {kind}
    placed = list(found.best.plan.placements.values())
    assert all(len({rank // NODE for rank in each.ranks}) == each.slices or kind == TABLE_COLUMN_WISE for each in placed)
    assert all(len({rank // NODE for rank in each.ranks}) == 1 for each in placed if kind != GRID)
    assert explain(found, Evaluator(task.model, two_nodes(), RANKS)).ranks[0].used_bytes > 0


def test_busy_tables_go_to_nodes_where_that_is_fastest() -> None:
    wide = tuple(
        replace(table, dim=128, generator=replace(table.generator, pooling=100.0, kind="uniform")) for table in model(8).tables
    )
    busy = replace(model(), tables=wide, batch=16384 * RANKS)
    kinds = (TABLE_WISE, "row_wise", TABLE_ROW_WISE)
    found, without = (search(Task(busy, RANKS, Constraints(kinds=allowed)), two_nodes()) for allowed in (kinds, kinds[:2]))
    assert TABLE_ROW_WISE in found.best.plan.kinds().values()
    assert found.best.step_ns < without.best.step_ns


def test_memory_of_rows_is_that_of_the_nodes_that_share_them() -> None:
    task = Task(model(), RANKS)
    divisions = TaskDivisions(task, two_nodes(), SearchBudget(1), Evaluator(task.model, two_nodes(), RANKS))
    division, owners = Plan.from_dict(plan_of(ON_SECOND, 0, 1, 2), task.tables, RANKS).divided(task.tables)
    used = divisions.memory(division).used(np.array(owners), RANKS)
    share = task.tables[0].nbytes // NODE
    assert (used[SECOND] - used[3] >= share).all()
    assert used[3] == used[4]


NODES = st.sampled_from((1, 2, 4, 8, 16))


@given(st.data())
def test_any_plan_is_divided_and_put_together_again(data: st.DataObject) -> None:
    per_node, tables, placed = data.draw(NODES), model(3).tables, {}
    nodes = [list(range(first, first + per_node)) for first in range(0, RANKS, per_node)]
    for table in tables:
        kind = data.draw(st.sampled_from(KINDS))
        ranks: Any = data.draw(st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=1 if kind == TABLE_WISE else 5))
        if kind in BY_NODE:
            ranks = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3))
            ranks = ranks[0] if kind == TABLE_ROW_WISE else ranks
        placed[table.name] = {"kind": kind} if kind in ("row_wise", "data_parallel") else {"kind": kind, "ranks": ranks}
    plan = Plan.from_dict(placed, tables, RANKS)
    division, owners = plan.divided(tables)
    assert division.plan(tables, owners, RANKS) == plan
    assert Plan.from_dict(plan.owners(), tables, RANKS) == plan
    columns = sum(shard.columns for shard in division.shards(tables)) + sum(
        table.dim for node in range(len(nodes)) for table in division.node_tables(tables, node)
    )
    everywhere = sum(tables[index].dim for index in division.everywhere())
    assert columns + everywhere == sum(table.dim for table in tables)
