from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pytest

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.generators import Generator
from steptime._platforms.calibration import UNCALIBRATED
from steptime._platforms.platform import Platform
from steptime.errors import InputError
from steptime_lab.report.validation import sharding_document, sharding_lines
from steptime_lab.validate.sharding.estimates import OURS, chance_pick, evenly_looked_up, planner_costs, rule_picks
from steptime_lab.validate.sharding.measured import (
    Judged,
    MeasuredTask,
    ceiling,
    picked,
    score,
    spearman,
    task_of,
    tied_with_fastest,
)
from steptime_lab.validate.sharding.sharding import ShardingValidation, given_plans, validate_sharding

TASKS = ("shard00-heavy-unequal", "shard30-ordinary-unequal")


class Here(Executor):
    """Runs everything where it is asked."""

    def map(self, fn: Callable[..., Any], *iterables: Any, **_: Any) -> Iterator[Any]:
        return map(fn, *iterables)


@pytest.fixture(scope="module")
def validated() -> ShardingValidation:
    return validate_sharding(TASKS, executor=Here())


def model_of(name: str = "t-heavy-unequal") -> Dlrm:
    tables = tuple(Table(f"t{place}", 16 << place, Generator(rows=1000, pooling=2.0)) for place in range(2))
    return Dlrm(name, 64, 4, (8, 4), (8, 1), tables, interaction="cat")


