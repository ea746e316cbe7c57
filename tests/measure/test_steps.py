from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.measure.raw_events import RawEvent
from tests.measure.test_steps_recorded import host_of_two_steps

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.conditions import recipe
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.session import GAVE_UP, Budget, Session
from steptime._measurements.store import read
from steptime.errors import InputError
from steptime_lab.measure.restarts import Attempts, CrashMarker, SharedMps, reason_of
from steptime_lab.measure.steps import Phase, _run_phase, cases_of, due, full_traces, names, need_s, phases, run, share_s, work
from steptime_lab.measure.steps.profiled import batches, cut
from steptime_lab.measure.steps.timing import SMALL, asked, key_of_case
from steptime_lab.measure.steps.traced import parse, stripped
from steptime_lab.measurements.sets import STEP_KERNELS, STEPS
from steptime_lab.workloads.case import Case

CPU = Options(ranks=(1,), device="cpu", small=True)


@dataclass(frozen=True)
class Ranks(Group):
    """A group whose other ranks are slower by so many seconds and agree or do not."""

    others_s: tuple[float, ...] = ()
    agree: bool = True

    def gather(self, value: float) -> list[float]:
        return [value, *self.others_s]

    def all_agree(self, ok: bool) -> bool:
        return ok and self.agree


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session.start(tmp_path, recipe(["steptime", "measure", "steps"], need_gpu=False), 5.0)


def alone() -> Group:
    return Group(0, 1, "cpu", 1)


def plan_of(kind: str, cases: Sequence[Case], **more: Any) -> dict[str, Any]:
    plain = {"small": True, "only": [], "full_traces": [], "called": [], "calibrate": 0, "seed": 0, "turn": 0}
    return {"kind": kind, "phase": f"{kind}1", "cases": [case.name for case in cases], **plain, **more}


def dlrm_cases(ranks: int = 1) -> list[Case]:
    return cases_of(ranks, small=True, only=("dlrm",))


def test_what_was_running_is_said_once(tmp_path: Path) -> None:
    marker = CrashMarker(tmp_path, "timed4")
    assert marker.take() == ""
    marker.begin("a")
    marker.begin("b")
    assert marker.take() == "b"
    assert marker.take() == ""


def test_a_damaged_marker_names_no_case(tmp_path: Path) -> None:
    marker = CrashMarker(tmp_path, "timed4")
    marker.file.write_bytes(b"\xff\xfe")
    assert marker.take() == ""


def attempts_of(session: Session, group: Group) -> Attempts:
    return Attempts(group, session, CrashMarker(session.folder, "timed1"), session.progress("steps", 1))


def test_a_case_that_fails_here_is_skipped_and_counted_with_its_reason(session: Session) -> None:
    attempts = attempts_of(session, alone())

    def fails() -> int:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    assert attempts.attempt("big", fails) is None
    assert attempts.progress.skipped == {"does not fit into memory": 1}


def test_cases_that_had_no_time_are_counted(session: Session) -> None:
    attempts = attempts_of(session, alone())
    attempts.close()
    assert attempts.progress.skipped == {"no time left": 1}


def test_a_case_that_fails_on_another_rank_is_skipped_here_too(session: Session) -> None:
    attempts = attempts_of(session, Ranks(0, 2, "cpu", 1, others_s=(0.0,), agree=False))
    assert attempts.attempt("case", lambda: 1) is None
    assert attempts.progress.skipped == {"failed on another rank": 1}


def test_reasons_are_one_short_line() -> None:
    assert reason_of(ValueError("no such thing\nlong story")) == "ValueError: no such thing"


def test_a_rank_that_hangs_is_ended_and_its_rows_are_kept(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from steptime._calibrate.harness.conditions import recipe
from steptime._calibrate.harness.session import Session
from steptime._calibrate.harness.session import watchdog
session = Session.start(Path({str(tmp_path)!r}), recipe(["x"], need_gpu=False), 1.0)
with watchdog(0.2, "nothing", session):
    pass
time.sleep(0.4)
with watchdog(0.2, "something", session):
    session.store.flush = lambda: Path({str(tmp_path)!r}, "flushed").write_text("x")
    time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, env=own_environment())
    assert ended.returncode == GAVE_UP, ended.stderr
    assert "gave up on something" in ended.stderr
    assert (tmp_path / "flushed").exists()


def own_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def test_step_times_come_first_and_many_ranks_before_few() -> None:
    order = [phase.name for phase in phases(Options(ranks=(1, 4, 2)))]
    assert order[:4] == ["timed4", "timed2", "timed1", "traced4"]
    assert order[-3:] == ["timed4_2", "timed2_2", "timed1_2"]


