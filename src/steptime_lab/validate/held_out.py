"""Predictions of what had no part in any model: those committed before anybody measured, and the steps of one visit.

`data/committed` holds the first, as they were: training steps captured and predicted without a GPU
(`benchmarks/h200/unseen_steps.py`), those again after a mistake of the capture was mended, recommenders and steps with divided
tables (`benchmarks/h200/divided_steps.py`), and plans of sharding tasks, uncalibrated. `data/visits` holds the rows of a visit
to a machine: training steps timed on 1, 2 and 4 ranks of an H200 (or shares of it) with `steptime measure steps`, and what
`steptime calibrate` wrote on the same machine minutes later.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import steptime_lab
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._sim.modelled.prediction import interval_ns
from steptime._sim.modelled.step import modelled
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, repeat_errors
from steptime_lab.validate.sharding.measured import MeasuredTask, regrets, shipped_tasks
from steptime_lab.validate.steps.cases import DLRM, StepCase, platform_of
from steptime_lab.validate.steps.sources import from_trace

DATA = Path(steptime_lab.__file__).parent / "data"
VISIT = DATA / "visits" / "20261116"
STEPS, AGAIN = "training steps", "training steps, predicted again once the capture was mended"
DIVIDED, RECOMMENDERS = "steps with divided tables", "recommenders"
FURTHER, FIRST = "sharding plans", "sharding plans, of tasks that were measured before"
_SHARDING, _UNSEEN, _UNSEEN_AGAIN = "sharding_predictions.json", "unseen_predicted.json", "unseen_predicted_again.json"
_MEASURED = "unseen_measured.json"
# What was predicted and what was then measured, by group.
_SINCE = {
    DIVIDED: ("divided_predicted.json", "divided_measured.json"),
    RECOMMENDERS: ("recommenders_predicted.json", "recommenders_measured.json"),
}
UNCALIBRATED_NAME = "uncalibrated"
_COLUMNS = ("name", "workload", "config", "plan", "batch", "ranks", "time_ns", "times_ns", "spread")


def validate_committed() -> Validation:
    """The whole is what nobody had measured; what was predicted afterwards stands in groups of its own."""
    tasks, _ = shipped_tasks()
    rules = {task["task"]: task["rules"] for task in _read(_SHARDING)["tasks"]}
    compared = committed_steps()
    compared += [item for name, files in _SINCE.items() for item in _steps(*files, name)]
    compared += [item for task in tasks for item in _plans(task, rules[task.name])]
    regret = np.array([_regret(task, rules[task.name]) for task in tasks if task.further])
    return Validation.of(
        "committed",
        "predictions committed before measuring, uncalibrated",
        compared,
        whole=[each for each in compared if each.groups[-1] in (STEPS, DIVIDED, RECOMMENDERS, FURTHER)],
        facts={"mean_regret_of_the_picked_plans": float(regret.mean()), "largest_regret": float(regret.max())},
        notes=("regret: the plan of the usual rules that was predicted fastest, over the fastest as measured",),
    )


def committed_steps() -> list[Compared]:
    """Training steps as they were predicted before anybody measured them, and again."""
    return [*_steps(_UNSEEN, _MEASURED, STEPS), *_steps(_UNSEEN_AGAIN, _MEASURED, AGAIN)]


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DATA / "committed" / name).read_text(encoding="utf-8"))
    return content


def _group(name: str) -> tuple[str | None, ...]:
    return (*(None,) * (STEPS, AGAIN, DIVIDED, RECOMMENDERS, FURTHER, FIRST).index(name), name)


def _steps(file: str, measured_file: str, name: str) -> Iterator[Compared]:
    measured = _read(measured_file)
    for step, predicted in _read(file).items():
        if step in measured:
            times, (low, high) = measured[step]["step_ms"], predicted["interval_ms"]
            case = MeasuredCase(
                step, predicted["step_time_ms"], median(times), interval=(low, high), repeat_errors=repeat_errors(times)
            )
            yield Compared(case, _group(name))


def _plans(task: MeasuredTask, rules: dict[str, Any]) -> Iterator[Compared]:
    """Every distinct plan once, under the first of the rules that make it."""
    seen: set[int] = set()
    for rule, index in task.rules.items():
        if index not in seen:
            seen.add(index)
            case = MeasuredCase(f"{task.name} {rule}", rules[rule]["step_ms"], float(task.measured_ns[index]) / 1e6)
            yield Compared(case, _group(FURTHER if task.further else FIRST))


def _regret(task: MeasuredTask, rules: dict[str, Any]) -> float:
    picked = min(task.rules, key=lambda rule: float(rules[rule]["step_ms"]))
    return float(regrets(task.measured_ns)[task.rules[picked]])


def validate_visit(folder: Path = VISIT) -> Validation:
    """Every step of the visit, with its calibration and without."""
    return Validation.of(
        "visit",
        "steps of a held-out visit, calibrated by `steptime calibrate` on the same machine",
        list(visited(folder)),
        notes=("the calibration was measured minutes after the steps",),
    )


def visited(folder: Path = VISIT) -> Iterator[Compared]:
    """Its steps with its calibration, and as a baseline without."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in pq.read_table(folder / "steps.parquet", columns=list(_COLUMNS)).to_pylist():
        rows[row["name"]].append(row)
    calibrations = {
        ranks: Calibration.read(folder / f"calibration-{ranks}.json", platform_of(ranks))
        for ranks in sorted({row["ranks"] for repeats in rows.values() for row in repeats})
    }
    for name, repeats in sorted(rows.items()):
        row, took_ns = repeats[0], median(row["time_ns"] for row in repeats)
        case = StepCase(name, row["workload"], row["ranks"], row["config"], row["plan"], row["batch"], (), (), UNCALIBRATED)
        step = modelled(from_trace(case), platform_of(row["ranks"]))
        calibration = calibrations[row["ranks"]]
        played, without = step.play(calibration), step.play()
        whole = MeasuredCase(
            name,
            played.step_ns,
            took_ns,
            spread=median(row["spread"] for row in repeats),
            interval=interval_ns(played),
            repeat_errors=repeat_errors(row["times_ns"]),
        )
        several = "DLRM 2 and 4 ranks" if row["workload"] == DLRM and row["ranks"] > 1 else None
        names = (several, f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}")
        beside = replace(whole.by(without.step_ns), interval=interval_ns(without))
        yield Compared(whole, names, {UNCALIBRATED_NAME: beside})
