"""One number per box: how far its steps are from those predicted, in widths of what is not known, from a few of its rows.

A box is a source and a device with ten rows or more. Its number is fitted on the tenth of its rows, three at least, whose names
have the smallest SHA-1, so that nobody chooses them, and is scored on the rest. Kernels of each kind move by the number times
how unsure the kind is (`Situation`): software that makes products a little slower makes attention much slower.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize_scalar

from steptime._platforms.situation import Situation
from steptime_lab.validate.intervals.predict import PredictedRow

LEAST_ROWS, _LEAST_FITTED, _FITTED_SHARE = 10, 3, 10
_FARTHEST = 4.0


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


def moved_ms(row: PredictedRow, direction: Situation, number: float) -> dict[str, float]:
    """The kinds of a row's kernels once its box's number is known: each moves by as much as it is unsure."""
    errors = direction.errors
    return {kind: took * float(np.exp(number * errors[kind].above)) for kind, took in row.played.kinds_ms.items()}


def with_number(row: PredictedRow, direction: Situation, number: float) -> float:
    """The step of a row as predicted once its box is known; milliseconds."""
    kinds = row.played.kinds_ms
    return row.played.step_ms + sum(moved_ms(row, direction, number).values()) - sum(kinds.values())


def number_of(rows: Sequence[PredictedRow], direction: Situation) -> float:
    """The number of a box, by rows of it: the one that leaves the least absolute logarithms of their errors."""

    def left(number: float) -> float:
        return sum(abs(float(np.log(with_number(row, direction, number) / row.step.measured_ms))) for row in rows)

    return float(minimize_scalar(left, bounds=(-_FARTHEST, _FARTHEST), method="bounded").x)