def test_phases_can_be_chosen_by_name_beside_workloads_and_cases() -> None:
    assert [phase.name for phase in phases(Options(ranks=(2, 1), only=("traced", "bert")))] == ["traced2", "traced1"]
    assert [phase.name for phase in phases(Options(only=("repeats",)))] == ["timed1_1", "timed1_2"]
    assert {phase.kind for phase in phases(Options(only=("bert",)))} == {"timed", "traced", "profiled"}
    assert {case.workload for case in cases_of(1, small=True, only=("timed", "bert"))} == {"bert"}
    assert cases_of(1, small=True, only=("timed",)) == cases_of(1, small=True, only=())
    assert {"timed", "traced", "profiled", "repeats", "dlrm"} <= set(names(CPU))


def test_time_is_split_in_proportion_where_it_is_enough_and_by_worth_where_it_is_not() -> None:
    assert share_s([100.0, 300.0], 800.0) == pytest.approx(200.0)
    assert share_s([100.0, 300.0], 400.0) == pytest.approx(100.0)
    assert share_s([100.0, 300.0], 350.0) == pytest.approx(100.0)
    assert share_s([100.0, 300.0], 50.0) == pytest.approx(50.0)
    assert share_s([0.0, 300.0], 500.0) == 0.0
    assert share_s([0.0, 0.0], 500.0) == 0.0


def test_a_phase_needs_its_start_and_more_for_models_whose_steps_share_the_gpu() -> None:
    options = Options(ranks=(4,), share_gpu=True)
    dlrm, bert = dlrm_cases(2)[0], Case("bert", "b", {}, "fp32", 4, 4)
    one_s, two_s = (need_s(Phase("timed", 4), [dlrm] * count, options) for count in (1, 2))
    assert 2 * one_s - two_s > 10.0
    assert need_s(Phase("timed", 4), [bert], options) > need_s(Phase("timed", 1), [bert], options)
    assert need_s(Phase("traced", 4), [], options) == 0.0


