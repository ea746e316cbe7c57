"""By how much families of ops are off together in architectures that no model has seen: what a measured device may be off by.

Residuals of kernel rows say how far single calls are off. Calls of one architecture err together, since a model that has never
seen its layouts and sizes is off in all its layers alike. Of every architecture and family of ops the logarithm of measured
over predicted device time is known; its mean square over architectures, each counting as the square of the family's share, is
the family's width, to either side: on which side the few were that were far off says nothing of the next one. A family of which
architectures say little is as far off as families are, each counting once: not as the two that most steps are made of. Widths
are then scaled so that intervals hold nine of ten architectures: the conformal quantile of how wide each would have needed
widths that were fitted without its group, since that is how it will be for the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from steptime._ops.families import WorkFamily
from steptime._platforms.situation import UNSEEN, KindError, Situation
from steptime_lab.validate.zoo.answers import ZooAnswer
from steptime_lab.validate.zoo.zoo import ZooCase

# Of kernels that are told apart by the profiler and the prediction in different ways no more is believed than this.
_MOST = 1.0
# A family is taken as one among others until architectures with a quarter of their time in it have said otherwise.
_TELLING = 0.25**2
_HELD = 0.9
_NINE_OF_TEN = 1.645
_SCALES = np.arange(0.0, 6.01, 0.05)
# Where the device has less to do than this share of the step, its errors do not show in it.
_BUSY = 0.9

Widths = Mapping[str, float]


def unseen_situation(cases: Sequence[ZooCase]) -> Situation:
    """What may be wrong of each family, by these architectures, whose answers have intervals without it."""
    profiled = [case for case in cases if case.measured.finite and case.measured.kernels is not None]
    groups = tuple(sorted({case.answer.group for case in profiled}))
    scale = _scale(profiled, groups)
    errors = {name: KindError(scale * width, scale * width) for name, width in _widths(profiled).items()}
    return Situation(UNSEEN, errors, len(profiled), groups, by_family=True)


def by_models_alone(case: ZooCase, alone: ZooAnswer) -> ZooCase:
    """A committed answer has the interval of then, with widths of then in it; here as wide as models alone make it now."""
    low_ms, high_ms = (case.answer.step_ms * edge_ms / alone.step_ms for edge_ms in (alone.low_ms, alone.high_ms))
    return replace(case, answer=replace(case.answer, low_ms=low_ms, high_ms=high_ms))


def _widths(cases: Sequence[ZooCase]) -> Widths:
    """Per family the root of the weighed mean square of logarithms."""
    squares: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case in cases:
        kernels = case.measured.kernels
        assert kernels is not None
        for name, took_ms in case.answer.families.items():
            if took_ms > 0 and kernels.families.get(name, 0.0) > 0:
                error = float(np.clip(np.log(kernels.families[name] / took_ms), -_MOST, _MOST))
                squares[name].append(((took_ms / case.answer.device_ms) ** 2, error**2))
    told = [rows for rows in squares.values() if sum(weight for weight, _ in rows) >= _TELLING]
    between = float(np.mean([_mean(rows) for rows in told or squares.values()]))
    known = [family.label for family in WorkFamily if family is not WorkFamily.COMMUNICATION]
    return {name: float(np.sqrt(_mean([*squares[name], (_TELLING, between)]))) for name in known}


def _mean(weighed: Sequence[tuple[float, float]]) -> float:
    weights, values = zip(*weighed, strict=True)
    return float(np.average(values, weights=weights))


def _scale(cases: Sequence[ZooCase], groups: Sequence[str]) -> float:
    """How many times as wide they must be to hold nine of ten, each with widths of the other groups."""
    needed = []
    for group in groups:
        kin = [case for case in cases if case.answer.group == group and case.answer.device_ms >= _BUSY * case.answer.step_ms]
        others = [case for case in cases if case.answer.group != group]
        widths = _widths(others or cases)
        needed += [_needed(case, widths) for case in kin]
    return float(np.quantile(needed, min(1.0, _HELD * (1 + 1 / len(needed))), method="higher"))


def _needed(case: ZooCase, widths: Widths) -> float:
    answer = case.answer
    error = float(np.log(case.measured.step_ms / answer.step_ms))
    side = int(error > 0)
    alone = abs(float(np.log((answer.low_ms, answer.high_ms)[side] / answer.step_ms))) / _NINE_OF_TEN
    shares = {name: took_ms / answer.step_ms for name, took_ms in answer.families.items() if name in widths}
    together = sum((share * widths[name]) ** 2 for name, share in shares.items())
    held = _NINE_OF_TEN * np.sqrt(alone**2 + _SCALES**2 * together) >= abs(error)
    return float(_SCALES[np.argmax(held)]) if held.any() else float(_SCALES[-1])
