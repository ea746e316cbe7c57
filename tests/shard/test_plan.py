"""Plans that divide tables: slices, parts on every rank, and reading them back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steptime._build.dlrm.model import Table
from steptime._build.dlrm.plan import COLUMN_WISE, DATA_PARALLEL, ROW_WISE, TABLE_WISE, Division, Placement, Plan
from steptime._lookups.generators import Generator
from steptime.errors import InputError

TABLES = tuple(Table(name, dim, Generator(rows=1000, pooling=2.0)) for name, dim in (("a", 16), ("b", 64), ("c", 36)))


@given(quads=st.integers(1, 64), data=st.data())
def test_slices_cover_all_columns_once_and_are_as_equal_as_fours_are(quads: int, data: st.DataObject) -> None:
    slices = data.draw(st.integers(1, quads))
    table = Table("t", 4 * quads, Generator(rows=10, pooling=1.0))
    shards = Division((slices,), (COLUMN_WISE,)).shards([table])
    assert [shard.first_column for shard in shards] == [sum(one.columns for one in shards[:i]) for i in range(len(shards))]
    assert sum(shard.columns for shard in shards) == table.dim
    assert max(shard.columns for shard in shards) - min(shard.columns for shard in shards) in (0, 4)
    assert all(shard.columns % 4 == 0 for shard in shards)


def test_a_slice_is_a_narrower_table_with_the_same_rows_and_lookups() -> None:
    division = Division.whole(3).with_table(1, COLUMN_WISE, 2)
    shards = division.shard_tables(TABLES)
    assert [(shard.name, shard.dim) for shard in shards] == [("a", 16), ("b[0:32]", 32), ("b[32:64]", 32), ("c", 36)]
    assert shards[1].generator == TABLES[1].generator


def test_a_table_on_every_rank_leaves_no_shard_to_place() -> None:
    division = Division.whole(3).with_table(0, ROW_WISE).with_table(2, DATA_PARALLEL)
    assert [shard.table for shard in division.shards(TABLES)] == [1]
    plan = division.plan(TABLES, [1], 2)
    assert plan.to_dict() == {"a": [0, 1], "b": [1], "c": [0, 1]}
    assert plan.kinds() == {"a": ROW_WISE, "b": TABLE_WISE, "c": DATA_PARALLEL}


def test_a_plan_says_how_its_tables_were_divided_and_where_shards_are() -> None:
    division = Division.whole(3).with_table(1, COLUMN_WISE, 2).with_table(2, ROW_WISE)
    plan = division.plan(TABLES, [3, 0, 2], 4)
    assert plan.divided(TABLES) == (division, (3, 0, 2))


def test_ranks_see_their_own_shards_in_table_order() -> None:
    plan = Plan.from_dict({"a": 1, "b": [0, 2], "c": {"kind": "row_wise"}}, TABLES, ranks=4)
    assert [[table.name for table in tables] for tables in plan.split(TABLES)] == [["b[0:32]"], ["a"], ["b[32:64]"], []]
    assert plan.of_kind(TABLES, ROW_WISE) == (TABLES[2],)


def test_a_saved_plan_comes_back_whatever_its_order() -> None:
    whole = Plan.whole(TABLES, (1, 0, 1), ranks=2)
    mixed = Plan.from_dict({"a": {"kind": "data_parallel"}, "b": [1, 0], "c": 0}, TABLES, 2)
    for plan in (whole, mixed):
        for values in (plan.owners(), dict(reversed(plan.owners().items())), json.loads(json.dumps(plan.owners()))):
            assert Plan.from_dict(values, TABLES, 2) == plan
    assert whole.owners() == {"a": 1, "b": 0, "c": 1}
    assert whole.rank_of == (1, 0, 1)


def test_a_plan_for_no_ranks_is_refused() -> None:
    with pytest.raises(InputError, match="0 ranks"):
        Plan(0, {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": 0, "b": 1}, "does not place table 'c'"),
        ({"a": 0, "b": 1, "c": 1, "d": 0}, "places 'd', which is no table"),
        ({"a": 0, "b": 1, "c": 2}, "table 'c' on rank 2; expected 0 to 1"),
        ({"a": 0, "b": "x", "c": 1}, "table 'b': 'x'; expected a rank"),
        ({"a": 0, "b": [], "c": 1}, "expected a rank"),
        ({"a": [0, 1, 0, 1, 0], "b": 0, "c": 1}, "'a' of 16 columns in 5 slices; expected 1 to 4"),
        ({"a": {"kind": "diagonal", "ranks": [0]}, "b": 0, "c": 1}, "expected kind"),
        ({"a": {"kind": "row_wise", "ranks": [0]}, "b": 0, "c": 1}, "expected all 2"),
    ],
)
def test_a_plan_that_does_not_fit_says_why_in_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        Plan.from_dict(values, TABLES, 2)
    assert "\n" not in str(raised.value)


def test_kinds_are_read_as_written() -> None:
    plan = Plan.from_dict({"a": {"kind": "row_wise"}, "b": [1, 0], "c": {"kind": "table_wise", "ranks": [1]}}, TABLES, 2)
    assert plan.placements["a"] == Placement(ROW_WISE, (0, 1))
    assert plan.placements["b"] == Placement(COLUMN_WISE, (1, 0))
    assert plan.placements["c"] == Placement(TABLE_WISE, (1,))
