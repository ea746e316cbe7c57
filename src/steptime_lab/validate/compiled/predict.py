"""Compiled steps captured and predicted by the path that a user has, before anybody measures them; needs torch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from steptime import Workload, capture
from steptime._platforms.platform import Platform, platform_parts
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import SteptimeError
from steptime_lab.validate.compiled.answers import COMPILED, FORMS, PLATFORMS, CaseAnswer, StepAnswer
from steptime_lab.validate.compiled.kinds import GENERATED
from steptime_lab.workloads.compiled import CompiledCase

_LONGEST = 300  # of a reason
_FOLDERS = re.compile(r"(?<=\s)/\S*/")  # of whoever captured


def predicted(case: CompiledCase, report: Callable[[str], None] = lambda _: None) -> tuple[CaseAnswer, dict[str, str]]:
    """Both forms of a case; and why one was not."""
    platform = Platform.of(platform_parts(PLATFORMS[case.ranks]))
    answers: dict[str, StepAnswer] = {}
    refused: dict[str, str] = {}
    for form in FORMS:
        begun_s = time.process_time()
        try:
            answer = StepAnswer.of(predict_on(captured(case, form), platform))
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


def captured(case: CompiledCase, form: str) -> Workload:
    """One form of a case, as captured without a GPU."""
    return capture(case.compiled if form == COMPILED else case.eager, ranks=case.ranks)