def task(times: list[list[float]], name: str = "t-heavy-unequal") -> MeasuredTask:
    plans = np.array([[place % 2, place // 2 % 2] for place in range(len(times))])
    rules = {f"rule{place}": place for place in range(len(times))}
    return MeasuredTask(model_of(name), 2, plans, rules, np.array(times), UNCALIBRATED)


def row(plan: dict[str, int], rule: str, block: int, time_ns: float, aliases: str = "") -> dict[str, Any]:
    return {
        "task": "t", "rule": rule, "aliases": aliases, "plan": json.dumps(plan), "config": model_of().to_json(), "batch": 64,
        "ranks": 2, "run": "r", "process": "p", "block": block, "time_ns": time_ns,
    }  # fmt: skip


def test_rules_that_make_one_plan_share_it_and_blocks_without_all_plans_are_left_out() -> None:
    one, other = {"t0": 0, "t1": 1}, {"t0": 1, "t1": 1}
    rows = [row(one, "naive", 0, 5.0, "random"), row(other, "size_greedy", 0, 6.0), row(one, "naive", 1, 7.0, "random")]
    found = task_of(rows, UNCALIBRATED)
    assert found.rules == {"naive": 0, "random": 0, "size_greedy": 1}
    assert found.rank_of.tolist() == [[0, 1], [1, 1]] and found.times_ns.tolist() == [[5.0], [6.0]]
    assert chance_pick(found).tolist() == pytest.approx([2 / 3, 1 / 3])
    assert rule_picks(found)["size_greedy"].tolist() == [0.0, 1.0]


def test_plans_beside_the_rules_are_no_candidates_of_theirs() -> None:
    one, other = {"t0": 0, "t1": 1}, {"t0": 1, "t1": 1}
    rows = [
        row(one, "naive", 0, 5.0),
        row(other, "searched", 0, 4.0),
        row(one, "naive", 1, 5.1),
        row(other, "searched", 1, 4.1),
    ]
    assert list(task_of(rows, UNCALIBRATED).rules) == ["naive"]
    assert list(task_of(rows, UNCALIBRATED, given=True).rules) == ["naive", "searched"]


def test_a_searched_plan_is_judged_against_the_best_rule_of_the_same_blocks() -> None:
    noise = [1.0, 1.01, 0.99, 1.0]
    rows = [row({"t0": 0, "t1": 1}, "naive", block, 5e6 * one) for block, one in enumerate(noise)]
    rows += [row({"t0": 1, "t1": 0}, "random", block, 6e6) for block in range(4)]
    rows += [row({"t0": 0, "t1": 0}, "searched", block, 4e6) for block in range(4)]
    (found,) = given_plans([task_of(rows, UNCALIBRATED, given=True)], Platform.load("2xh200-half-loopback"))
    assert (found.name, found.best_rule) == ("searched", "naive")
    assert found.ratio == pytest.approx(0.8, rel=0.01) and found.faster and not found.slower


def test_what_all_plans_of_a_block_share_is_no_difference_between_them() -> None:
    drifting = task([[10.0, 20.0, 40.0], [11.0, 22.0, 44.0]])
    assert Judged.of(drifting).regret.tolist() == pytest.approx([0.0, 0.1])
    assert not Judged.of(drifting).tied[1]


def test_plans_within_the_noise_of_the_fastest_are_tied_and_others_are_not() -> None:
    noise = 1 + 0.02 * np.array([[1, -1] * 4, [1, 1, -1, -1] * 2, [-1, 1, 1, -1] * 2])
    paired = np.array([[1.0], [1.005], [1.2]]) * noise
    assert tied_with_fastest(paired).tolist() == [True, True, False]
    assert tied_with_fastest(paired[:, :1]).sum() == 1  # one block says nothing of noise


def test_who_picks_the_fastest_has_no_regret_and_a_coin_has_the_mean() -> None:
    judged = [Judged.of(task([[10.0] * 8, [12.0] * 8])), Judged.of(task([[20.0] * 8, [10.0] * 8]))]
    best = score(judged, [picked(one.task.measured_ns) for one in judged], [one.task.measured_ns for one in judged])
    assert (best.mean_regret, best.max_regret, best.success_10, best.top1) == (0.0, 0.0, 1.0, 1.0)
    assert best.spearman == pytest.approx(1.0)
    coin = score(judged, [np.array([0.5, 0.5])] * 2)
    assert coin.mean_regret == pytest.approx((0.1 + 0.5) / 2) and coin.success_10 == coin.top1 == 0.5
    assert coin.spearman is None and coin.mean_regret_interval[0] <= coin.mean_regret <= coin.mean_regret_interval[1]


def test_equal_estimates_are_picked_evenly() -> None:
    assert picked(np.array([2.0, 1.0, 1.0 + 1e-12])).tolist() == [0.0, 0.5, 0.5]


def test_correlation_of_ranks_sees_order_alone_and_nothing_in_equals() -> None:
    measured = np.array([1.0, 2.0, 10.0])
    assert spearman(measured, np.array([3.0, 4.0, 4.1])) == pytest.approx(1.0)
    assert spearman(measured, np.array([4.1, 4.0, 3.0])) == pytest.approx(-1.0)
    assert spearman(measured, np.ones(3)) == 0.0


def test_half_of_the_blocks_picks_the_fastest_of_the_other_half_where_there_is_no_noise() -> None:
    found = ceiling([task([[10.0] * 8, [12.0] * 8])])
    assert (found.mean_regret, found.tied_with_fastest, found.top1) == (0.0, 1.0, 1.0)


def test_the_planner_counts_bytes_over_bandwidth() -> None:
    first, second = planner_costs(model_of(), 2)
    lookups, gib = 64 * 2.0, 1024.0**3
    forward = (lookups * (8 + 32 * 4) + 64 * 16 * 4) * 1.75 / (897 * gib)  # rows of 16 count as rows of 32
    assert first == pytest.approx(3 * forward + 2 * 64 * 16 * 4 / (600 * gib))
    assert second > first


def test_without_index_distribution_sizes_and_lookups_stay() -> None:
    even = evenly_looked_up(model_of())
    assert {table.generator.kind for table in even.tables} == {"uniform"}
    assert [(table.rows, table.pooling_factor, table.dim) for table in even.tables] == [(1000, 2.0, 16), (1000, 2.0, 32)]


@pytest.mark.slow
def test_picks_on_measured_tasks_beat_chance_and_bytes_over_bandwidth(validated: ShardingValidation) -> None:
    whole = validated.whole
    assert whole.ours.mean_regret < 0.02 < whole.others["random pick"].mean_regret
    assert whole.ours.mean_regret <= whole.others["bytes over bandwidth"].mean_regret
    assert whole.ours.spearman is not None and whole.ours.spearman > 0.85
    assert validated.steps.whole.summary.mape < 0.10
    assert set(validated.groups) == {"first tasks", "heavy", "ordinary", "unequal tables"}


@pytest.mark.slow
def test_skew_between_ranks_is_what_plans_differ_in(validated: ShardingValidation) -> None:
    without, ours = validated.whole.others["without skew and host costs"], validated.whole.ours
    assert without.spearman is not None and ours.spearman is not None and without.spearman < ours.spearman


@pytest.mark.slow
def test_the_document_has_the_stable_keys(validated: ShardingValidation) -> None:
    document = sharding_document(validated)
    assert {"schema_version", "warnings", "summary", "baselines", "parts", "cases"} <= set(document)
    wanted = {"mean_regret", "max_regret", "tied_with_fastest", "success_10", "top1", "spearman", "chance"}
    assert wanted <= set(document["summary"])
    assert OURS not in document["baselines"] and "random pick" in document["baselines"]
    assert [case["name"] for case in document["cases"]] == list(TASKS)
    json.dumps(document)


@pytest.mark.slow
def test_the_report_names_every_rule_and_explains_the_worst_picks(validated: ShardingValidation) -> None:
    said = "\n".join(sharding_lines(validated, full=True))
    for words in ("lookup_greedy", "bytes over bandwidth", "without index distribution", "noise floor", "fastest"):
        assert words in said


def test_a_task_that_was_not_measured_is_refused() -> None:
    with pytest.raises(InputError, match="no shipped sharding task"):
        validate_sharding(("nothing",), executor=Here())
