"""`steptime validate layouts`: one model under many layouts, each predicted with defaults, or with its host's speed known.

The host's speed is one factor per width of the model, found on rows of the other widths and given to the prediction as
`steptime calibrate --from-run` would give it: so no row is scored by a factor that it helped to find.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steptime._models.host.model import STEP, Speed
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.machine_costs import MachineCosts, RecordedRun, RecordedSpeed
from steptime.errors import InputError
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, in_processes, said_of_refused
from steptime_lab.validate.layouts.choice import chosen, jobs_of
from steptime_lab.validate.layouts.predict import PlayedLayout, answered, platform_of, questions
from steptime_lab.validate.layouts.rows import LayoutRow, read_layouts

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
Answers = dict[LayoutRow, PlayedLayout]

# Rows of other widths that a host's factor is found on: those whose names have the smallest SHA-1, so that nobody chooses.
_CALIBRATED_ON = 24
# Hosts that are tried; between them a step grows evenly.
_TRIED = tuple(float(each) for each in np.geomspace(0.7, 3.0, 8))
_TELLS = 0.2  # of a host's slowness is seen in a step at least, for the step to tell of it
_LEVELS = (0.05, 0.95)
_LEAST_WIDTHS = 2
_ASSEMBLED = (
    "vTrain's table is what its simulator makes of profiled pieces (docs/devices.md), not a list of measured steps: rows of "
    "one width, tensor parallelism and micro-batch are one measurement"
)


def validate_layouts(
    file: Path,
    *,
    per_box: bool = False,
    executor: Executor | None = None,
    progress: Progress = lambda _done, _all: None,
) -> Validation:
    """All rows of a table, by two processes unless an executor is given; `per_box`: each width by a host of the others'."""
    rows, refused = read_layouts(file)
    if not rows:
        raise InputError(f"{file}: no row can be predicted{f'; the first: {refused[0]}' if refused else ''}")
    hosts = _hosts(file, rows, executor) if per_box else {}
    compared, known, times, draws = [], [], [], []
    for width in sorted({row.config.width for row in rows}):
        of_width = [row for row in rows if row.config.width == width]
        found, wrong = answers(of_width, [hosts.get(width, UNCALIBRATED)], executor=executor, progress=progress)
        refused += wrong
        for row, played in found.items():
            known.append(row)
            times.append(played.step_ms[0])
            draws.append(played.draws_ms[0])
            compared.append(Compared(case_of(row, played), _groups(row, played)))
    if not known:
        raise InputError(f"{file}: no row can be predicted; the first: {refused[0]}")
    jobs = jobs_of(known, np.array(times), np.array(draws))
    return Validation.of(
        "layouts",
        f"one model under many layouts, {'one host factor, found on other widths' if per_box else 'defaults only'}",
        compared,
        facts=(chosen(jobs) if jobs else {})
        | {f"host_of_width_{width}": host.speed.cpu / STEP.cpu for width, host in hosts.items()},
        warnings=said_of_refused(refused),
        notes=(_ASSEMBLED,),
    )


def answers(
    rows: Sequence[LayoutRow],
    calibrations: Sequence[Calibration] = (UNCALIBRATED,),
    *,
    executor: Executor | None = None,
    progress: Progress = lambda _done, _all: None,
    drawn: bool = True,
) -> tuple[Answers, list[str]]:
    """What rows are predicted to take, and a line for each that cannot be."""
    asked = questions(rows, calibrations, drawn=drawn)
    found: Answers = {}
    refused = []
    for question, results in zip(asked, in_processes(answered, asked, executor=executor), strict=True):
        for row, result in zip(question.rows, results, strict=True):
            if isinstance(result, str):
                refused.append(result)
            else:
                found[row] = result
        progress(len(found) + len(refused), len(rows))
    return found, refused


def case_of(row: LayoutRow, played: PlayedLayout) -> MeasuredCase:
    """A row against what it is predicted to take, as first calibrated."""
    low, high = np.quantile(played.draws_ms[0], _LEVELS)
    step_ms = float(played.step_ms[0])
    interval = (min(float(low), step_ms), max(float(high), step_ms))
    return MeasuredCase(row.name, step_ms, row.measured_ms, interval=interval)


def _groups(row: LayoutRow, played: PlayedLayout) -> tuple[str | None, ...]:
    config, parallel = row.config, row.config.parallel
    waits = played.idle_ms > _TELLS * float(played.step_ms[0])
    return (
        "with pipelines" if parallel.pipeline > 1 else "without pipelines",
        f"pipeline {parallel.pipeline}",
        f"tensor {parallel.tensor}",
        f"data {parallel.data}",
        f"width {config.width}",
        f"micro-batch of {config.local_batch}",
        "host-bound" if waits and parallel.pipeline == 1 else None,
    )


# One factor of a host


def _hosts(file: Path, rows: Sequence[LayoutRow], executor: Executor | None) -> Mapping[int, Calibration]:
    """Per width, the calibration that steps of the other widths give."""
    widths = sorted({row.config.width for row in rows})
    if len(widths) < _LEAST_WIDTHS:
        raise InputError(f"{file}: --per-box finds a host on rows of other widths; give rows of {_LEAST_WIDTHS} or more")
    plain = [row for row in rows if row.config.parallel.pipeline == 1] or rows
    ordered = sorted(plain, key=lambda row: hashlib.sha1(row.name.encode(), usedforsecurity=False).hexdigest())
    chosen_rows = {width: [row for row in ordered if row.config.width != width][:_CALIBRATED_ON] for width in widths}
    tried = [Calibration(speed=Speed.of_cpu(STEP.cpu * factor)) for factor in _TRIED]
    every = list(dict.fromkeys(row for each in chosen_rows.values() for row in each))
    found, _ = answers(every, tried, executor=executor, drawn=False)
    return {width: _host([(row, found[row]) for row in each if row in found]) for width, each in chosen_rows.items()}


def _host(steps: Sequence[tuple[LayoutRow, PlayedLayout]]) -> Calibration:
    """What steps tell of the host, as a run that was recorded and timed without a profiler tells of it."""
    logs, shares = [], []
    for row, played in steps:
        factor, share = _factor(played.step_ms, row.measured_ms)
        if share >= _TELLS:
            logs.append(math.log(factor))
            shares.append(min(share, 1.0))
    if not logs:
        return UNCALIBRATED
    spread = float(np.std(logs))
    speed = RecordedSpeed(math.exp(float(np.median(logs))), spread, len(logs), float(np.median(shares)))
    platform = platform_of(steps[0][0].platform)
    return Calibration.of(MachineCosts((), (), RecordedRun(platform.name, unprofiled=speed)), platform)


def _factor(step_ms: Floats, measured_ms: float) -> tuple[float, float]:
    """The host's factor with which a step is as measured, and how much of a slower host is seen in the step there."""
    logs, tried = np.log(step_ms), np.log(_TRIED)
    place = int(np.clip(np.searchsorted(step_ms, measured_ms), 1, len(tried) - 1))
    share = float((logs[place] - logs[place - 1]) / (tried[place] - tried[place - 1]))
    if share < _TELLS:
        return 1.0, share
    log = tried[place] + (math.log(measured_ms) - logs[place]) / share
    return math.exp(float(np.clip(log, tried[0], tried[-1]))), share
