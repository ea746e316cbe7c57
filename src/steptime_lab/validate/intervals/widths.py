"""By how much all kernels of a kind are off together on machines that nobody measured, from steps that others measured there.

Of every source, factors of products, of attention and of other kernels are fitted to its steps (`source_factors`): what its
errors are made of. Over sources, which count alike however many rows they have, the mean squares of their logarithms are the
widths of each kind, below and above. They are then scaled so that intervals hold nine of ten rows: the
conformal quantile of how wide each row would have needed them (Romano, Patterson and Candes, Conformalized Quantile Regression,
2019, with sources as groups).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from steptime._platforms.situation import CARRIED, CARRIED_CALIBRATED, KINDS, KindError, Situation
from steptime._sim.modelled.prediction import box_factors, interval_of
from steptime_lab.validate.intervals.boxes import boxes_of, moved_ms, number_of, with_number
from steptime_lab.validate.intervals.predict import PredictedRow

Floats = npt.NDArray[np.float64]

# Rows of one source scatter by so much around what its kinds explain, and kinds of kernels by so much around what is predicted:
# a source of few rows that are all alike says little of the kinds it hardly has.
_SCATTER, _KINDS_SCATTER = 0.05, np.array([0.4, 0.6, 0.3])
_TELLING_ROWS = 10  # of one source; more of them repeat what these say
_LEAST = 0.03  # nothing is known better, of machines that nobody measured
_TELLING_BOXES = 2
_HELD = 0.9
# Rows of a source are neither independent nor all the same: it counts as the square root of how many it has. Where sources
# counted alike, widths held 98 % of the rows of sources left out, and 88 % where rows did; so 90.
_OF_A_SOURCE = 0.5
_SCALES = np.arange(0.0, 4.01, 0.05)


def by_source(rows: Sequence[PredictedRow]) -> dict[str, list[PredictedRow]]:
    """The rows of each source."""
    result: dict[str, list[PredictedRow]] = defaultdict(list)
    for row in rows:
        result[row.step.source].append(row)
    return result


def telling(rows: Sequence[PredictedRow]) -> list[PredictedRow]:
    """Rows that ran what was predicted, as far as is known: of the others, errors are not the machine's."""
    return [row for row in rows if row.step.group is None]


def source_factors(rows: Sequence[PredictedRow]) -> dict[str, float]:
    """How many times as long as predicted each kind of kernel takes in the steps of a source."""
    kinds = np.array([list(row.played.kinds_ms.values()) for row in rows])
    whole, measured = (
        np.array(each) for each in zip(*((row.played.step_ms, row.step.measured_ms) for row in rows), strict=True)
    )
    rest = whole - kinds.sum(axis=1)
    weight = 1.0 / (_SCATTER * max(1.0, np.sqrt(len(rows) / _TELLING_ROWS)))

    def off(logs: Floats) -> Floats:
        return np.concatenate([weight * np.log((kinds @ np.exp(logs) + rest) / measured), logs / _KINDS_SCATTER])

    return dict(zip(KINDS, np.exp(least_squares(off, np.zeros(len(KINDS))).x).tolist(), strict=True))


def errors_left(rows: Sequence[PredictedRow]) -> list[float]:
    """Relative errors of the rows of a source once its own factors are known: what they do not explain."""
    factors = source_factors(rows)
    more = [sum(took * (factors[kind] - 1.0) for kind, took in row.played.kinds_ms.items()) for row in rows]
    return [(row.played.step_ms + each) / row.step.measured_ms - 1.0 for row, each in zip(rows, more, strict=True)]


def fitted_situation(rows: Sequence[PredictedRow]) -> Situation:
    """What may be wrong of machines that nobody measured or calibrated, by these rows."""
    sources = by_source(rows)
    logs = np.log([list(source_factors(each).values()) for each in sources.values()])
    squares = [np.sqrt(np.mean(np.square(side(logs, 0.0)), axis=0)).tolist() for side in (np.minimum, np.maximum)]
    widths = {
        kind: KindError(max(below, _LEAST), max(above, _LEAST)) for kind, below, above in zip(KINDS, *squares, strict=True)
    }
    whole = Situation(CARRIED, widths, len(rows), tuple(sorted(sources)))
    return scaled(whole, _scale(whole, sources, {}))


def fitted_calibrated(rows: Sequence[PredictedRow], carried: Situation) -> Situation:
    """The same once a box has its number, which leaves errors to either side alike: scaled to rows that it was not fitted on.

    With fewer than two boxes nobody knows what numbers leave, and all stays as wide as without.
    """
    boxes = boxes_of(rows)
    numbers = {box: number_of(fitted, carried) for box, (fitted, _) in boxes.items()}
    scored = {box: others for box, (_, others) in boxes.items()}
    even = {kind: KindError(each.above, each.above) for kind, each in carried.errors.items()}
    names = tuple(sorted({row.step.source for others in scored.values() for row in others}))
    around = Situation(CARRIED_CALIBRATED, even, sum(map(len, scored.values())), names)
    scale = _scale(around, scored, numbers) if len(boxes) >= _TELLING_BOXES else 1.0
    return scaled(around, scale)


def scaled(situation: Situation, scale: float) -> Situation:
    """So many times as wide."""
    errors = {kind: KindError(scale * each.below, scale * each.above) for kind, each in situation.errors.items()}
    return replace(situation, errors=errors)


def interval_ms(row: PredictedRow, situation: Situation, direction: Situation, number: float = 0.0) -> tuple[float, float]:
    """The interval of a row in a situation, around what a box's number makes of it (`boxes.with_number`)."""
    kinds, step_ms = moved_ms(row, direction, number), with_number(row, direction, number)
    factors = box_factors(situation)
    common = 1.0 + sum(kinds[kind] * (factors[kind] - 1.0) for kind in KINDS) / step_ms
    return interval_of(step_ms, row.played.alone_ms / row.played.step_ms * step_ms * common)


def _scale(situation: Situation, groups: Mapping[str, Sequence[PredictedRow]], numbers: Mapping[str, float]) -> float:
    """How many times as wide the widths must be to hold nine of ten rows, a group of them counting as the root of its rows."""
    needed, weights = [], []
    for name, rows in groups.items():
        needed += [_needed(row, situation, numbers.get(name, 0.0)) for row in rows]
        weights += [len(rows) ** -_OF_A_SOURCE] * len(rows)
    order = np.argsort(needed)
    reached = np.cumsum(np.array(weights)[order]) / sum(weights)
    return float(np.array(needed)[order][np.searchsorted(reached, _HELD)])


def _needed(row: PredictedRow, situation: Situation, number: float) -> float:
    for scale in _SCALES.tolist():
        low, high = interval_ms(row, scaled(situation, scale), situation, number)
        if low <= row.step.measured_ms <= high:
            return float(scale)
    return float(_SCALES[-1])
