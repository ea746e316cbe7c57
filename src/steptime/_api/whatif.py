"""`whatif`: the changes that would save most of a step; and what changes save that are asked about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from steptime._api.predict import calibration_for, platform_for, platform_ranks, predict
from steptime._api.read import read
from steptime._fuse.compiled import DEFAULT, OFF, is_compiled
from steptime._platforms.calibration import Calibration
from steptime._platforms.platform import Platform
from steptime._program.workload import COMPILE, Workload
from steptime._report.whatif import ChangedPrediction, Suggestions
from steptime._sim.prediction import PredictedStep
from steptime._whatif.apply import Cohorts
from steptime._whatif.named import Changer
from steptime._whatif.savings import Scene, log_error_of
from steptime._whatif.suggestions import suggested

if TYPE_CHECKING:
    from steptime._api.read import Source
    from steptime._whatif.grammar import Change


def changed(
    prediction: PredictedStep,
    changes: Sequence[Change],
    platform: Platform | None = None,
    predicted: Callable[[Workload], PredictedStep] | None = None,
) -> ChangedPrediction:
    """A predicted step with changes; models are those of the platform, or of the device that a recording names.

    `predicted` predicts the job with another batch, if it can be built again.
    """
    scene, changer = _scene(prediction, platform, predicted)
    done = scene.what_if(changes)
    notices = done.after.notices.after(*changer.notes(changes, scene.cohorts))
    return ChangedPrediction.after(replace(done, after=replace(done.after, notices=notices)))


def whatif(
    source: Source,
    platform: str | Path | Platform | None = None,
    *,
    batch: int | None = None,
    ranks: int | None = None,
    calibration: str | Path | Calibration | None = None,
    profiled: bool = False,
) -> Suggestions:
    """The changes that would save most of a step: each is made and simulated. Arguments are as for `predict`."""
    workload = read(source, batch=batch, ranks=ranks, platform_ranks=platform_ranks(platform))
    machine = None if platform is None else platform_for(platform, workload.world_size)
    speed = None if machine is None else calibration_for(calibration, machine)
    step = predict(workload, machine, calibration=calibration if machine is None else speed, profiled=profiled)

    def predicted(job: Workload) -> PredictedStep:
        return predict(job, machine, calibration=speed, profiled=profiled, suggest=False)

    return Suggestions(step, suggested(_scene(step, machine, None if machine is None else predicted)[0]))


def _scene(
    prediction: PredictedStep, platform: Platform | None, predicted: Callable[[Workload], PredictedStep] | None = None
) -> tuple[Scene, Changer]:
    workload = prediction.workload

    @cache
    def rebuilt(batch: int) -> Cohorts:
        return cohorts(workload.varied(batch=batch))

    @cache
    def compiled() -> Cohorts:
        return cohorts(replace(workload, meta={**workload.meta, COMPILE: DEFAULT}))

    def cohorts(job: Workload) -> Cohorts:
        assert predicted is not None
        return tuple(each.cohort for each in predicted(job).timeline.cohorts)

    done = workload.meta.get(COMPILE, OFF) != OFF or any(map(is_compiled, workload.programs))
    changer = Changer(
        platform,
        workload.description.batch,
        None if predicted is None or workload.rebuild is None else rebuilt,
        None if predicted is None or done else compiled,
        log_error_of(prediction),
    )
    return Scene(prediction, changer), changer
