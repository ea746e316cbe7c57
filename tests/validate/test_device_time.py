"""Laws of comparing whole steps: which work launched a kernel, what counts as compute, and how close measured calls come."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.models.test_issued import Trace, gpu
from tests.support.measured_alone import MeasuredAlone

from steptime._models.kernels.fitted import Answered
from steptime._models.kernels.from_ops import questions_of
from steptime._models.kernels.question import Answer, LaunchTime, Question
from steptime_lab.fit.attribution import launched_by
from steptime_lab.measurements.shipped import shipped, shipped_programs
from steptime_lab.validate.device_time import CaseTime, case_time, device_times, op_times, validation_of

CASE = "resnet50-b16-r1"


def two_products() -> Trace:
    trace = Trace()
    trace.op("aten::mm", gpu([4, 4], 3), gpu([4, 4], 4), outputs=(gpu([4, 4], 5),))
    relu = trace.op("aten::relu", gpu([4, 4], 5), outputs=(gpu([4, 4], 6),))
    trace.op("aten::clamp_min", gpu([4, 4], 5), 0, outputs=(gpu([4, 4], 6),), inside=relu)
    trace.op("aten::mm", gpu([4, 4], 6), gpu([4, 4], 4), outputs=(gpu([4, 4], 7),))
    return trace


@pytest.mark.parametrize(
    ("ops", "owners"),
    [
        (["aten::mm", "aten::clamp_min", "aten::mm"], [0, 1, 2]),
        (["aten::mm", "aten::mm", "aten::clamp_min", "aten::mm", "aten::mm"], [0, 0, 1, 2, 2]),
        (["aten::clamp_min", "aten::mm"], [1, 2]),
        (["aten::mm", "aten::cos", "aten::clamp_min"], [0, -1, 1]),
        (["aten::mm", "Command Buffer Full", "aten::mm"], [0, 1, 2]),
        ([], []),
    ],
)
def test_a_kernel_belongs_to_the_work_of_its_op_in_the_order_of_both(ops: list[str], owners: list[int]) -> None:
    program = two_products().program()
    assert launched_by(program, questions_of(program), ops) == owners


@cache
def rows(name: str) -> list[dict[str, Any]]:
    table = shipped("step_kernels")
    found: list[dict[str, Any]] = table.filter(pc.equal(table["name"], name)).to_pylist()
    return found


@cache
def alone() -> MeasuredAlone:
    table = shipped("kernels")
    # A call that several workloads make is kept under the first of them.
    sources = pa.array(["inception_v3-bf16", "inception_v3-fp32", "resnet50-bf16", "resnet50-fp32"])
    return MeasuredAlone(table.filter(pc.is_in(table["source"].cast(pa.string()), sources)))


@cache
def compared(name: str) -> CaseTime:
    return case_time(shipped_programs(name), rows(name), alone().ask)


def test_calls_measured_alone_add_up_to_the_step_that_makes_them() -> None:
    found = compared(CASE)
    assert found.coverage > 0.99
    assert found.predicted_ns == pytest.approx(sum(op.answered_ns for op in found.ops.values()), rel=0.02)
    assert found.apart_ns == {}
    assert all(sum(op.predicted.values()) == sum(op.measured.values()) for op in found.ops.values() if not op.unanswered_ns)


def test_every_kernel_is_counted_once() -> None:
    found = compared(CASE)
    launches = sum(sum(op.measured.values()) for op in found.ops.values())
    assert launches == len(rows(CASE)[0]["op"])


def test_what_nothing_answers_is_named_and_lowers_coverage() -> None:
    def products_only(questions: Sequence[Question]) -> list[Answered]:
        answer = Answer((LaunchTime("gemm", 1e6),))
        return [
            Answered("matmul", answer) if "mm" in question.call.op else Answered("", None, f"no family has {question.call.op}")
            for question in questions
        ]

    found = case_time(shipped_programs(CASE), rows(CASE), products_only)
    validation = validation_of([found])
    assert found.coverage < 0.05
    assert found.missing["no family has aten::convolution.default"] == pytest.approx(
        found.ops["aten::convolution.default"].measured_ns
    )
    assert validation.facts["coverage"] == found.coverage
    assert validation.warnings[0].startswith("no family has aten::convolution_backward.default: ")


def test_shipped_cases_are_compared_by_name() -> None:
    found = device_times(alone().ask, [CASE])
    assert [case.name for case in found] == [CASE]
    assert found[0].measured_ns == compared(CASE).measured_ns
    part = validation_of(found).groups["resnet50"].summary
    assert part.rows == 1 and part.max == pytest.approx(abs(found[0].predicted_ns / found[0].measured_ns - 1))


def test_collectives_and_lookups_are_no_compute() -> None:
    name = "dlrm-t00-b2048-r4"

    def nothing(questions: Sequence[Question]) -> list[Answered]:
        assert all((question.share, question.others) == (4, "same") for question in questions)
        return [Answered("", None, "not asked") for _ in questions]

    found = case_time(shipped_programs(name), rows(name), nothing)
    assert set(found.apart_ns) == {"lookup", "collective"}
    assert found.coverage == 0.0
    assert not any("nccl" in kernel or "table_batched" in kernel for op in found.ops.values() for kernel in op.measured)
    assert len(op_times([found])) == len(found.ops)
