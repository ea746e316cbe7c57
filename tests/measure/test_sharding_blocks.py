from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import recipe
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import Layout, RanksError
from steptime._calibrate.harness.session import Session
from steptime._measurements.store import read
from steptime_lab.measure import sharding
from steptime_lab.measure.restarts import CrashMarker
from steptime_lab.measure.sharding import (
    PlansPlace,
    by_task,
    chance,
    due,
    order_of,
    paired_noise,
    plans_of,
    slowest_over_fastest,
    summary,
    tasks_of,
    timed_at,
    work,
)
from steptime_lab.measurements.sets import SHARDING

CPU = Options(ranks=(1,), device="cpu", small=True)
ALONE = PlansPlace(Layout(1, device="cpu"), 1, "none")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session.start(tmp_path, recipe(["steptime", "measure", "sharding"], need_gpu=False), 5.0)


def plan_of(names: list[str], turn: int = 0) -> dict[str, Any]:
    return {"tasks": names, "small": True, "seed": 0, "only": [], "fabric": "none", "turn": turn, "calibrate": False}


def row(task: str, rule: str, block: int, time_ns: float, aliases: str = "") -> dict[str, Any]:
    return {
        "task": task, "rule": rule, "aliases": aliases, "block": block, "time_ns": time_ns, "run": "r", "process": "p",
    }  # fmt: skip


def blocks(task: str, rule: str, times_ns: list[float], aliases: str = "") -> Iterator[dict[str, Any]]:
    return (row(task, rule, block, time_ns, aliases) for block, time_ns in enumerate(times_ns))


