"""One number per box: how many times as long its steps take as predicted, from a few of its rows, and the others with it.

A box is a source and a device with ten rows or more. Its number is fitted on the tenth of its rows, three at least, whose names
have the smallest SHA-1, so that nobody chooses them, and is scored on the rest.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from steptime_lab.validate.engine import MeasuredCase
from steptime_lab.validate.intervals.predict import PredictedRow

LEAST_ROWS, _LEAST_FITTED, _FITTED_SHARE = 10, 3, 10


def boxes_of(rows: Sequence[PredictedRow]) -> dict[str, tuple[list[PredictedRow], list[PredictedRow]]]:
    """Per box that has rows enough, those that its number is fitted on and those that it is scored on."""
    boxes: dict[str, list[PredictedRow]] = defaultdict(list)
    for row in rows:
        boxes[row.step.box].append(row)
    result = {}
    for box, there in boxes.items():
        if len(there) >= LEAST_ROWS:
            ordered = sorted(there, key=lambda row: hashlib.sha1(row.step.name.encode(), usedforsecurity=False).hexdigest())
            fitted = max(_LEAST_FITTED, len(there) // _FITTED_SHARE)
            result[box] = (ordered[:fitted], ordered[fitted:])
    return result


def number_of(rows: Sequence[PredictedRow]) -> float:
    """How many times as long as predicted the steps of a box take, in the middle."""
    return median(row.step.measured_ms / row.played.step_ms for row in rows)


def with_number(row: PredictedRow, number: float) -> MeasuredCase:
    """The row as predicted once its box is known."""
    low, high = row.interval_ms
    return MeasuredCase(
        row.step.name, number * row.played.step_ms, row.step.measured_ms, interval=(number * low, number * high)
    )
