"""Predictions that were committed before anybody measured, as they were, against what was measured then.

`data/committed` holds them: training steps captured and predicted without a GPU (`benchmarks/h200/unseen_steps.py`), those
again after a mistake of the capture was mended, and plans of sharding tasks, uncalibrated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import steptime_lab
from steptime_lab.validate.engine import Case, Compared, Validation, group, groups, repeat_errors
from steptime_lab.validate.sharding.measured import MeasuredTask, shipped_tasks
from steptime_lab.validate.sharding.scores import regrets

FOLDER = Path(steptime_lab.__file__).parent / "data" / "committed"
STEPS, AGAIN = "training steps", "training steps, predicted again once the capture was mended"
FURTHER, FIRST = "sharding plans", "sharding plans, of tasks that were measured before"
_SHARDING, _UNSEEN, _UNSEEN_AGAIN = "sharding_predictions.json", "unseen_predicted.json", "unseen_predicted_again.json"
_MEASURED = "unseen_measured.json"


def validate_committed() -> Validation:
    """The whole is what nobody had measured; what was predicted afterwards stands in groups of its own."""
    tasks, _ = shipped_tasks()
    rules = {task["task"]: task["rules"] for task in _read(_SHARDING)["tasks"]}
    compared = [*_steps(_UNSEEN, STEPS), *_steps(_UNSEEN_AGAIN, AGAIN)]
    compared += [item for task in tasks for item in _plans(task, rules[task.name])]
    regret = np.array([_regret(task, rules[task.name]) for task in tasks if task.further])
    return Validation(
        name="committed",
        title="predictions committed before measuring, uncalibrated",
        cases=[item.case for item in compared],
        whole=group([item for item in compared if item.item in (STEPS, FURTHER)]),
        groups=groups(compared, [(name, name.__eq__) for name in (STEPS, AGAIN, FURTHER, FIRST)]),
        facts={"mean_regret_of_the_picked_plans": float(regret.mean()), "largest_regret": float(regret.max())},
        notes=("regret: the plan of the usual rules that was predicted fastest, over the fastest as measured",),
    )


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return content


def _steps(file: str, name: str) -> Iterator[Compared[str]]:
    measured = _read(_MEASURED)
    for step, predicted in _read(file).items():
        if step in measured:
            times, (low, high) = measured[step]["step_ms"], predicted["interval_ms"]
            took = median(times)
            case = Case(step, predicted["step_time_ms"], took, covered=low <= took <= high, repeat_errors=repeat_errors(times))
            yield Compared(name, case)


def _plans(task: MeasuredTask, rules: dict[str, Any]) -> Iterator[Compared[str]]:
    """Every distinct plan once, under the first of the rules that make it."""
    seen: set[int] = set()
    for rule, index in task.rules.items():
        if index not in seen:
            seen.add(index)
            case = Case(f"{task.name} {rule}", rules[rule]["step_ms"], float(task.measured_ns[index]) / 1e6)
            yield Compared(FURTHER if task.further else FIRST, case)


def _regret(task: MeasuredTask, rules: dict[str, Any]) -> float:
    picked = min(task.rules, key=lambda rule: float(rules[rule]["step_ms"]))
    return float(regrets(task.measured_ns)[task.rules[picked]])
