"""What compiling a step would bring: the step as `torch.compile` would run it, beside the eager one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from steptime._fuse.compiled import OFF, compiled_programs, is_compiled
from steptime._plan.chances import ratios
from steptime._platforms.platform import Platform
from steptime._program.workload import COMPILE, Workload
from steptime._report.compiling import CompiledPrediction, Compiling
from steptime._sim.prediction import PredictedStep
from steptime.errors import InputError

# Of the logarithm of a speed-up, what it is off by beside errors that the eager and the compiled step share.
OWN_ERROR = 0.1


def as_compiled(workload: Workload, mode: str, platform: str | Path | Platform | None) -> Workload:
    """A workload that is predicted as if it were compiled."""
    name = workload.name or "the workload"
    if any(is_compiled(program) for program in workload.programs):
        raise InputError(f"--compile {mode}: {name} is compiled already; predict it without --compile")
    if mode == OFF:
        return replace(workload, meta={**workload.meta, COMPILE: OFF})
    if platform is None:
        raise InputError(
            f"--compile {mode}: {name} was not run compiled; give the machine to predict for, as --platform 1xh200"
        )
    return replace(workload, meta={**workload.meta, COMPILE: mode})


def compared_with_eager(
    step: PredictedStep, predicted: Callable[[Workload], PredictedStep], platform: Platform
) -> CompiledPrediction:
    """A compiled step with the eager one beside it."""
    workload = step.workload
    eager = predicted(replace(workload, meta={**workload.meta, COMPILE: OFF}))
    found = compiled_programs(workload, platform.device.limits)
    fullest = max(found, key=lambda each: each.kernels)
    draws = [np.asarray(each.draws_ms) for each in (eager, step)]
    if min(map(len, draws)):
        low, high, faster = ratios([eager.step_time_ms, step.step_time_ms], draws, [0.0, OWN_ERROR])[1]
        interval = (1.0 / high, 1.0 / low)
    else:
        interval, faster = (0.0, 0.0), 0.0
    speedup = eager.step_time_ms / step.step_time_ms
    compiling = Compiling(
        mode=str(workload.meta[COMPILE]),
        eager=eager,
        speedup=speedup,
        interval=(min(interval[0], speedup), max(interval[1], speedup)),
        p_faster=faster,
        eager_launches=fullest.eager_ops,
        kernels=fullest.kernels,
        calls=fullest.calls,
        saved_bytes=fullest.saved_bytes,
        largest=fullest.largest,
    )
    return CompiledPrediction.after(step, compiling)
