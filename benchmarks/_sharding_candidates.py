"""Plans that a search finds for the measured sharding tasks, beside those of the usual rules, with predicted steps.

    PYTHONPATH=src python benchmarks/_sharding_candidates.py --out FILE [--plans FILE]

writes what was kept in src/steptime_lab/data/committed on 2026-11-15, before measuring: `searched` of whole tables,
which is what the testbed's training step places, and `columns_divided` where slices of columns are allowed too (a list of ranks
per table: its slices in order, as equal as multiples of four are). Of tasks whose rules' plans were measured, host and wire are
calibrated as they were then; the others are predicted without. `--plans` also writes the searched plans as `measure sharding
--plans` reads them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import COLUMN_WISE, TABLE_WISE
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluator import Evaluator
from steptime._shard.search import Searched, search
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Task
from steptime_lab.validate.sharding.measured import shipped_tasks
from steptime_lab.workloads.drawn_tasks import RANKS, further_tasks, sharding_tasks

PLATFORM = "4xh200-quarter-loopback"
EVALUATIONS = 40_000
SCHEMA_VERSION = 1


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--out", type=Path, required=True)
    given.add_argument("--plans", type=Path)
    given.add_argument("--tasks", nargs="*", help="names; all without")
    chosen = given.parse_args()
    platform = Platform.load(PLATFORM)
    found = []
    for task, calibration in asked_tasks(chosen.tasks):
        began = time.process_time()
        searched, divided = (
            searched_plan(task, platform, kinds, calibration) for kinds in ((TABLE_WISE,), (TABLE_WISE, COLUMN_WISE))
        )
        found.append(entry(task, searched, divided))
        rule = searched.best_rule
        assert rule is not None
        gains = [rule[1].step_ns / one.best.step_ns - 1 for one in (searched, divided)]
        print(
            f"{task.name:28} best rule {rule[1].step_ns / 1e6:7.3f} ms ({rule[0]}), searched {gains[0]:.2%} faster, with "
            f"columns divided {gains[1]:.2%}; {searched.searched_plans} plans, {time.process_time() - began:.1f} CPU s",
            flush=True,
        )
    document = {"schema_version": SCHEMA_VERSION, "platform": PLATFORM, "evaluations": EVALUATIONS, "tasks": found}
    chosen.out.write_text(json.dumps(document, separators=(",", ":")).replace('{"task"', '\n{"task"') + "\n", encoding="utf-8")
    if chosen.plans:
        plans = {one["task"]: {"searched": one["searched"]["plan"]} for one in found}
        chosen.plans.write_text(json.dumps(plans), encoding="utf-8")


def asked_tasks(names: Sequence[str] | None) -> list[tuple[Dlrm, Calibration]]:
    """The studied tasks and the further ones, or those of some names."""
    measured, _ = shipped_tasks()
    known = {task.name: task.calibration for task in measured}
    every = [*sharding_tasks(), *further_tasks()]
    return [(task, known.get(task.name, UNCALIBRATED)) for task in every if not names or task.name in names]


def searched_plan(task: Dlrm, platform: Platform, kinds: tuple[str, ...], calibration: Calibration) -> Searched:
    evaluator = Evaluator(task, platform, RANKS, calibration=calibration)
    return search(Task(task, RANKS, Constraints(kinds=kinds)), platform, SearchBudget(EVALUATIONS), evaluator=evaluator)


def entry(task: Dlrm, found: Searched, divided: Searched) -> dict[str, Any]:
    rules = {
        name: {"step_ms": round(option.step_ns / 1e6, 4), "plan": whole(option.plan.to_dict())}
        for name, option in found.rules.items()
        if option is not None
    }
    best = {"step_ms": round(found.best.step_ns / 1e6, 4), "plan": whole(found.best.plan.to_dict()), "by": found.best.by}
    columns = {"step_ms": round(divided.best.step_ns / 1e6, 4), "plan": divided.best.plan.to_dict()}
    return {
        "task": task.name, "ranks": RANKS, "batch": task.batch, "searched": best, "columns_divided": columns,
        "rules": rules,
    }  # fmt: skip


def whole(plan: dict[str, list[int]]) -> dict[str, int]:
    return {name: ranks[0] for name, ranks in plan.items()}


if __name__ == "__main__":
    main()