def test_a_phase_that_cannot_even_start_is_skipped_and_said(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def started_ranks(*given: Any, **__: object) -> None:
        started.append(given[2]["phase"])

    monkeypatch.setattr("steptime_lab.measure.restarts.run_ranks", started_ranks)
    options = replace(CPU, only=("dlrm",))
    run(replace(session, budget=Budget(time.time() + 2)), options)
    assert started == []
    said = capsys.readouterr().err
    assert "timed1: 2 s left" in said and "traced1" in said
    run(session, options)
    assert started[:3] == ["timed1", "traced1", "profiled1"]


def test_cases_of_the_same_tables_are_profiled_together_and_models_without_tables_alone() -> None:
    first, second = dlrm_cases()
    again = [replace(first, name=f"c{number}", batch=8 * (number + 1)) for number in range(5)]
    dense = [Case("bert", f"b{number}", {}, "fp32", 4, 1) for number in range(2)]
    found = [[case.name for case in together] for together in batches([again[0], second, *again[1:], *dense])]
    assert found == [["c0", "c1", "c2", "c3"], ["c4"], [second.name], ["b0"], ["b1"]]


def store_row(session: Session, case: Case) -> None:
    row = {"steps_per_time": 5, "allocated_bytes": [], "reserved_bytes": [], "lookups": None, "times_ns": [1.0]}
    session.store.add(STEPS, {**asked(case, 1, "none"), **row})
    session.store.flush()


def test_what_is_stored_is_not_due_again_but_a_fifth_is_due_twice_more(session: Session) -> None:
    cases = [replace(dlrm_cases()[0], name=f"c{number}", batch=8 + number) for number in range(7)]
    for case in cases[:6]:
        store_row(session, case)
    assert due(Phase("timed", 1), cases, session, CPU) == ["c6"]
    assert due(Phase("timed", 1, turn=1), cases, session, CPU) == ["c0", "c5"]
    store_row(session, cases[5])
    assert due(Phase("timed", 1, turn=1), cases, session, CPU) == ["c0"]
    assert due(Phase("timed", 1, turn=2), cases, session, CPU) == ["c0", "c5"]


def test_a_share_of_a_gpu_is_another_question_than_a_whole_one() -> None:
    case = dlrm_cases()[0]
    assert key_of_case(case, 1, "none") != key_of_case(case, 4, "loopback")


def test_full_traces_are_kept_of_a_few_small_cases() -> None:
    cases = dlrm_cases(2)
    larger = replace(cases[0], name="larger", batch=cases[0].batch * 2)
    assert full_traces([larger, cases[0]]) == [cases[0].name]
    assert full_traces([larger, cases[0], replace(cases[0], ranks=1)])[0] == cases[0].name
    assert full_traces(dlrm_cases(1)) == []


def test_one_rank_times_its_cases_and_stores_lookups_of_every_iteration(session: Session) -> None:
    cases = dlrm_cases()
    work(alone(), session, plan_of("timed", cases))
    rows = read(session.folder, STEPS).to_pylist()
    assert [row["name"] for row in rows] == [case.name for case in cases]
    assert all(len(row["times_ns"]) == SMALL.rounds and row["time_ns"] > 0 for row in rows)
    assert all(len(row["host_probe_ns"]) == SMALL.rounds and min(row["host_probe_ns"]) > 0 for row in rows)
    assert all(row["wire_probe_ns"] is None and row["steps_per_time"] == SMALL.least_steps for row in rows)
    iterations = json.loads(rows[0]["lookups"])
    assert {len(tables) for tables in iterations} == {5}
    lookups, unique, reuse = iterations[0]["t0"]
    assert 0 < unique <= lookups
    assert len(reuse) == 17 and sum(reuse) == pytest.approx(1, abs=1e-3)
    assert not CrashMarker(session.folder, "timed1").file.exists()


def test_a_case_that_cannot_be_built_costs_only_itself(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    good = dlrm_cases()[0]
    bad = replace(good, name="bad", plan=dict.fromkeys(good.plan or {}, 9))
    monkeypatch.setattr("steptime_lab.workloads.cases.small_cases", lambda _ranks: (bad, good))
    work(alone(), session, plan_of("timed", [bad, good]))
    assert read(session.folder, STEPS)["name"].to_pylist() == [good.name]


def test_time_is_kept_for_what_comes_after_the_cases(session: Session) -> None:
    attempts = attempts_of(session, alone())
    assert attempts.time_left(200.0)
    attempts.reserve_s = 200.0
    assert attempts.time_left(50.0)
    assert not attempts.time_left(200.0)


def test_time_that_is_up_stops_before_the_next_case(session: Session) -> None:
    over = replace(session, budget=Budget(time.time() - 1))
    work(alone(), over, plan_of("timed", dlrm_cases()))
    assert read(session.folder, STEPS).num_rows == 0


def test_traces_are_read_by_the_reader_of_execution_traces_and_keep_what_it_reads(session: Session) -> None:
    from steptime._program.formats.execution_trace import read as read_trace

    case = dlrm_cases()[1]
    work(alone(), session, plan_of("traced", [case]))
    file = session.folder / "traces" / f"{case.name}.rank0.et.json.gz"
    found = read_trace(gzip.decompress(file.read_bytes()), file.name)
    assert not found.warnings
    names = [node.name for node in found.nodes]
    assert "aten::_embedding_bag" in names and any(name.startswith("Optimizer.step") for name in names)
    assert any(node.seq_id >= 0 for node in found.nodes)
    assert json.loads((session.folder / "traces" / f"{case.name}.programs.json").read_text()) == {"ranks": 1, "programs": [0]}
    assert due(Phase("traced", 1), [case], session, CPU) == []


def test_stripping_changes_nothing_that_the_reader_reads(tmp_path: Path) -> None:
    import torch
    from torch.profiler import ExecutionTraceObserver

    from steptime._program.formats.execution_trace import read as read_trace

    weight = torch.randn(4, 3, requires_grad=True)
    observer = ExecutionTraceObserver()
    observer.register_callback(str(tmp_path / "et.json"))
    observer.start()
    torch.autograd.backward(torch.relu(torch.randn(2, 4) @ weight).sum())
    observer.stop()
    observer.unregister_callback()
    raw = (tmp_path / "et.json").read_text()
    before = read_trace(raw.encode(), "et")
    after = read_trace(json.dumps(stripped(parse(raw))).encode(), "et")
    assert [replace(node, rf_id=-1) for node in before.nodes] == list(after.nodes)
    assert (before.parents, before.groups) == (after.parents, after.groups)


def test_the_calls_of_each_kind_of_case_are_recorded_once(session: Session) -> None:
    from steptime_lab.measure.kernels.cases import FILE_NAME, read_calls
    from steptime_lab.measure.steps.traced import recorded_kinds

    case = dlrm_cases()[1]
    work(alone(), session, plan_of("traced", [case]))
    kinds = recorded_kinds(session.folder)
    assert kinds == ["dlrm-embedding_bag-fp32"]
    assert any("addmm" in call.op for call in read_calls(session.folder / FILE_NAME)[kinds[0]])


def test_a_cpu_has_no_kernels_to_store_but_its_full_trace_is_kept(session: Session) -> None:
    case = dlrm_cases()[1]
    work(alone(), session, plan_of("profiled", [case], full_traces=[case.name]))
    assert read(session.folder, STEP_KERNELS).num_rows == 0
    file = session.folder / "traces" / f"{case.name}.rank0.kineto.json.gz"
    content = json.loads(gzip.decompress(file.read_bytes()))
    assert any(str(event.get("name", "")).startswith("ProfilerStep#") for event in content["traceEvents"])


def test_kernels_of_a_rank_are_one_row_of_equally_long_columns(session: Session) -> None:
    from steptime_lab.measure.steps.profiled import key_of_kernels, row_of

    case = dlrm_cases()[0]
    device = [RawEvent("a", 120, 3, correlation=1000, linked=5), RawEvent("b", 130, 4, correlation=1001)]
    step = cut(host_of_two_steps(), device)[0, 0]
    session.store.add(STEP_KERNELS, row_of(case, alone(), [step, step]))
    session.store.flush()
    (row,) = read(session.folder, STEP_KERNELS).to_pylist()
    assert (row["kernel"], row["op"], row["kernel_ns"]) == (["a", "b"], ["aten::mm", ""], [[3, 3], [4, 4]])
    assert row["launch_ns"] == [15, 90] and row["start_ns"] == [20, 30] and row["host_ns"] == [100, 100]
    assert row["times_ns"] == [7.0, 7.0]
    assert row["key"] == key_of_kernels(case.name, 1, "none", rank=0)
    assert due(Phase("profiled", 1), [case], session, CPU) == []


def test_a_case_of_which_a_rank_lost_its_kernels_is_due_again(session: Session) -> None:
    from steptime_lab.measure.steps.profiled import row_of

    case = dlrm_cases(2)[0]
    step = cut(host_of_two_steps(), [RawEvent("a", 120, 3, correlation=1000, linked=5)])[0, 0]
    for rank, left in ((0, [case.name]), (1, [])):
        session.store.add(STEP_KERNELS, row_of(case, Group(rank, 2, "cpu", 1), [step]))
        session.store.flush()
        assert due(Phase("profiled", 2), [case], session, CPU) == left


def test_an_interrupted_case_is_not_skipped_by_the_next_run(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    case = dlrm_cases()[0]

    def interrupted(*_: object, **__: object) -> None:
        CrashMarker(session.folder, "timed1").begin(case.name)
        raise KeyboardInterrupt

    monkeypatch.setattr("steptime_lab.measure.restarts.run_ranks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run_phase(Phase("timed", 1), session, CPU, session.budget, [case.name], set(), SharedMps(session, CPU))
    assert CrashMarker(session.folder, "timed1").take() == ""


@pytest.mark.slow
def test_a_group_goes_on_after_the_case_that_ended_it(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = dlrm_cases(2)
    options = replace(CPU, ranks=(2,), only=("dlrm",))
    CrashMarker(session.folder, "timed2").begin(first.name)
    phase = Phase("timed", 2)
    _run_phase(phase, session, options, session.budget, [first.name, second.name], set(), SharedMps(session, options))
    rows = read(session.folder, STEPS).to_pylist()
    assert [(row["name"], row["ranks"]) for row in rows] == [(second.name, 2)]
    assert len(rows[0]["wire_probe_ns"]) == SMALL.rounds and min(rows[0]["wire_probe_ns"]) > 0
    assert first.name in capsys.readouterr().err
    # Skipped once: the next run makes it.
    assert due(phase, [first, second], session, options) == [first.name]
    assert not CrashMarker(session.folder, "timed2").file.exists()


@pytest.mark.slow
def test_a_killed_run_keeps_its_rows_and_the_next_one_makes_the_rest(session: Session) -> None:
    first, second = dlrm_cases()
    store_row(session, first)
    options = replace(CPU, only=("dlrm",))
    assert due(Phase("timed", 1), [first, second], session, options) == [second.name]
    work(alone(), session, plan_of("timed", [second]))
    assert due(Phase("timed", 1), [first, second], session, options) == []


def test_a_workload_nobody_knows_gives_no_cases() -> None:
    assert cases_of(1, small=True, only=("nothing",)) == []
    with pytest.raises(InputError, match="3 ranks"):
        cases_of(3, small=False, only=())


def test_groups_share_a_daemon_until_ranks_die_in_it(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    @contextmanager
    def faked() -> Iterator[dict[str, str]]:
        log.append("start")
        yield {"CUDA_MPS_PIPE_DIRECTORY": str(len(log))}
        log.append("stop")
        raise subprocess.TimeoutExpired("quit", 30)

    monkeypatch.setattr("steptime_lab.measure.restarts.mps", faked)
    with SharedMps(session, Options(ranks=(4, 1), share_gpu=True)) as daemon:
        first = daemon.environment(4)
        assert daemon.environment(1) is None
        daemon.renew()
        assert daemon.environment(4) != first
    assert log == ["start", "stop", "start", "stop"]
    with SharedMps(session, Options(ranks=(4,))) as daemon:
        assert daemon.environment(4) is None
    assert len(log) == 4


def test_the_marker_of_a_case_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from steptime_lab.measure.restarts import CrashMarker
CrashMarker(Path({str(tmp_path)!r}), "timed4").begin("slow")
print("begun", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=own_environment()) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGKILL)
    assert CrashMarker(tmp_path, "timed4").take() == "slow"
