"""Every kind of division with every interaction and every implementation of lookups: searched, explained and predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from tests.shard.additive import model_of

from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import COLUMN_WISE, DATA_PARALLEL, GRID, KINDS, ROW_WISE, SLICED, Division
from steptime._build.dlrm.workload import dlrm_workload
from steptime._platforms.platform import Platform
from steptime._shard.evaluator import Evaluator
from steptime._shard.explain import explain
from steptime._shard.memory import memory_of, rank_limit
from steptime._shard.search import search
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Task
from steptime._sim.modelled.prediction import memory_of as replay
from steptime.errors import InputError

PLATFORM = Platform.load("2xh200-nvlink")


def model(interaction: str, lookup: str = "table_batched", count: int = 2, dim: int = 64, batch: int = 256) -> Dlrm:
    other = model_of(count, batch=batch)
    tables = tuple(replace(table, dim=dim) for table in other.tables)
    return replace(other, tables=tables, interaction=interaction, lookup=lookup, bottom=(64, dim))


@pytest.mark.parametrize(
    ("interaction", "lookup", "kind"), list(product(("dot", "cat"), ("table_batched", "fbgemm", "embedding_bag"), KINDS))
)
def test_every_kind_is_searched_with_every_interaction_and_implementation(interaction: str, lookup: str, kind: str) -> None:
    if interaction == "dot" and kind in (*SLICED, GRID):
        with pytest.raises(InputError, match="allow table_wise"):
            Task(model(interaction, lookup), 2, Constraints(kinds=(kind,)))
        return
    task = Task(model(interaction, lookup), 2, Constraints(kinds=(kind,)))
    evaluator = Evaluator(task.model, PLATFORM, task.ranks)
    found = search(task, PLATFORM, SearchBudget(4), evaluator=evaluator)
    assert set(found.best.plan.kinds().values()) <= {kind, "row_wise"}  # on a single node rows of its ranks are rows of all
    assert len(explain(found, evaluator).ranks) == 2


def test_ranks_that_one_is_played_for_do_what_it_does() -> None:
    one = Evaluator(model("cat", "embedding_bag"), PLATFORM, 2)
    both = one.simulate(np.array([[0, 1, 0, 1]]), Division((2, 2), (COLUMN_WISE, COLUMN_WISE)))
    assert both.forward_ns.shape == (1, 2)
    assert both.forward_ns[0, 0] == both.forward_ns[0, 1] > 0


@pytest.mark.parametrize("count", [2, 12])
@pytest.mark.parametrize("kind", [None, ROW_WISE, DATA_PARALLEL])
def test_memory_of_vectors_that_meet_by_dot_is_what_the_allocator_replays(count: int, kind: str | None) -> None:
    dot = model("dot", count=count, dim=128, batch=8192)
    division = Division.whole(count) if kind is None else Division.whole(count).with_table(0, kind)
    owners = [index % 2 for index in range(len(division.shards(dot.tables)))]
    limit, outside = rank_limit(PLATFORM.device.limits, 2, Constraints())
    used = memory_of(dot, division, 2, limit, outside).used(owners, 2)
    replayed = replay(dlrm_workload(dot, 2, division.plan(dot.tables, owners, 2)), PLATFORM)
    assert int(used.max()) == pytest.approx(replayed["peak_bytes"], rel=0.05)
