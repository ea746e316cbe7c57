"""The shipped sharding tasks as measured: every plan of a task in the same blocks, so that differences are paired."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._platforms.calibration import Calibration
from steptime._shard.rules import RULES
from steptime_lab.measurements.shipped import shipped
from steptime_lab.validate.steps.cases import RunCalibrations
from steptime_lab.workloads.drawn_tasks import further_tasks

Row = Mapping[str, Any]
Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

_COLUMNS = (
    "task", "rule", "aliases", "plan", "config", "batch", "ranks", "run", "process", "block", "time_ns",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class MeasuredTask:
    """A task with its distinct plans, all timed in every one of its blocks."""

    model: Dlrm
    ranks: int
    rank_of: Places  # [plans, tables]
    rules: Mapping[str, int]  # rule -> its plan; several rules may make the same
    times_ns: Floats  # [plans, blocks]
    calibration: Calibration  # of the processes that timed most of the blocks

    @property
    def name(self) -> str:
        """As the set has it."""
        return self.model.name

    @property
    def paired(self) -> Floats:
        """[plans, blocks] over the mean of all plans in the same block."""
        result: Floats = self.times_ns / self.times_ns.mean(axis=0)
        return result

    @property
    def measured_ns(self) -> Floats:
        """[plans] the median of the blocks, each freed of what it was slower or faster for all plans."""
        return levels(self.paired) * float(np.median(self.times_ns.mean(axis=0)))

    @property
    def heavy(self) -> bool:
        """Whether all its tables have long bags."""
        return "-heavy" in self.name

    @property
    def further(self) -> bool:
        """Whether it was drawn later, and its plans predicted before any of them ran (`data/committed`)."""
        return self.name in {task.name for task in further_tasks()}

    @property
    def equal(self) -> bool:
        """Whether its tables are of equal load."""
        return self.name.endswith("-equal")


def levels(paired: Floats) -> Floats:
    """[..., plans] the middle of blocks, [..., plans, blocks]."""
    result: Floats = np.median(paired, axis=-1)
    return result


def shipped_tasks(names: Sequence[str] | None = None) -> tuple[list[MeasuredTask], list[MeasuredTask]]:
    """The shipped tasks, or those of some names, in the order of their names; and those with plans beside the rules' again."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in shipped("sharding").select(_COLUMNS).to_pylist():
        if names is None or row["task"] in names:
            rows[row["task"]].append(row)
    known, tasks, beside = RunCalibrations(), [], []
    for _, item in sorted(rows.items()):
        calibration = known.of_run(_usual_run(item), int(item[0]["ranks"]))
        tasks.append(task_of(item, calibration))
        given = [row for row in item if not set(names_of(row)) <= set(RULES)]
        if given:
            runs = {row["run"] for row in given}
            own = [row for row in item if row["run"] in runs]
            beside.append(task_of(own, known.of_run(_usual_run(given), int(item[0]["ranks"])), given=True))
    return tasks, beside


def task_of(rows: Sequence[Row], calibration: Calibration, *, given: bool = False) -> MeasuredTask:
    """The plans of the rules, from the rows of one task; with `given` also others that were timed beside them.

    Blocks that lack a plan are left out.
    """
    model = Dlrm.from_dict(json.loads(rows[0]["config"])).with_batch(int(rows[0]["batch"]))
    plans: dict[str, int] = {}
    rules: dict[str, int] = {}
    times: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for row in rows:
        names = [name for name in names_of(row) if given or name in RULES]
        if not names:
            continue
        index = plans.setdefault(row["plan"], len(plans))
        rules.update(dict.fromkeys(names, index))
        times[row["run"], row["process"], row["block"]][index] = float(row["time_ns"])
    whole = [block for _, block in sorted(times.items()) if len(block) == len(plans)]
    placed = [json.loads(plan) for plan in plans]
    return MeasuredTask(
        model,
        int(rows[0]["ranks"]),
        np.array([[plan[table.name] for table in model.tables] for plan in placed], dtype=np.intp),
        dict(sorted(rules.items())),
        np.array([[block[index] for block in whole] for index in range(len(plans))]),
        calibration,
    )


def names_of(row: Row) -> tuple[str, ...]:
    """Rules, and plans that were given by name, of which this row is."""
    return (row["rule"], *filter(None, (row["aliases"] or "").split(",")))


def _usual_run(rows: Iterable[Row]) -> str:
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row["run"]] += 1
    return max(sorted(counts), key=lambda run: counts[run])
