"""Laws of measuring memory: every case starts from nothing, and what it holds is its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import recipe
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import Session
from steptime._measurements.store import read
from steptime_lab.measure.memory import RUNNING, WAITING, due, let_go, measured, names, work
from steptime_lab.measure.steps import cases_of
from steptime_lab.measurements.sets import MEMORY
from steptime_lab.workloads.case import Case, build
from steptime_lab.workloads.networks.dlrm import DlrmStep
from steptime_lab.workloads.shared_buffers import renewed_buffers, shared_buffers

CPU = Options(ranks=(1,), device="cpu", small=True, only=("dlrm",))
ALONE = Group(0, 1, "cpu", 1)


def small() -> list[Case]:
    return cases_of(1, small=True, only=("dlrm",))


@pytest.fixture(autouse=True)
def _own_buffers() -> None:
    let_go(ALONE)


@pytest.mark.parametrize("case", small(), ids=lambda case: str(case.name))
def test_a_row_says_what_was_counted_and_over_how_many_steps(case: Case) -> None:
    row = measured(case, ALONE)
    assert (row["name"], row["rank"], row["share"], row["fabric"]) == (case.name, 0, 1, "none")
    assert row["steps"] == WAITING + RUNNING
    assert len(row["step_allocated_bytes"]) == WAITING + 1
    assert (row["allocated_bytes"], row["left_bytes"], row["outside_bytes"]) == (0, 0, None)  # nobody counts on a CPU


def test_nothing_of_a_case_stays() -> None:
    measured(small()[0], ALONE)
    assert shared_buffers(ALONE.device).nbytes() > 0
    let_go(ALONE)
    assert shared_buffers(ALONE.device).nbytes() == 0


def test_buffers_for_one_case_are_no_larger_than_it_needs() -> None:
    buffers = renewed_buffers(torch.device("cpu"))
    assert buffers.floats("weights", 10, at_best=1000).numel() == 10
    assert buffers.nbytes() == 40


@pytest.mark.parametrize("case", small(), ids=lambda case: str(case.name))
def test_index_batches_of_their_own_are_the_same_ones(case: Case) -> None:
    step = build(case, ALONE, torch.device("cpu"))
    assert isinstance(step, DlrmStep)
    before = [step.tables.start(iteration)[0].detach().clone() for iteration in range(step.batches)]
    step.tables.renew_inputs()
    after = [step.tables.start(iteration)[0].detach() for iteration in range(step.batches)]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    step.close()


@pytest.mark.slow
def test_a_case_is_due_until_every_rank_has_a_row(tmp_path: Path) -> None:
    session = Session.start(tmp_path, recipe(["steptime", "measure", "memory", "--small"], need_gpu=False), 5.0)
    waiting = due(session, CPU, 1)
    assert waiting == [case.name for case in small()]
    work(ALONE, session, {"cases": waiting[:1], "small": True, "only": ["dlrm"], "phase": "memory1"})
    assert due(session, CPU, 1) == waiting[1:]
    assert read(tmp_path, MEMORY)["name"].to_pylist() == waiting[:1]


def test_workloads_and_cases_may_be_named() -> None:
    assert {"bert", "dlrm", small()[0].name} <= set(names(CPU))
