"""Plans: whole tables on ranks."""

from __future__ import annotations

import json

import pytest

from steptime._build.dlrm.model import Table
from steptime._lookups.generators import Generator
from steptime._shard.plan.plan import Plan
from steptime.errors import InputError

TABLES = tuple(Table(name, 4, Generator(rows=rows, pooling=1.0)) for name, rows in (("a", 10), ("b", 20), ("c", 30)))


def test_ranks_see_their_own_tables_in_table_order() -> None:
    plan = Plan.of(TABLES, (1, 0, 1), ranks=3)
    assert [plan.on(rank) for rank in range(3)] == [(1,), (0, 2), ()]
    assert plan.split(TABLES) == ((TABLES[1],), (TABLES[0], TABLES[2]), ())
    assert plan.nbytes(TABLES) == (320, 640, 0)


def test_a_saved_plan_comes_back_whatever_its_order() -> None:
    plan = Plan.of(TABLES, (1, 0, 1), ranks=2)
    assert Plan.from_dict(plan.to_dict(), TABLES, 2) == plan
    assert Plan.from_dict(dict(sorted(plan.to_dict().items(), reverse=True)), TABLES, 2) == plan
    assert json.loads(plan.to_json()) == {"a": 1, "b": 0, "c": 1}


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"a": 0, "b": 1}, "does not place table 'c'"),
        ({"a": 0, "b": 1, "c": 1, "d": 0}, "places 'd', which is not a table"),
        ({"a": 0, "b": 1, "c": 2}, "table 'c' on rank 2; expected 0 to 1"),
        ({"a": 0, "b": -1, "c": 0}, "table 'b' on rank -1"),
    ],
)
def test_a_placement_that_does_not_fit_says_which_table(placement: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Plan.from_dict(placement, TABLES, 2)


def test_impossible_plans_are_refused() -> None:
    with pytest.raises(InputError, match="0 ranks"):
        Plan(0, (), ())
    with pytest.raises(InputError, match="2 tables and places 1"):
        Plan(2, ("a", "b"), (0,))
    with pytest.raises(InputError, match="'a' more than once"):
        Plan(2, ("a", "a"), (0, 1))


def test_a_plan_for_other_tables_is_refused() -> None:
    plan = Plan.of(TABLES, (0, 1, 1), ranks=2)
    with pytest.raises(InputError, match="'c' is in one of them only"):
        plan.check(TABLES[:2])
    with pytest.raises(InputError, match="another order"):
        plan.check(TABLES[::-1])


def test_a_rank_that_is_too_small_is_named() -> None:
    plan = Plan.of(TABLES, (0, 1, 1), ranks=2)
    plan.check(TABLES, memory_bytes=800)
    with pytest.raises(InputError, match="rank 1"):
        plan.check(TABLES, memory_bytes=799)
