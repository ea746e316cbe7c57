"""Kernels of a trace against a device: every distinct call is a case, with all that ran inside its op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.traced_kernels import traced_calls, validation_of

from steptime._hardware.device import read_device
from steptime._models.engine.splits import Residuals
from steptime._models.kernels.fitted import KernelModels
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime._platforms.device import Device
from steptime._program.load import load
from steptime._program.workload import Workload
from steptime.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"
RESIDUALS = Residuals.of(["elementwise"] * 100, np.full(100, 1e3), np.linspace(900, 1100, 100))


class TenMicroseconds:
    """A form that says the same of everything."""

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        return [Answer((LaunchTime("kernel", 1e4),)) for _ in questions]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {}


def device(*forms: str) -> Device:
    return Device(read_device("h200"), KernelModels(dict.fromkeys(forms, TenMicroseconds()), RESIDUALS, {}))


@pytest.fixture(scope="module")
def workload() -> Workload:
    found = load([EXAMPLE])
    return replace(found, programs=found.programs[:1])


def test_all_that_ran_inside_a_call_counts_and_nothing_twice(workload: Workload) -> None:
    calls = traced_calls(workload, device("launched", "matmul"))
    (program,) = workload.programs
    ran_ns = float((program.works.end_ns - program.works.start_ns).sum())
    counted_ns = sum(sum(call.times_ns) for call in calls)
    assert 0.05 * ran_ns < counted_ns < ran_ns
    totals = [sum(call.times_ns) for call in calls]
    assert totals == sorted(totals, reverse=True)
    assert len({call.question for call in calls}) == len(calls)
    assert any("aten::addmm" in call.question.call.op for call in calls)


def test_a_case_is_the_median_of_a_distinct_call(workload: Workload) -> None:
    calls = traced_calls(workload, device("launched", "matmul"))
    often = max(calls, key=lambda call: len(call.times_ns))
    assert len(often.times_ns) > 1
    assert often.case.measured == float(np.median(often.times_ns))
    assert often.case.predicted == 1e4


def test_what_has_no_model_is_left_out_and_said(workload: Workload) -> None:
    some = device("matmul")
    found = validation_of(traced_calls(workload, some), some)
    assert set(found.groups) <= {"matmul", "longer than 5 us", "up to 5 us"}
    assert 0 < found.facts["of_the_time_answered"] < 1
    with pytest.raises(InputError, match="no kernel of the trace has a model on h200"):
        validation_of(traced_calls(workload, device()), device())
