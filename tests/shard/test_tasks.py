"""Random tasks: what they promise to those who measure them."""

from __future__ import annotations

import sys

import pytest
from tests.shard.bytes_model import plans_by_rule, step_ms, times_by_rule

from steptime._build.dlrm.model import Dlrm
from steptime._shard.rules import Machine
from steptime_lab.workloads.drawn_tasks import (
    HEAVY,
    MOST_BYTES_PER_RANK,
    Variant,
    random_task,
    sharding_tasks,
    step_batches,
    step_tasks,
)


@pytest.mark.parametrize("ranks", [2, 4])
def test_there_are_ten_heavy_and_ten_ordinary_step_tasks(ranks: int) -> None:
    tasks = step_tasks(ranks)
    assert len({task.name for task in tasks}) == 20
    heavy = [task for task in tasks if "heavy" in task.name]
    assert len(heavy) == 10
    assert all(table.pooling_factor >= HEAVY for task in heavy for table in task.tables)
    assert all(min(table.pooling_factor for table in task.tables) < HEAVY for task in tasks if task not in heavy)


@pytest.mark.parametrize("ranks", [2, 4])
def test_heavy_and_ordinary_step_tasks_have_both_of_everything(ranks: int) -> None:
    tasks = step_tasks(ranks)
    for kind in ("heavy", "ordinary"):
        some = [task for task in tasks if kind in task.name]
        assert {(task.lookup, task.optimizer) for task in some} == {
            (lookup, optimizer) for lookup in ("embedding_bag", "table_batched") for optimizer in ("sgd", "rowwise_adagrad")
        }
        assert {task.interaction for task in some} == {"dot", "cat"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_step_tasks_have_the_published_number_of_tables(ranks: int) -> None:
    for task in step_tasks(ranks):
        if task.lookup == "table_batched":
            assert int(13 * ranks * 0.7) <= len(task.tables) < int(13 * ranks * 1.3)
        else:
            assert 8 <= len(task.tables) <= 20


@pytest.mark.parametrize("task", [*step_tasks(2), *step_tasks(4), *sharding_tasks()], ids=lambda task: task.name)
def test_a_task_can_be_built(task: Dlrm) -> None:
    assert sum(table.nbytes for table in task.tables) <= 4 * MOST_BYTES_PER_RANK
    assert len({table.name for table in task.tables}) == len(task.tables)
    assert len({table.generator.seed for table in task.tables}) == len(task.tables)
    assert task.top[-1] == 1
    assert all(table.dim % 4 == 0 for table in task.tables)
    assert all(table.pooling_factor <= 200 for table in task.tables)
    if task.interaction == "dot":
        assert {table.dim for table in task.tables} == {task.bottom[-1]}
    assert Dlrm.from_dict(task.to_dict()) == task


def test_batches_split_evenly_from_small_to_large() -> None:
    for ranks in (1, 2, 4, 8):
        assert all(batch % ranks == 0 for batch in step_batches(ranks))
        assert len(set(step_batches(ranks))) == 4


def test_the_same_seed_draws_the_same_task() -> None:
    variant = Variant(heavy=True)
    assert random_task(7, variant, 4).to_json() == random_task(7, variant, 4).to_json()
    assert random_task(7, variant, 4) != random_task(8, variant, 4)
    again = sharding_tasks.__wrapped__()
    assert [task.to_json() for task in again] == [task.to_json() for task in sharding_tasks()]


def test_half_of_the_sharding_tasks_are_heavy() -> None:
    lightest = [min(table.pooling_factor for table in task.tables) for task in sharding_tasks()]
    assert len(lightest) == 40
    assert all(pooling >= HEAVY for pooling in lightest[:20])
    assert all(pooling < HEAVY for pooling in lightest[20:])
    assert {task.optimizer for task in sharding_tasks()} == {"sgd", "rowwise_adagrad"}
    assert {task.lookup for task in sharding_tasks()} == {"table_batched"}


def test_tables_of_equal_load_differ_in_skew_alone() -> None:
    tasks = [task for task in sharding_tasks() if task.name.endswith("-equal")]
    assert len(tasks) >= 8
    for task in tasks:
        heavy = [table for table in task.tables if table.pooling_factor >= HEAVY]
        loads = [table.dim * table.pooling_factor for table in heavy]
        assert max(loads) / min(loads) < 1.05
        assert sum(table.generator.kind == "uniform" for table in heavy) == 4
        assert len(heavy) >= 8


def test_rules_make_different_plans_of_a_sharding_task() -> None:
    distinct = [len({plan.rank_of for plan in plans_by_rule(task.tables, Machine(4)).values()}) for task in sharding_tasks()]
    assert min(distinct) >= 5
    assert sum(distinct) / len(distinct) > 6.5


def test_a_random_rule_is_seldom_good_enough() -> None:
    """In bytes over bandwidth: 4 to 20 ms a step, lookups close to half of it, chance well under the 60 % asked for."""
    within, share = [], []
    for task in sharding_tasks():
        times = times_by_rule(task, 4)
        best = min(times.values())
        within.append(sum(time <= 1.1 * best for time in times.values()) / len(times))
        step, lookups = min(step_ms(task, plan) for plan in plans_by_rule(task.tables, Machine(4)).values())
        share.append(lookups / step)
        assert 4 < best < 20, task.name
    chance = sum(within) / len(within)
    lookups_share = sum(share) / len(share)
    sys.stdout.write(f"a random rule is within 10 % of the best in {chance:.0%} of draws; lookups take {lookups_share:.0%}\n")
    assert chance < 0.5
    assert lookups_share > 0.4
