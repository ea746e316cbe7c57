"""Laws of measuring compiled steps: what is asked for, which cases are made side by side, and which kernels a profile has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.measure.raw_events import RawEvent

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import recipe
from steptime._calibrate.harness.session import Session
from steptime._measurements.store import read
from steptime.errors import InputError
from steptime_lab.measure.command import main
from steptime_lab.measure.compiled import _WAVE, FORMS, due, names, waves
from steptime_lab.measure.compiled.kernels import MARK, columns
from steptime_lab.measurements.sets import COMPILED
from steptime_lab.workloads.compiled import GRAPHS, cases


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session.start(tmp_path, recipe(["steptime", "measure", "compiled"], need_gpu=False), 1.0)


def test_every_case_is_made_once_and_those_of_several_ranks_last() -> None:
    every = list(cases().values())
    made = waves(every)
    assert sorted(each.name for wave in made for each in wave) == sorted(cases())
    assert all(sum(each.ranks for each in wave) <= _WAVE for wave in made)
    several = [each.ranks > 1 for wave in made for each in wave]
    assert several == sorted(several)


def test_cases_are_named_by_themselves_their_architecture_or_mode(session: Session) -> None:
    assert set(names(Options())) >= {*cases(), GRAPHS, "llama_gqa"}
    ranks = (1, 2, 4)
    assert {each.mode for each in due(session, Options(ranks=ranks, only=(GRAPHS,)))} == {GRAPHS}
    assert {each.architecture for each in due(session, Options(ranks=ranks, only=("llama_gqa",)))} == {"llama_gqa"}
    assert len(due(session, Options(ranks=ranks))) == len(cases())
    assert all(each.ranks == 2 for each in due(session, Options(ranks=(2,))))


def test_what_no_case_is_called_is_one_line() -> None:
    with pytest.raises(InputError, match="unknown name for compiled"):
        main(["compiled", "-o", "nowhere", "--device", "cpu", "--only", "nobody"])


def test_kernels_of_the_marked_step_come_in_the_order_they_began() -> None:
    margin = 10_000_000
    events = [
        RawEvent("aten::mm", margin + 10, 20, 1),
        RawEvent(MARK, margin, 100, annotation=True),
        RawEvent("cudaLaunchKernel", margin + 12, 2, 50),
        RawEvent("second", margin + 70, 5, 51, linked=9, on_device=True),
        RawEvent("first", margin + 40, 7, 50, linked=1, on_device=True),
        RawEvent("earlier", 10, 7, 40, linked=1, on_device=True),
    ]
    found = columns(events)
    assert found == {"kernel": ["first", "second"], "op": ["aten::mm", ""], "stream": [7, 7], "kernel_ns": [7, 5]}


@pytest.mark.slow
def test_a_small_case_is_measured_on_a_cpu(tmp_path: Path) -> None:
    main(["compiled", "-o", str(tmp_path), "--device", "cpu", "--small", "--only", "sine_layers", "--minutes", "4"])
    rows = read(tmp_path, COMPILED).to_pylist()
    assert [row["form"] for row in rows] == list(FORMS)
    assert all(len(row["times_ns"]) == 10 for row in rows)
