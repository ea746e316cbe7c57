from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steptime._calibrate.harness.command import Options
from steptime.errors import InputError
from steptime_lab.measure.sharding import given_plans, plans_of, tasks_of

FOUR = Options(ranks=(4,), device="cpu", small=True)


def given(folder: Path, content: Any) -> Options:
    file = folder / "plans.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return replace(FOUR, plans=file)


def placed(**changes: Any) -> dict[str, Any]:
    task = tasks_of(small=True, only=())[0]
    plan = {table.name: 0 for table in task.tables}
    plan[task.tables[-1].name] = 3
    return {task.name: {"searched": {**plan, **changes}}}


def test_a_given_plan_is_timed_beside_those_of_the_rules(tmp_path: Path) -> None:
    task, other = tasks_of(small=True, only=())
    content = placed()
    plans = given_plans(given(tmp_path, content))
    cases = [case for case, _ in plans_of(task, 4, plans)]
    assert [case.rule for case in cases][:-1] == [case.rule for case, _ in plans_of(task, 4)]
    assert cases[-1].rule == "searched" and dict(cases[-1].plan or {}) == content[task.name]["searched"]
    assert len({case.name for case in cases}) == len(cases)
    assert plans_of(other, 4, plans) == plans_of(other, 4)


def test_a_given_plan_that_a_rule_makes_as_well_is_timed_once(tmp_path: Path) -> None:
    task = tasks_of(small=True, only=())[0]
    first, _ = plans_of(task, 4)[0]
    found = plans_of(task, 4, given_plans(given(tmp_path, {task.name: {"searched": dict(first.plan or {})}})))
    assert len(found) == len(plans_of(task, 4))
    assert "searched" in found[0][1].split(",")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no readable plans"),
        ([], "expected a JSON object"),
        ({"nobody": {}}, "no sharding task is called 'nobody'"),
        (placed(t00=4), "table 't00' is on 4"),
        (placed(t00=True), "table 't00' is on True"),
        (placed(t99=1), "table 't99' is in the plan or in the task only"),
    ],
)
def test_plans_that_fit_no_task_are_refused_in_one_line(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        given_plans(given(tmp_path, content))
    assert "\n" not in str(raised.value)


def test_a_plan_may_not_take_the_name_of_a_rule(tmp_path: Path) -> None:
    task, plans = next(iter(placed().items()))
    with pytest.raises(InputError, match="no rule's"):
        given_plans(given(tmp_path, {task: {"naive": plans["searched"]}}))
