"""Predictions of published Megatron iterations: with the host as it is shipped, and with one number for how fast theirs was.

Most of the rows are bound by a host of which nothing is known. So besides the prediction as it is there is one with the host
slower by one factor, chosen on rows that are not reported: that says how much of the error is the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from steptime.build.transformer import build
from steptime.models.host.speed import STEP, Speed
from steptime.platforms.platform import Platform
from steptime.sim.modelled.prediction import prediction_of
from steptime.sim.modelled.step import Calibration, ModelledStep, modelled
from steptime.units import ms
from steptime.validate.megatron import Iteration, PredictedIteration, chosen, compare, read_iterations, transformer_of
from steptime.validate.summary import Part, Validation

PLATFORM = "8xa100-nvlink"
# Factors that are tried, and on how many rows.
_SLOWER = tuple(np.arange(1.0, 2.51, 0.25).tolist())
_TRIED_ROWS = 10
_ROWS = 60

Said = Callable[[str], None]


@dataclass(frozen=True)
class Predictor:
    """Predicts rows on a platform with as many ranks as each has."""

    platform: str = PLATFORM

    def predicted(self, row: Iteration, slower: Sequence[float] = (1.0,)) -> list[PredictedIteration]:
        """The step and its interval, with hosts so many times slower than the shipped one."""
        step = self._step(row)
        found = [prediction_of(step, _calibration(factor)) for factor in slower]
        # All under the last one's regime, so that rows are in the same part whatever the host.
        regime = found[-1].bound_by.partition(":")[0]
        return [PredictedIteration(one.step_time_ms, *one.interval_ms, regime) for one in found]

    def times_ms(self, row: Iteration, slower: Sequence[float]) -> list[float]:
        """The step alone."""
        step = self._step(row)
        return [ms(float(step.steady(_calibration(factor))[0].period_ns[0])) for factor in slower]

    def _step(self, row: Iteration) -> ModelledStep:
        return modelled(build(transformer_of(row)), Platform.load(self.platform, ranks=row.ranks))


def megatron(file: Path, *, platform: str = PLATFORM, most: int | None = _ROWS, said: Said = lambda _: None) -> Validation:
    """The rows of the table without pipelines, or `most` of them, against predictions; with a fitted host as a baseline."""
    table = read_iterations(file)
    rows = chosen(table, None if most is None else most + _TRIED_ROWS)
    tried = rows[:: max(1, len(rows) // _TRIED_ROWS)][:_TRIED_ROWS]
    reported = [row for row in rows if row not in tried]
    slower = host_slower(tried, platform, said=said)
    predictor, found = Predictor(platform), {}
    for row in reported:
        found[row] = predictor.predicted(row, (1.0, slower))
        said(f"{len(found)} of {len(reported)} rows")
    plain, fitted = (compare(reported, lambda row, way=way: found[row][way], table=table) for way in (0, 1))  # type: ignore[misc]
    name = f"host {slower:.2f} times as slow"
    parts = {key: Part(part.summary, {name: fitted.parts[key].summary}) for key, part in plain.parts.items()}
    whole = Part(plain.whole.summary, {name: fitted.whole.summary})
    note = f"the baseline has the shipped host slower by one factor, chosen on {len(tried)} other rows; theirs is not known"
    return replace(plain, whole=whole, parts=parts, facts={**plain.facts, "host_slower": slower}, notes=(note,))


def host_slower(rows: Sequence[Iteration], platform: str = PLATFORM, *, said: Said = lambda _: None) -> float:
    """How many times as long as the shipped host theirs takes: the factor with which these rows are least off."""
    predictor, off = Predictor(platform), np.zeros(len(_SLOWER))
    for place, row in enumerate(rows, 1):
        off += np.abs(np.log(np.array(predictor.times_ms(row, _SLOWER)) / row.time_ms))
        said(f"host: {place} of {len(rows)} rows")
    return float(_SLOWER[int(np.argmin(off))])


def _calibration(slower: float) -> Calibration:
    return Calibration(speed=Speed(STEP.cpu * slower, STEP.launch * slower))
