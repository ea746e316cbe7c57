"""Searches: laws every strategy keeps, on steps whose best plan is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shard.additive import Additive, evaluation, model_of

from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import COLUMN_WISE, DATA_PARALLEL, KINDS, TABLE_WISE, Division
from steptime._platforms.platform import Platform
from steptime._shard.guide import learn
from steptime._shard.memory import memory_of
from steptime._shard.search import Searched, search
from steptime._shard.search_state import Search, SearchBudget, renumbered
from steptime._shard.strategies import STRATEGIES, plans_at_most, plans_of
from steptime._shard.task import FREE, Task
from steptime._sim.composed import Evaluation
from steptime.errors import InputError

PLATFORM = Platform.load("4xh200-quarter-loopback")
WHOLE = Constraints(kinds=(TABLE_WISE,))


def task_of(tables: int, ranks: int = 4, *, seed: int = 0, constraints: Constraints = WHOLE) -> Task:
    return Task(model_of(tables, seed=seed), ranks, constraints)


def additive(task: Task) -> Additive:
    return Additive(task.model, task.ranks)


def searched(task: Task, evaluations: int = 4000, *only: str) -> Searched:
    return search(task, PLATFORM, SearchBudget(evaluations), evaluator=additive(task), only=only or None)


def state(task: Task, evaluations: int = 1000) -> Search:
    division = Division.whole(len(task.tables))
    memory = memory_of(task.model, division, task.ranks, 1 << 40)
    pinned = np.full(len(task.tables), FREE, dtype=np.intp)
    return Search(division, task.tables, task.ranks, memory, pinned, additive(task), SearchBudget(evaluations))


def test_strategies_take_turns_in_order() -> None:
    assert list(STRATEGIES) == ["rules", "greedy", "beam", "exact", "local", "restarts"]


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_finds_plans_that_fit_and_keeps_to_its_budget(name: str) -> None:
    found = state(task_of(6, 2), 200)
    STRATEGIES[name](found)
    assert found.ranked
    assert found.asked <= 200
    assert all(found.possible(np.array([one.rank_of])).all() for one in found.ranked)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_local_search_is_within_half_a_percent_of_the_best_of_all_plans(seed: int) -> None:
    task = Task(model_of(7, seed=seed, batch=960), 3, WHOLE)
    exact = searched(task, 4000, "exact").best.step_ns
    local = searched(task, 4000, "rules", "greedy", "beam", "local").best.step_ns
    assert exact <= local <= 1.005 * exact


def test_the_best_plan_is_never_slower_than_any_rules() -> None:
    for seed in range(5):
        found = searched(task_of(20, seed=seed), 600)
        assert all(option is None or found.best.step_ns <= option.step_ns for option in found.rules.values())


def test_the_search_is_near_a_bound_no_plan_can_beat() -> None:
    task = task_of(60)
    model = task.model
    total = sum(3 * model.batch * t.pooling_factor * t.dim * (1 + t.generator.alpha / 3) + 1000 * t.dim for t in model.tables)
    assert searched(task).best.step_ns <= 1.01 * (1e6 + total / 4)


def test_the_same_budget_finds_the_same_plans() -> None:
    first, second = (searched(task_of(25), 500) for _ in range(2))
    assert first.options == second.options
    assert first.searched_plans == second.searched_plans


def test_more_evaluations_never_find_a_slower_plan() -> None:
    steps = [searched(task_of(25), evaluations).best.step_ns for evaluations in (20, 200, 2000)]
    assert steps == sorted(steps, reverse=True)


def test_no_time_still_gives_a_plan_and_the_rules() -> None:
    task = task_of(12)
    found = search(task, PLATFORM, SearchBudget(4000, seconds=0.0), evaluator=additive(task))
    assert found.best.step_ns > 0
    assert all(option is not None for option in found.rules.values())


def test_pinned_tables_stay() -> None:
    constraints = Constraints(kinds=KINDS, pinned={"t000": 3, "t004": 1})
    found = searched(task_of(12, constraints=constraints), 800)
    for option in found.options:
        assert option.plan.placements["t000"].ranks == (3,)
        assert option.plan.placements["t004"].ranks == (1,)


def test_a_giant_is_divided_only_where_that_is_allowed_and_helps() -> None:
    model = model_of(8)
    giant = next(table for table in model.tables if table.dim >= 32)
    others = [table for table in model.tables if table.name != giant.name][:3]
    small = Dlrm("giant", 1024, 16, (32, 16), (32, 1), (giant, *others), interaction="cat")
    whole, divided = (
        searched(Task(small, 4, Constraints(kinds=kinds)), 2000) for kinds in ((TABLE_WISE,), (TABLE_WISE, COLUMN_WISE))
    )
    assert set(whole.best.plan.kinds().values()) == {TABLE_WISE}
    assert divided.best.step_ns <= whole.best.step_ns


def test_plans_are_told_apart_by_their_devices_where_hosts_hide_them() -> None:
    task = task_of(12)
    devices = additive(task)

    class Hidden:
        def evaluate(self, rank_of: npt.NDArray[np.intp], division: Division, *, exact: bool = False) -> Evaluation:
            found = devices.evaluate(rank_of, division, exact=exact)
            host = np.full(len(found), 1e9)
            return evaluation(host, found.step_ns, found.forward_ns, found.backward_ns, found.exchange_ns)

        def simulate(self, rank_of: npt.NDArray[np.intp], division: Division) -> Evaluation:
            return self.evaluate(rank_of, division)

    found = search(task, PLATFORM, SearchBudget(2000), evaluator=Hidden())
    naive_plan = found.rules["naive"]
    assert naive_plan is not None
    shown = [option.plan for option in (*found.options, naive_plan)]
    plans = [[one.placements[table.name].ranks[0] for table in task.tables] for one in shown]
    *options, naive = devices.evaluate(np.array(plans), Division.whole(12)).step_ns
    assert min(options) < naive


def test_loads_are_learned_from_plans_alone() -> None:
    found = state(task_of(30))
    loads = learn(found)
    true = np.array([3 * 1024 * t.pooling_factor * t.dim * (1 + t.generator.alpha / 3) for t in found.shards])
    off = np.abs(loads.of[:, 0] + loads.of[:, 2] - true) / true.mean()
    assert np.median(off) < 0.02


def test_every_plan_comes_once_whatever_ranks_are_called() -> None:
    found = state(task_of(5, 2))
    plans = list(plans_of(found))
    assert len(plans) == plans_at_most(found) == 16
    assert len({renumbered(plan) for plan in plans}) == 16


def test_every_plan_with_pinned_tables_comes_once_whatever_the_other_ranks_are_called() -> None:
    found = state(task_of(5))
    found.pinned[[1, 3]] = 2, 0
    plans = list(plans_of(found))
    assert all((plan[1], plan[3]) == (2, 0) for plan in plans)
    assert len(set(plans)) == len(plans) == plans_at_most(found)
    # Of the 4 * 4 * 4 plans of the other three tables, 8 are the same with ranks 1 and 3 exchanged: they use neither.
    assert len(plans) == (64 + 8) // 2


def test_more_ranks_than_the_platform_joins_are_refused() -> None:
    with pytest.raises(InputError, match="on 8 ranks: platform 4xh200-quarter-loopback joins 4"):
        searched(task_of(10, 8))


def test_tables_that_look_nothing_up_are_placed_like_others() -> None:
    model = model_of(6)
    idle = replace(model.tables[0], generator=replace(model.tables[0].generator, pooling=0.0))
    task = Task(replace(model, tables=(idle, *model.tables[1:])), 4, WHOLE)
    found = search(task, PLATFORM, SearchBudget(300))
    assert set(found.best.plan.placements) == {table.name for table in task.tables}


def test_where_every_rank_has_all_tables_there_is_one_plan() -> None:
    task = Task(model_of(3), 4, Constraints(kinds=(DATA_PARALLEL,)))
    found = search(task, PLATFORM, SearchBudget(100))
    assert (len(found.options), found.searched_plans) == (1, 1)
    assert set(found.best.plan.kinds().values()) == {DATA_PARALLEL}


def test_restarts_alone_find_the_best_of_all_plans_of_a_small_task() -> None:
    task = task_of(7)
    found = search(task, PLATFORM, SearchBudget(60_000), evaluator=additive(task), only=("restarts",))
    best = search(task, PLATFORM, SearchBudget(60_000), evaluator=additive(task), only=("exact",))
    steps = [min((option.step_ns, option.by) for option in one.options) for one in (found, best)]
    assert [by for _, by in steps] == ["restarts", "exact"]
    assert steps[0][0] == pytest.approx(steps[1][0])


def test_the_usual_rules_are_options_even_where_no_time_is_left() -> None:
    found = search(task_of(12), PLATFORM, SearchBudget(10, 0.0))
    assert found.best_rule is not None
    assert found.best.step_ns <= found.best_rule[1].step_ns
