"""Whether nine of ten measured steps lie inside their intervals, and how wide these are, by what is known of the machine.

At home: the shipped steps and a held-out visit. Elsewhere: rows of steps that others measured (`rows.py`), predicted with
defaults alone or with one number per box (`boxes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from steptime.errors import InputError
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, in_processes
from steptime_lab.validate.intervals.boxes import LEAST_ROWS, boxes_of, number_of, with_number
from steptime_lab.validate.intervals.predict import PredictedRow, predicted
from steptime_lab.validate.intervals.rows import MeasuredSteps, read_rows

_MUCH_OUTSIDE = 0.05
_NODE = 8  # ranks that one node has in all rows so far
_SHOWN = 20  # lines of rows that were refused
PER_BOX = "one number per box"


def validate_rows(
    file: Path,
    *,
    per_box: bool = False,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Validation:
    """The rows of a file by source, by two processes unless an executor is given; `per_box`: each box after its own number."""
    rows = read_rows(file)
    answers: list[PredictedRow | str] = []
    for answer in in_processes(predicted, rows.steps, executor=executor):
        answers.append(answer)
        progress(len(answers), len(rows.steps))
    known = [answer for answer in answers if not isinstance(answer, str)]
    refused = [*rows.refused, *(answer for answer in answers if isinstance(answer, str))]
    compared = _after_numbers(known) if per_box else [Compared(_case(row), _groups(row)) for row in known]
    if not compared:
        none = f"no source and device has {LEAST_ROWS} rows" if known else f"no row can be predicted; the first: {refused[0]}"
        raise InputError(f"{file}: {none}")
    how = f"{PER_BOX}, scored on its other rows" if per_box else "defaults only"
    return Validation.of("intervals", f"steps that others measured, {how}", compared, warnings=_warnings(rows, refused))


def _case(row: PredictedRow) -> MeasuredCase:
    return MeasuredCase(row.step.name, row.played.step_ms, row.step.measured_ms, interval=row.interval_ms)


def _after_numbers(rows: list[PredictedRow]) -> list[Compared]:
    results = []
    for fitted, scored in boxes_of(rows).values():
        number = number_of(fitted)
        results += [Compared(with_number(row, number), _groups(row)) for row in scored]
    return results


def _groups(row: PredictedRow) -> tuple[str | None, ...]:
    """The source, then situations: how many nodes, and whether the models were fitted that far."""
    ranks = row.step.config.ranks
    nodes = "one GPU" if ranks == 1 else "one node" if ranks <= _NODE else "several nodes"
    return (row.step.source, nodes, range_of(row.outside))


def range_of(outside: float) -> str:
    """By the share of the device time that is beyond what the models were fitted on."""
    return "beyond the fitted range" if outside > _MUCH_OUTSIDE else "within the fitted range"


def _warnings(rows: MeasuredSteps, refused: list[str]) -> list[str]:
    results = [f"{rows.missing} rows say that their config misses something, and are left out"] * (rows.missing > 0)
    more = len(refused) - _SHOWN
    return [*results, *refused[:_SHOWN], *([f"{more} more rows cannot be predicted"] if more > 0 else [])]