def test_every_block_times_every_plan_once_in_an_order_of_its_own() -> None:
    orders = [order_of("task", block, 7, 0) for block in range(8)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len({tuple(order) for order in orders}) > 4
    assert orders == [order_of("task", block, 7, 0) for block in range(8)]
    assert orders[0] != order_of("other", 0, 7, 0) or orders[1] != order_of("other", 1, 7, 0)


def test_rules_that_make_the_same_plan_share_one_case_and_none_is_lost() -> None:
    from steptime._shard.rules import RULES

    for task in tasks_of(small=True, only=()):
        for ranks in (1, 4):
            found = plans_of(task, ranks)
            named = [name for case, aliases in found for name in (case.rule, *filter(None, aliases.split(",")))]
            assert sorted(named) == sorted(RULES)
            assert len({json.dumps(case.plan) for case, _ in found}) == len(found)
            assert all(case.task == task.name for case, _ in found)
    assert len(plans_of(tasks_of(small=True, only=())[0], 1)) == 1


def test_there_are_forty_tasks_and_small_ones_of_the_same_names() -> None:
    full, small = tasks_of(small=False, only=()), tasks_of(small=True, only=())
    assert len(full) == 40 and sum("heavy" in task.name for task in full) == 20
    assert [task.name for task in small] == [task.name for task in full[: len(small)]]
    assert [task.name for task in tasks_of(small=False, only=(full[3].name,))] == [full[3].name]


@pytest.mark.slow
def test_a_task_is_timed_in_every_block_and_then_not_due_but_due_once_more_for_the_repeat(session: Session) -> None:
    first, second = (task.name for task in tasks_of(small=True, only=()))
    assert due(session, CPU, ALONE, 0) == [first, second]
    work(Group(0, 1, "cpu", 1), session, plan_of([first]))
    rows = read(session.folder, SHARDING).to_pylist()
    assert Counter(each["block"] for each in rows) == {0: 1, 1: 1}
    assert {each["task"] for each in rows} == {first}
    assert all(each["aliases"].count(",") == 5 and each["steps_per_time"] >= 5 for each in rows)
    assert [each["lookups"] is not None for each in rows] == [True, False]
    assert due(session, CPU, ALONE, 0) == [second]
    assert due(session, CPU, ALONE, 1) == [first]
    work(Group(0, 1, "cpu", 1), session, plan_of([first], turn=1))
    assert due(session, CPU, ALONE, 1) == []
    assert not CrashMarker(session.folder, "sharding").file.exists()


def test_the_task_that_ended_its_ranks_is_skipped_and_the_others_go_on(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (task.name for task in tasks_of(small=True, only=()))
    started: list[list[str]] = []

    def dies_once(_job: str, _layout: Layout, plan: dict[str, Any], **_: Any) -> None:
        started.append(plan["tasks"])
        if len(started) == 1:
            CrashMarker(session.folder, "sharding").begin(f"{first}/naive")
            raise RanksError("sharding on 1 ranks: a rank failed")
        work(Group(0, 1, "cpu", 1), session, {**plan, "calibrate": False})

    monkeypatch.setattr("steptime_lab.measure.restarts.run_ranks", dies_once)
    sharding.run(session, CPU)
    assert started[:2] == [[first, second], [second]]
    assert set(read(session.folder, SHARDING)["task"].to_pylist()) == {second}
    assert f"{first}/naive was running" in capsys.readouterr().err


def test_a_random_pick_is_counted_over_rules_so_that_shared_plans_count_twice() -> None:
    times = by_task([*blocks("t", "a", [100.0, 100.0], aliases="b"), *blocks("t", "c", [120.0, 120.0])])["t"]
    assert chance(times) == pytest.approx(2 / 3)
    assert slowest_over_fastest(times) == pytest.approx(1.2)


def test_a_plan_at_the_edge_of_ten_percent_is_close_and_one_beyond_is_not() -> None:
    assert chance(by_task([*blocks("t", "a", [100.0]), *blocks("t", "b", [109.9])])["t"]) == 1.0
    assert chance(by_task([*blocks("t", "a", [100.0]), *blocks("t", "b", [110.2])])["t"]) == 0.5


def test_a_drift_that_all_plans_of_a_block_share_is_no_noise_of_their_difference() -> None:
    drifting = by_task([*blocks("t", "a", [100.0, 200.0, 150.0]), *blocks("t", "b", [110.0, 220.0, 165.0])])["t"]
    assert paired_noise(drifting) == pytest.approx(0.0, abs=1e-9)
    noisy = by_task([*blocks("t", "a", [100.0, 130.0, 100.0]), *blocks("t", "b", [100.0, 100.0, 130.0])])["t"]
    assert paired_noise(noisy) > 0.05


def test_rules_that_were_never_timed_together_have_no_paired_noise() -> None:
    first, second = ({**row("t", rule, 0, 1.0), "process": process} for process, rule in (("p1", "a"), ("p2", "b")))
    assert math.isnan(paired_noise(by_task([first, second])["t"]))
    assert "nan" in summary([first, second])


@pytest.mark.slow
def test_plans_on_other_ranks_or_wires_or_of_a_small_task_are_no_rivals() -> None:
    small, full = (tasks_of(small=which, only=())[0] for which in (True, False))
    here = {"task": full.name, "batch": full.batch, "ranks": 1, "share": 1, "fabric": "none"}
    others = [{**here, "ranks": 4}, {**here, "share": 4}, {**here, "fabric": "gloo"}, {**here, "batch": small.batch}]
    assert timed_at(ALONE, replace(CPU, small=False), [here, *others]) == [here]


def test_the_summary_says_how_many_tasks_and_what_chance_gives() -> None:
    said = summary([*blocks("t", "a", [100.0, 101.0]), *blocks("t", "b", [150.0, 151.0])])
    assert "1 tasks" in said and "50% of draws" in said and "1.50" in said
    assert summary([]) == "sharding: nothing was timed"


@pytest.mark.slow
def test_a_task_on_other_ranks_or_wires_is_due_there(session: Session) -> None:
    first = tasks_of(small=True, only=())[0].name
    work(Group(0, 1, "cpu", 1), session, plan_of([first]))
    assert first in due(session, replace(CPU, ranks=(2,)), replace(ALONE, fabric="gloo"), 0)
    assert first in due(session, CPU, replace(ALONE, share=4), 0)
