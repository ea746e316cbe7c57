"""Compiled steps captured and predicted by the path that a user has, before anybody measures them; needs torch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from steptime import Workload, capture
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform, platform_parts
from steptime._program.load import load
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import SteptimeError
from steptime_lab.validate.compiled.answers import COMPILED, FORMS, PLATFORMS, CaseAnswer, StepAnswer
from steptime_lab.validate.compiled.kinds import GENERATED
from steptime_lab.workloads.compiled import CompiledCase

_LONGEST = 300  # of a reason
_FOLDERS = re.compile(r"(?<=\s)/\S*/")  # of whoever captured


def predicted(
    case: CompiledCase,
    report: Callable[[str], None] = lambda _: None,
    kept: Path | None = None,
    calibration: Path | None = None,
) -> tuple[CaseAnswer, dict[str, str]]:
    """Both forms of a case; and why one was not. `kept`: where captured steps are, or go; calibrations are of one rank."""
    platform = Platform.of(platform_parts(PLATFORMS[case.ranks]))
    known = UNCALIBRATED if calibration is None or case.ranks > 1 else Calibration.read(calibration, platform)
    answers: dict[str, StepAnswer] = {}
    refused: dict[str, str] = {}
    for form in FORMS:
        begun_s = time.process_time()
        try:
            answer = StepAnswer.of(predict_on(captured(case, form, kept), platform, calibration=known))
            if form == COMPILED and not any(kind.startswith(GENERATED) for kind in answer.kinds):
                raise SteptimeError("no kernel of it is generated: what was captured is the eager step")
        except (SteptimeError, RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError, KeyError) as error:
            refused[f"{case.name}, {form}"] = _FOLDERS.sub("", " ".join(str(error).split()))[:_LONGEST]
            report(f"{case.name:48s} {form:9s} refused: {refused[f'{case.name}, {form}']}")
            continue
        answers[form] = answer
        interval = f"[{answer.low_ms:.2f}, {answer.high_ms:.2f}]"
        said = (
            f"{answer.step_ms:8.3f} ms {interval:18s} device {answer.device_ms:8.3f}, {sum(answer.kinds.values()):5d} kernels"
        )
        report(f"{case.name:48s} {form:9s} {said}, {time.process_time() - begun_s:.1f} CPU s")
    return CaseAnswer(**answers), refused


def captured(case: CompiledCase, form: str, kept: Path | None = None) -> Workload:
    """One form of a case, as captured without a GPU; or as it was, where it is kept."""
    file = None if kept is None else kept / f"{case.name}.{form}.json.gz"
    if file is not None and file.exists():
        return load([file])
    workload = capture(case.compiled if form == COMPILED else case.eager, ranks=case.ranks)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        workload.save(file)
    return workload
