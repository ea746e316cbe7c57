"""`predict_on`: how long a step takes on a platform, how sure that is and why it is not faster, from models alone."""

from __future__ import annotations

from dataclasses import replace

from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._program.workload import Workload
from steptime._sim.explain.activity import Window
from steptime._sim.modelled.interval import interval_ns
from steptime._sim.modelled.memory import does_not_fit, memory_of
from steptime._sim.modelled.step import ModelledStep, modelled
from steptime._sim.prediction import PredictedStep, explain, peak_flop_per_s
from steptime._units import ms

_WORTH_SAYING = 0.001
# Standard deviation of the logarithm of a host nobody measured: the A100 boxes of public steps are 1.5 to 1.75 times as slow as
# the one that was (docs/devices.md).
_UNKNOWN_HOST = 0.35
# Above this share the caveat is worth a line of its own.
_MUCH_OUT_OF_RANGE = 0.05


def predict_on(
    workload: Workload,
    platform: Platform,
    *,
    calibration: Calibration = UNCALIBRATED,
    strict: bool = False,
) -> PredictedStep:
    """Predict the steady-state step of a workload on a platform; `strict`: an op without a model is an error, not a guess."""
    step = modelled(workload, platform, strict=strict)
    memory = memory_of(step.workload, platform)
    result = prediction_of(step, workload, calibration)
    return replace(result, memory=memory, warnings=(*does_not_fit(memory), *result.warnings))


def prediction_of(step: ModelledStep, workload: Workload, calibration: Calibration = UNCALIBRATED) -> PredictedStep:
    """The prediction of a step whose models were asked."""
    if step.platform.device.limits.analytic and calibration is UNCALIBRATED:
        calibration = replace(calibration, host_error=_UNKNOWN_HOST)
    result, settling = step.steady(calibration)
    steps = max(1, *(len(program.program.steps) for program in step.programs))
    low, high = interval_ns(step, result, calibration)
    warnings = [*step.warnings, *_caveats(step)]
    if not result.converged:
        warnings.append(f"the step had not settled after {result.iterations} windows; the period is their mean")
    if settling is not None and not settling.settled:
        warnings.append(f"how collectives and kernels slow each other had not settled ({settling.change:.1%} still move)")
    text = explain(
        workload,
        result.timeline,
        Window(steps),
        step_ns=float(result.period_ns[0]),
        interval_ms=(ms(low), ms(high)),
        first_step_ms=ms(result.first_ns[0]),
        warnings=warnings,
    )
    peak = peak_flop_per_s(step.platform.device.limits, text.operations.precision)
    return replace(
        text,
        platform=step.platform.name,
        coverage=step.coverage,
        peak_flop_per_s=None if peak is None else peak * workload.world_size,
    )


def _caveats(step: ModelledStep) -> list[str]:
    """What a reader should know before trusting the number."""
    results = []
    limits = step.platform.device.limits
    if limits.analytic:
        results.append(
            f"{limits.name} has not been measured: its kernels are scaled from {limits.models} by data sheets, and its host is "
            f"assumed to be {step.platform.parts.host}"
        )
    outside = step.coverage["out_of_range"]
    if outside > _MUCH_OUT_OF_RANGE:
        results.append(
            f"{outside:.0%} of the device time is beyond what the models were fitted on; the interval is wider for it"
        )
    fallback = step.coverage.get("fallback", 0.0)
    if fallback >= _WORTH_SAYING:
        results.append(
            f"{fallback:.1%} of the device time has no model and is a labelled guess; --strict names the first such op"
        )
    return results
