"""The predictions that were made before their plans were measured: complete, and what a search has to promise."""

from __future__ import annotations

import json
from pathlib import Path

import steptime_lab
from steptime._build.dlrm.plan import Plan
from steptime._shard.rules import RULES
from steptime_lab.workloads.drawn_tasks import further_tasks, sharding_tasks

FILE = Path(steptime_lab.__file__).parent / "data" / "committed" / "sharding_predictions.json"


def test_every_predicted_plan_is_one_of_its_task() -> None:
    document = json.loads(FILE.read_text(encoding="utf-8"))
    tasks = {task.name: task for task in (*sharding_tasks(), *further_tasks())}
    assert len(document["tasks"]) == 80
    for entry in document["tasks"]:
        tables, ranks = tasks[entry["task"]].tables, entry["ranks"]
        assert tasks[entry["task"]].batch == entry["batch"]
        assert set(entry["rules"]) <= set(RULES)
        plans = [entry["searched"]["plan"], entry["columns_divided"]["plan"], *(one["plan"] for one in entry["rules"].values())]
        for plan in plans:
            Plan.from_dict(plan, tables, ranks)


def test_no_rule_is_predicted_to_be_faster_than_the_searched_plan() -> None:
    for entry in json.loads(FILE.read_text(encoding="utf-8"))["tasks"]:
        best = min(one["step_ms"] for one in entry["rules"].values())
        assert entry["searched"]["step_ms"] <= best
        assert entry["columns_divided"]["step_ms"] <= 1.0011 * entry["searched"]["step_ms"]
