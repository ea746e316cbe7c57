"""`diff`: what makes one step longer than another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from steptime._api.predict import platform_ranks, predict
from steptime._api.read import read
from steptime._diff.attribute import difference
from steptime._platforms.calibration import Calibration
from steptime._platforms.platform import Platform
from steptime._report.diff import Compared
from steptime._sim.prediction import PredictedStep

if TYPE_CHECKING:
    from steptime._api.read import Source

    Machine: TypeAlias = str | Path | Platform | None


def diff(
    before: Source | PredictedStep,
    after: Source | PredictedStep,
    platform: Machine = None,
    *,
    before_platform: Machine = None,
    after_platform: Machine = None,
    calibration: str | Path | Calibration | None = None,
    profiled: bool = False,
) -> Compared:
    """Compare two steps: recordings, predictions, or one of each; what makes the second longer or shorter adds up.

    Each is a prediction, or anything that `predict` takes: as recorded, or on `platform` (`before_platform` and
    `after_platform` are of one of them). `calibration` is of the machine of those that are predicted. `profiled`: recorded
    runs with what their profiler cost.
    """

    def predicted(step: Source | PredictedStep, machine: Machine) -> PredictedStep:
        if isinstance(step, PredictedStep):
            return step
        workload = read(step, platform_ranks=platform_ranks(machine))
        with_profiler = profiled and any(program.recorded for program in workload.programs)
        return predict(workload, machine, calibration=None if machine is None else calibration, profiled=with_profiler)

    return Compared(difference(predicted(before, before_platform or platform), predicted(after, after_platform or platform)))
