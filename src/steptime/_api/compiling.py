"""What compiling a step would bring: the step as `torch.compile` would run it, beside the eager one.

A script or function is captured again, compiled by PyTorch's own compiler. Of anything else our fusion pass makes the compiled
step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from steptime._capture.compiled.modes import check_triton
from steptime._fuse.compiled import OFF, CompiledProgram, FusedKernel, compiled_programs, is_compiled, moved_bytes
from steptime._notices import Caveat
from steptime._plan.chances import ratios
from steptime._platforms.platform import Platform
from steptime._program.workload import COMPILE, Workload
from steptime._report.compiling import BY_TORCH, BY_US, CompiledPrediction, Compiling
from steptime._sim.prediction import PredictedStep
from steptime.errors import InputError

# Of the logarithm of a speed-up, what it is off by beside errors that the eager and the compiled step share.
OWN_ERROR = 0.1
_LARGEST = 12
_NOTHING = "PyTorch's compiler found nothing to compile, since no module is called; the step is fused by steptime itself"


def as_compiled(workload: Workload, mode: str, platform: str | Path | Platform | None) -> Workload:
    """A workload that is predicted as if it were compiled in a mode, or as if it were not."""
    name, done = workload.name or "the workload", _compiled(workload)
    if done and mode != OFF:
        if _again(workload) is None:
            raise InputError(f"--compile {mode}: {name} is compiled already; predict it without --compile")
        said = f"{name} calls torch.compile itself, and keeps the mode that it chose"
        return replace(workload, warnings=(*workload.warnings, Caveat(f"--compile {mode}: {said}")))
    if done:
        return eager(workload)
    if mode == OFF:
        return replace(workload, meta={**workload.meta, COMPILE: OFF})
    if platform is None:
        raise InputError(
            f"--compile {mode}: {name} has not run compiled; name the machine to predict for, as in --platform 1xh200"
        )
    captured = _captured(workload, mode)
    if isinstance(captured, Workload):
        return replace(captured, meta={**captured.meta, COMPILE: mode})
    warnings = (*workload.warnings, Caveat(captured)) if captured else workload.warnings
    return replace(workload, meta={**workload.meta, COMPILE: mode}, warnings=warnings)


def eager(workload: Workload) -> Workload:
    """The same job without compiling."""
    if not _compiled(workload):
        return replace(workload, meta={**workload.meta, COMPILE: OFF})
    again = _again(workload)
    if again is None:
        name = workload.name or "the workload"
        raise InputError(f"--compile {OFF}: {name} was saved or recorded compiled; give the script or function itself")
    result: Workload = again(OFF)
    return result


def _compiled(workload: Workload) -> bool:
    return any(is_compiled(program) for program in workload.programs)


def _again(workload: Workload) -> Callable[[str], Any] | None:
    """How a captured step is captured in another mode; None where it was not captured."""
    return getattr(workload.rebuild, "compiled", None)


def _captured(workload: Workload, mode: str) -> Workload | str:
    """The step as PyTorch's compiler makes it, or why it does not; "" where it is not asked."""
    again = _again(workload)
    if again is None:
        return ""
    check_triton()
    kept: dict[str, Workload | str] = vars(workload).setdefault("_captured", {})
    if mode not in kept:
        try:
            result: Workload = again(mode)
            kept[mode] = result if _compiled(result) else _NOTHING
        except InputError as error:
            kept[mode] = f"PyTorch's compiler failed ({error}); the step is fused by steptime itself"
    return kept[mode]


def compared_with_eager(
    step: PredictedStep, before: Workload, predicted: Callable[[Workload], PredictedStep], platform: Platform
) -> CompiledPrediction:
    """A compiled step with the eager one beside it; `before` is the workload as it was given."""
    workload = step.workload
    without = predicted(eager(before))
    by_torch = _compiled(workload)
    done = _found(without.workload, workload) if by_torch else compiled_programs(workload, platform.device.limits)
    fullest = max(done, key=lambda each: each.kernels)
    draws = [np.asarray(each.draws_ms) for each in (without, step)]
    low, high, faster = ratios([without.step_time_ms, step.step_time_ms], draws, [0.0, OWN_ERROR])[1]
    speedup = without.step_time_ms / step.step_time_ms
    compiling = Compiling(
        mode=str(workload.meta.get(COMPILE, OFF)),
        by=BY_TORCH if by_torch else BY_US,
        eager=without,
        speedup=speedup,
        interval=(min(1.0 / high, speedup), max(1.0 / low, speedup)),
        p_faster=faster,
        eager_launches=fullest.eager_ops,
        kernels=fullest.kernels,
        calls=fullest.calls,
        saved_bytes=fullest.saved_bytes,
        largest=fullest.largest,
    )
    return CompiledPrediction.after(step, compiling)


def _found(before: Workload, after: Workload) -> list[CompiledProgram]:
    """What PyTorch's compiler made of each program, by what both launch."""
    result = []
    for eager_program, program in zip(before.programs, after.programs, strict=False):
        ops, moved = moved_bytes(eager_program)
        launched, still = moved_bytes(program)
        times = Counter({name: count for name, (count, generated, _) in launched.items() if generated})
        sizes = {name: nbytes for name, (_, generated, nbytes) in launched.items() if generated}
        largest = sorted(times, key=lambda name: (-sizes[name], name))[:_LARGEST]
        result.append(
            CompiledProgram(
                program=program,
                eager_ops=sum(count for count, _, _ in ops.values()),
                kernels=sum(times.values()),
                calls=sum(count for count, generated, _ in launched.values() if not generated),
                saved_bytes=max(moved - still, 0),
                largest=tuple(FusedKernel(name, 0, times[name], sizes[name] // times[name]) for name in largest),
            )
        )
    return result
