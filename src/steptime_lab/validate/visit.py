"""Steps of one visit to a machine that had no part in any model or calibration weight, calibrated as a user would.

`data/visits` holds its rows: training steps timed on 1, 2 and 4 ranks of an H200 (or shares of it) with `steptime measure
steps`, and what `steptime calibrate` wrote on the same machine minutes later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq

import steptime_lab
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._sim.modelled.interval import interval_ns
from steptime._sim.modelled.step import modelled
from steptime_lab.validate.calibrations import platform_of
from steptime_lab.validate.engine import Case, Compared, Validation, group, groups, repeat_errors
from steptime_lab.validate.steps.cases import DLRM, StepCase
from steptime_lab.validate.steps.sources import from_trace

FOLDER = Path(steptime_lab.__file__).parent / "data" / "visits" / "20261116"
UNCALIBRATED_NAME = "uncalibrated"
_COLUMNS = ("name", "workload", "config", "plan", "batch", "ranks", "time_ns", "times_ns", "spread")


def validate_visit(folder: Path = FOLDER) -> Validation:
    """Every step of the visit, with its calibration and without."""
    compared = list(_compared(folder))
    several = [("DLRM 2 and 4 ranks", lambda item: item["workload"] == DLRM and item["ranks"] > 1)]
    by_ranks = [(f"{ranks} rank{'s' * (ranks > 1)}", lambda item, ranks=ranks: item["ranks"] == ranks) for ranks in (1, 2, 4)]
    return Validation(
        name="visit",
        title="steps of a held-out visit, calibrated by `steptime calibrate` on the same machine",
        cases=[item.case for item in compared],
        whole=group(compared),
        groups=groups(compared, [*several, *by_ranks]),
        notes=("the calibration was measured minutes after the steps",),
    )


def _compared(folder: Path) -> Iterator[Compared[Mapping[str, Any]]]:
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
        steady, _ = step.steady(calibration)
        low, high = interval_ns(step, steady, calibration)
        without, _ = step.steady(UNCALIBRATED)
        whole = Case(
            name,
            float(steady.period_ns[0]),
            took_ns,
            spread=median(row["spread"] for row in repeats),
            covered=low <= took_ns <= high,
            repeat_errors=repeat_errors(row["times_ns"]),
        )
        yield Compared(row, whole, {UNCALIBRATED_NAME: whole.by(float(without.period_ns[0]))})
