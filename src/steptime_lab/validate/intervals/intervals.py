"""Whether nine of ten measured steps lie inside their intervals, and how wide these are, by what is known of the machine.

At home: the shipped steps and a held-out visit. Elsewhere: rows of steps that others measured (`rows.py`), predicted with
defaults alone or with one number per box (`boxes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from steptime._models.error import gmae
from steptime._platforms.situation import CARRIED, CARRIED_CALIBRATED, situations
from steptime.errors import InputError
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, in_processes, said_of_refused
from steptime_lab.validate.intervals.boxes import LEAST_ROWS, boxes_of, number_of, with_number
from steptime_lab.validate.intervals.predict import PredictedRow, predicted
from steptime_lab.validate.intervals.rows import MeasuredSteps, read_rows
from steptime_lab.validate.intervals.widths import (
    by_source,
    errors_left,
    fitted_calibrated,
    fitted_situation,
    interval_ms,
    source_factors,
    telling,
)

_MUCH_OUTSIDE = 0.05
_NODE = 8  # ranks that one node has in all rows so far
PER_BOX = "one number per box"
_LEAST_SOURCES = 2


def validate_rows(
    file: Path,
    *,
    per_box: bool = False,
    leave_out: bool = False,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Validation:
    """The rows of a file by source, by two processes unless an executor is given.

    `per_box`: each box after its own number. `leave_out`: each source with widths that were fitted to the others.
    """
    rows = read_rows(file)
    known, refused = predicted_rows(rows, executor, progress)
    return scored(file, known, _warnings(rows, [*rows.refused, *refused]), per_box=per_box, leave_out=leave_out)


def scored(
    file: Path, known: list[PredictedRow], warnings: list[str], *, per_box: bool = False, leave_out: bool = False
) -> Validation:
    """Rows of a file as they were predicted, against what was measured."""
    if leave_out and len(by_source(known)) < _LEAST_SOURCES:
        raise InputError(f"{file}: --leave-out fits widths to the other sources; give rows of {_LEAST_SOURCES} or more")
    compared = [each for source in by_source(known) for each in _compared(known, source, per_box, leave_out)]
    if not compared:
        none = f"no source and device has {LEAST_ROWS} rows" if known else f"no row can be predicted: {warnings[-1]}"
        raise InputError(f"{file}: {none}")
    how = f"{PER_BOX}, scored on its other rows" if per_box else "defaults only"
    widths = "widths fitted without each source" if leave_out else "widths as shipped"
    facts = {
        "left_after_these_times_geomean": gmae([error for there in by_source(known).values() for error in errors_left(there)])
    }
    facts |= {
        f"times_{kind}_of_{source.replace(' ', '_')}": factor
        for source, there in by_source(known).items()
        for kind, factor in source_factors(there).items()
    }
    return Validation.of(
        "intervals",
        f"steps that others measured, {how}, {widths}",
        compared,
        facts=facts,
        warnings=warnings,
        notes=(
            "times: what kernels of a kind take in the steps of a source over what is predicted, fitted to its rows; what its "
            "error is made of",
        ),
    )


def predicted_rows(
    rows: MeasuredSteps,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> tuple[list[PredictedRow], list[str]]:
    """Rows that can be predicted, and a line for each other."""
    answers: list[PredictedRow | str] = []
    for answer in in_processes(predicted, rows.steps, executor=executor):
        answers.append(answer)
        progress(len(answers), len(rows.steps))
    known = [answer for answer in answers if not isinstance(answer, str)]
    return known, [answer for answer in answers if isinstance(answer, str)]


def _compared(rows: list[PredictedRow], source: str, per_box: bool, leave_out: bool) -> list[Compared]:
    """The rows of a source, as shipped widths or those of the other sources have them."""
    own = [row for row in rows if row.step.source == source]
    others = telling([row for row in rows if row.step.source != source])
    carried = fitted_situation(others) if leave_out else situations()[CARRIED]
    if not per_box:
        return [
            Compared(_case(row, interval_ms(row, carried, carried) if leave_out else row.interval_ms), _groups(row))
            for row in own
        ]
    calibrated = fitted_calibrated(others, carried) if leave_out else situations()[CARRIED_CALIBRATED]
    results = []
    for fitted, scored in boxes_of(own).values():
        number = number_of(fitted, carried)
        for row in scored:
            interval = interval_ms(row, calibrated, carried, number)
            case = MeasuredCase(row.step.name, with_number(row, carried, number), row.step.measured_ms, interval=interval)
            results.append(Compared(case, _groups(row)))
    return results


def _case(row: PredictedRow, interval: tuple[float, float]) -> MeasuredCase:
    return MeasuredCase(row.step.name, row.played.step_ms, row.step.measured_ms, interval=interval)


def _groups(row: PredictedRow) -> tuple[str | None, ...]:
    """The source, then situations: how many nodes, and whether the models were fitted that far."""
    ranks = row.step.config.ranks
    nodes = "one GPU" if ranks == 1 else "one node" if ranks <= _NODE else "several nodes"
    return (row.step.source, nodes, range_of(row.outside), row.step.group)


def range_of(outside: float) -> str:
    """By the share of the device time that is beyond what the models were fitted on."""
    return "beyond the fitted range" if outside > _MUCH_OUTSIDE else "within the fitted range"


def _warnings(rows: MeasuredSteps, refused: list[str]) -> list[str]:
    results = [f"{rows.missing} rows say that their config misses something, and are left out"] * (rows.missing > 0)
    return [*results, *said_of_refused(refused)]
