"""Memory of ranks, and what is said where a task does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.shard.additive import Additive, model_of

from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import COLUMN_WISE, DATA_PARALLEL, KINDS, ROW_WISE, TABLE_WISE, Division, Plan
from steptime._build.dlrm.workload import dlrm_workload
from steptime._models.memory.peak import process_bytes
from steptime._platforms.platform import Platform
from steptime._shard.memory import memory_of, packed, rank_limit
from steptime._shard.search import Searched, search
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import FREE, Task
from steptime._sim.modelled.prediction import memory_of as replay
from steptime.errors import InputError
from steptime_lab.workloads.drawn_tasks import sharding_tasks, step_tasks

PLATFORM = Platform.load("4xh200-quarter-loopback")
GIB = 1 << 30
OUTSIDE = process_bytes(4, 4)  # of a limit, what the process of a rank takes


def searched(task: Task, evaluations: int = 50) -> Searched:
    return search(task, PLATFORM, SearchBudget(evaluations), evaluator=Additive(task.model, task.ranks))


def test_a_rank_holds_its_shards_and_what_every_rank_needs() -> None:
    memory = memory_of(model_of(3), Division.whole(3), 2, GIB)
    used = memory.used([0, 1, 0], 2)
    sizes = memory.shard_bytes.tolist()
    assert used.tolist() == [memory.rank_bytes + sizes[0] + sizes[2], memory.rank_bytes + sizes[1]]
    assert memory.used(np.array([[0, 1, 0], [1, 1, 1]]), 2).shape == (2, 2)


def test_slices_repeat_the_state_of_rows_and_the_lookups() -> None:
    model = replace(model_of(1), optimizer="rowwise_adagrad")
    whole, halves = (memory_of(model, division, 2, GIB) for division in (Division.whole(1), Division((2,), (COLUMN_WISE,))))
    assert halves.shard_bytes.sum() - whole.shard_bytes.sum() >= model.state_bytes(model.tables[0])


def test_row_wise_takes_less_of_a_rank_than_a_copy() -> None:
    by_rows, copied = (memory_of(model_of(1), Division((0,), (kind,)), 4, GIB) for kind in (ROW_WISE, DATA_PARALLEL))
    assert by_rows.rank_bytes < copied.rank_bytes


def _plans(model: Dlrm, ranks: int) -> list[Plan]:
    dealt: dict[str, Any] = {table.name: index % ranks for index, table in enumerate(model.tables)}
    first, second, *_, last = (table.name for table in model.tables)
    changes: list[dict[str, Any]] = [{}, {first: {"kind": "row_wise"}}, {last: {"kind": "data_parallel"}}]
    if model.interaction == "cat":
        changes.append({first: [1, 2], second: [0, 3]})
    chunks = Plan.whole(model.tables, [index * ranks // len(model.tables) for index in range(len(model.tables))], ranks)
    return [chunks, *(Plan.from_dict(dealt | change, model.tables, ranks) for change in changes)]


@pytest.mark.parametrize(
    "model",
    [sharding_tasks()[3], sharding_tasks()[20], step_tasks(4)[0], step_tasks(4)[2], step_tasks(4)[5].with_batch(8192)],
    ids=lambda model: model.name,
)
def test_the_search_knows_what_the_allocator_replays(model: Dlrm) -> None:
    limit, outside = rank_limit(PLATFORM.device.limits, 4, Constraints())
    errors = []
    for plan in _plans(model, 4):
        replayed = replay(dlrm_workload(model, 4, plan), PLATFORM)["ranks"]
        division, owners = plan.divided(model.tables)
        used = memory_of(model, division, 4, limit, outside).used(list(owners), 4)
        fullest = max(replayed, key=lambda one: one["peak_bytes"])
        assert used[fullest["rank"]] == pytest.approx(fullest["peak_bytes"], rel=0.05)
        errors += [used[one["rank"]] / one["peak_bytes"] - 1 for one in replayed]
    assert abs(float(np.median(errors))) < 0.02


def test_packing_respects_pinned_shards_and_room() -> None:
    memory = memory_of(model_of(4), Division.whole(4), 2, 0)
    memory = replace(memory, shard_bytes=np.array([6, 5, 4, 3], dtype=np.int64), rank_bytes=0, limit=9)
    plan = packed(memory, np.array([FREE, FREE, 0, FREE], dtype=np.intp), 2)
    assert plan is not None
    assert plan[2] == 0
    assert memory.fits(plan, 2)
    assert packed(replace(memory, limit=8), np.full(4, FREE, dtype=np.intp), 2) is None


def _large(rows: int, dim: int = 64, count: int = 3) -> Dlrm:
    model = model_of(count, batch=256)
    tables = tuple(replace(table, dim=dim, generator=replace(table.generator, rows=rows)) for table in model.tables)
    return replace(model, tables=tables, optimizer="rowwise_adagrad")


def test_a_table_larger_than_a_rank_is_named_with_what_is_short_and_three_helps() -> None:
    constraints = Constraints(memory_bytes=GIB + OUTSIDE, kinds=(TABLE_WISE,))
    with pytest.raises(InputError) as raised:
        searched(Task(_large(4_000_000), 4, constraints))
    said = str(raised.value)
    assert "\n" not in said
    assert "with state and buffers, a rank has 962 MiB for tables" in said
    assert "are short" in said
    assert all(f"({number})" in said for number in (1, 2, 3))
    assert "column_wise of the 3 largest tables" in said
    assert "(allow column_wise)" in said


def test_helps_that_are_said_do_help() -> None:
    """More ranks are only said where that many are enough."""
    constraints = Constraints(memory_bytes=2 * GIB, kinds=(TABLE_WISE,))
    task = Task(_large(5_000_000, count=12), 4, constraints)
    with pytest.raises(InputError, match="all ranks together have") as raised:
        searched(task)
    ranks = int(str(raised.value).split("(1) ")[1].split(" ranks")[0])
    memory = memory_of(task.model, Division.whole(12), ranks, 2 * GIB)
    assert packed(memory, np.full(12, FREE, dtype=np.intp), ranks) is not None
    assert ranks > 4


def test_a_table_that_does_not_fit_whole_is_divided_where_that_is_allowed() -> None:
    constraints = Constraints(memory_bytes=GIB + OUTSIDE, kinds=KINDS)
    found = searched(Task(_large(4_000_000), 4, constraints), 200)
    assert set(found.best.plan.kinds().values()) <= {COLUMN_WISE, ROW_WISE}


def test_memory_that_is_said_to_be_enough_is() -> None:
    model = replace(_large(4_000_000), interaction="dot", bottom=(64,))
    with pytest.raises(InputError, match="What would help") as raised:
        searched(Task(model, 4, Constraints(memory_bytes=GIB)))
    said = str(raised.value)
    enough = float(said.split("ranks with more memory than 1 GiB: ")[1].split(" GiB", maxsplit=1)[0])
    searched(Task(model, 4, Constraints(memory_bytes=int((enough + 0.05) * GIB))))


def test_a_plan_leaves_the_headroom_that_is_asked_for_by_the_allocators_replay() -> None:
    """A limit includes the process, as `predict --memory` has it."""
    model = replace(sharding_tasks()[3], optimizer="rowwise_adagrad")
    peak = replay(dlrm_workload(model, 4, Plan.whole(model.tables, [i % 4 for i in range(len(model.tables))], 4)), PLATFORM)
    limit, headroom = int(1.3 * peak["peak_bytes"]), 0.1
    found = search(Task(model, 4, Constraints(memory_bytes=limit, headroom=headroom)), PLATFORM, SearchBudget(200))
    assert replay(dlrm_workload(model, 4, found.best.plan), PLATFORM)["peak_bytes"] <= (1 - headroom) * limit


def test_of_plans_that_are_not_told_apart_the_one_with_more_room_is_best() -> None:
    """A large table that nothing is looked up in goes where most room is, whatever the loads of ranks are."""
    model = model_of(6, batch=258)
    idle = (replace(table, generator=replace(table.generator, rows=8_000_000, pooling=0.0)) for table in model.tables[:3])
    task = Task(replace(model, tables=(*idle, *model.tables[3:])), 3, Constraints(kinds=(TABLE_WISE,)))
    found = search(task, PLATFORM, SearchBudget(300), evaluator=Additive(task.model, 3))
    assert len({found.best.plan.placements[table.name].ranks for table in task.tables[:3]}) == 3
