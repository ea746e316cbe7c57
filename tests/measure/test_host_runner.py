from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.measurements.test_store import a_recipe

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group, leave
from steptime._calibrate.harness.ranks import Layout, RanksError
from steptime._calibrate.harness.session import Budget, Progress, Session
from steptime._measurements.sets import HOST
from steptime._measurements.store import read
from steptime._models.kernels.call import Call, TensorArg
from steptime_lab.measure import host, restarts
from steptime_lab.measure.host.bench import HostBench, Probe, Times
from steptime_lab.measure.host.issued import SMALL_FILE, grouped
from steptime_lab.measure.host.probes import BETWEEN_OPS, probes
from steptime_lab.measure.host.recording import MODES, MarkedBench, ProfiledRunner
from steptime_lab.measure.kernels.cases import read_calls
from steptime_lab.measure.restarts import AvoidList
from steptime_lab.workloads.cases import small_cases

GROUP = Group(0, 1, "cpu", 1)


def a_session(folder: Path, run: str = "20260101T000000-abcd") -> Session:
    return Session.start(folder, a_recipe(run), minutes=5)


def a_bench(folder: Path = Path(), bursts: int = 2, calls: int = 4) -> MarkedBench:
    session: Any = a_session(folder) if folder != Path() else None
    return MarkedBench(GROUP, session, bursts, calls)


def a_runner(folder: Path, mode: str = "off", seconds: float = 60.0, passes: int = 1) -> ProfiledRunner:
    # A run of its own each time, as a command that is given again has.
    session = a_session(folder, run=f"run-{time.perf_counter_ns()}")
    session.store.process = f"p{time.perf_counter_ns()}"
    done = session.store.done(HOST)
    bench, avoid = MarkedBench(GROUP, session, 2, 4), AvoidList(folder, "host")
    return ProfiledRunner(
        bench, session, seconds, passes=passes, mode=mode, done=done, avoided=avoid.cases(), marker=avoid.marker(0)
    )


def progress(total: int = 1) -> Progress:
    return Progress("test", total, Budget.of_minutes(1), quiet=True)


def giving(*times: float) -> Callable[[HostBench], Times]:
    return lambda _bench: (list(times),)


def failing(error: Exception) -> Callable[[HostBench], Times]:
    def measure(_bench: HostBench) -> Times:
        raise error

    return measure


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read(folder, HOST).to_pylist()
    return rows


@pytest.fixture
def no_group_left() -> Iterator[None]:
    yield
    leave()


def test_a_probe_that_fails_is_counted_and_the_next_is_measured(tmp_path: Path) -> None:
    said = progress(3)
    probes = [
        Probe(("op",), "a", failing(TypeError())),
        Probe(("op",), "b", failing(MemoryError())),
        Probe(("op",), "c", giving(1.0)),
    ]
    a_runner(tmp_path).run(probes, said)
    assert [row["op"] for row in rows_of(tmp_path)] == ["c"]
    assert said.skipped == {"cannot be run (TypeError)": 1, "does not fit": 1}


def test_what_cannot_be_run_is_asked_otherwise_and_the_row_says_what_was_run(tmp_path: Path) -> None:
    other = Probe(("op",), "a", giving(2.0), call="recorded")
    a_runner(tmp_path).run([Probe(("op",), "a", failing(RuntimeError()), call="small", otherwise=other)], progress())
    assert [(row["call"], row["time_ns"]) for row in rows_of(tmp_path)] == [("recorded", 2.0)]


@pytest.mark.slow
def test_a_second_run_measures_only_what_the_first_had_no_time_for(tmp_path: Path) -> None:
    other = Probe(("op",), "a", giving(2.0), call="recorded")
    probes = [Probe(("op",), "a", failing(RuntimeError()), call="small", otherwise=other), Probe(("op",), "b", giving(1.0))]
    a_runner(tmp_path).run(probes[:1], progress())
    a_runner(tmp_path, seconds=0.0).run(probes, progress(2))
    assert [row["op"] for row in rows_of(tmp_path)] == ["a"]
    a_runner(tmp_path).run(probes, progress(2))
    assert sorted(row["op"] for row in rows_of(tmp_path)) == ["a", "b"]


@pytest.mark.slow
def test_what_is_measured_under_one_profiler_is_not_done_under_another(tmp_path: Path) -> None:
    for mode in ("off", "after", "off"):
        a_runner(tmp_path, mode).run([Probe(("op",), "a", giving(1.0))], progress())
    assert sorted(row["profiler"] for row in rows_of(tmp_path)) == ["after", "off"]


def test_a_probe_that_ended_its_process_is_not_asked_again(tmp_path: Path) -> None:
    probes = [Probe(("op",), "a", giving(1.0)), Probe(("op",), "b", failing(KeyboardInterrupt()))]  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        a_runner(tmp_path).run(probes, progress(2))
    assert AvoidList(tmp_path, "host").add_crashed()
    a_runner(tmp_path).run([*probes, Probe(("op",), "c", giving(1.0))], progress(3))
    assert AvoidList(tmp_path, "host").cases() == {"op b"}
    assert sorted(row["op"] for row in rows_of(tmp_path)) == ["a", "c"]


def test_op_calls_are_kept_when_every_workload_is_recorded_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(_step: object, **_: object) -> dict[Call, int]:
        recorded.append(len(recorded))
        if len(recorded) == 2:
            raise KeyboardInterrupt
        return {Call("aten::relu.default", (TensorArg((4,)),)): 1}

    recorded: list[int] = []
    cases = tuple(case for case in small_cases(1) if case.workload == "dlrm")
    monkeypatch.setattr("steptime_lab.workloads.cases.small_cases", lambda _: cases)
    monkeypatch.setattr("steptime_lab.measure.kernels.record.record_calls", cut_off)
    with pytest.raises(KeyboardInterrupt):
        host.work(GROUP, a_session(tmp_path), {"record": True})
    assert not (tmp_path / SMALL_FILE).exists()
    host.work(GROUP, a_session(tmp_path), {"record": True})
    assert set(read_calls(tmp_path / SMALL_FILE)) == {case.name for case in cases}


def test_a_slope_and_its_intercept_are_rows_of_two_kinds(tmp_path: Path) -> None:
    a_runner(tmp_path).run([Probe(("x", "x_fixed"), "a", lambda _: ([1.0], [2.0]), phase="backward")], progress())
    assert [(row["kind"], row["phase"], row["time_ns"]) for row in rows_of(tmp_path)] == [
        ("x", "backward", 1.0), ("x_fixed", "backward", 2.0),
    ]  # fmt: skip


def test_bursts_of_a_probe_lie_in_different_passes_each_with_the_speed_of_the_host_beside_it(tmp_path: Path) -> None:
    asked: list[str] = []

    def probe(op: str) -> Probe:
        def measure(_bench: HostBench) -> Times:
            asked.append(op)
            return ([float(len(asked))],)

        return Probe(("op",), op, measure)

    a_runner(tmp_path, passes=3).run([probe("a"), probe("b")], progress(6))
    assert asked == ["a", "b"] * 3
    rows = {row["op"]: row for row in rows_of(tmp_path)}
    assert [rows[op]["times_ns"] for op in "ab"] == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    for row in rows.values():
        assert len(row["reference_cpu_ns"]) == len(row["reference_launch_ns"]) == 3
        assert min(*row["reference_cpu_ns"], *row["reference_launch_ns"]) > 0


def test_what_failed_once_is_not_tried_in_later_passes_and_what_it_had_said_is_kept(tmp_path: Path) -> None:
    said, asked = progress(6), []

    def second_time_fails(_bench: HostBench) -> Times:
        asked.append(1)
        return ([7.0],) if len(asked) == 1 else failing(ValueError())(_bench)

    probes = [Probe(("op",), "a", failing(TypeError())), Probe(("op",), "b", second_time_fails)]
    a_runner(tmp_path, passes=3).run(probes, said)
    assert said.skipped == {"cannot be run (TypeError)": 1, "cannot be run (ValueError)": 1}
    assert len(asked) == 2
    assert [(row["op"], row["times_ns"]) for row in rows_of(tmp_path)] == [("b", [7.0])]


def test_where_time_is_short_the_first_of_the_list_get_all_their_bursts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(_bench: HostBench) -> Times:
        now[0] += 1.0
        return ([1.0],)

    said = progress(15)
    a_runner(tmp_path, seconds=8.0, passes=3).run([Probe(("op",), op, slow) for op in "abcde"], said)
    assert {row["op"]: len(row["times_ns"]) for row in rows_of(tmp_path)} == {"a": 3, "b": 3, "c": 1, "d": 1}
    assert said.skipped == {"no time left": 1}


@pytest.mark.slow
@pytest.mark.usefixtures("no_group_left")
def test_a_small_run_without_a_profiler_has_every_kind(tmp_path: Path) -> None:
    plan = {"modes": [["off", 120.0]], "short": False, "small": True, "only": []}
    host.work(GROUP, a_session(tmp_path), plan)
    rows = rows_of(tmp_path)
    assert {row["kind"] for row in rows} == set(host.KINDS)
    assert {(row["profiler"], row["share"], row["launches"]) for row in rows} == {("off", 1, None)}
    assert all(row["cores"] >= 1 and row["times_ns"] for row in rows)
    assert all(len(row["reference_cpu_ns"]) == len(row["times_ns"]) for row in rows)


@pytest.mark.slow
def test_every_profiler_mode_measures_the_same_loops(tmp_path: Path) -> None:
    plan = {"modes": [[mode, 60.0] for mode in MODES], "short": False, "small": True, "only": ["op", "launch", "backward_node"]}
    host.work(GROUP, a_session(tmp_path), plan)
    asked = {mode: {(row["kind"], row["op"]) for row in rows_of(tmp_path) if row["profiler"] == mode} for mode in MODES}
    assert asked["cuda"] == asked["cpu_cuda"] == asked["off"]
    assert asked["execution_trace"] == asked["after"]
    for found in asked.values():
        assert {kind for kind, _ in found} == {"op", "launch", "op_without_launch", "backward_node", "backward_call"}


def test_unprofiled_comes_first_and_only_after_follows_a_profiler_in_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, list[str]]] = []

    def run_ranks(job: str, layout: Layout, plan: dict[str, Any], **_: Any) -> None:
        assert job == host.__name__
        started.append((layout.ranks, [mode for mode, _ in plan.get("modes", [])]))

    monkeypatch.setattr(restarts, "run_ranks", run_ranks)
    host.run(a_session(tmp_path), Options(ranks=(1, 4), device="cpu"))
    assert started[:2] == [(1, []), (1, ["off"])]
    assert started[-1] == (4, ["off"])
    assert {mode for _, modes in started for mode in modes} == set(MODES)
    assert all(modes[1:] in ([], ["after"]) for _, modes in started)


def test_a_short_run_gives_unprofiled_all_it_needs_and_says_what_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[tuple[int, list[list[Any]]]] = []
    now = [1000.0]

    def run_ranks(_job: str, layout: Layout, plan: dict[str, Any], **_: Any) -> None:
        given.append((layout.ranks, plan.get("modes", [])))
        now[0] += sum(host.STARTING_S + seconds for _, seconds in plan.get("modes", []))

    monkeypatch.setattr(restarts, "run_ranks", run_ranks)
    monkeypatch.setattr(time, "time", lambda: now[0])
    host.run(Session.start(tmp_path / "short", a_recipe(), minutes=0.75), Options(ranks=(1, 4), device="cpu"))
    assert given[1:] == [(1, [["off", 28.0]])]
    assert "no time left for host costs of 4 rank(s), profiler off" in capsys.readouterr().err
    given.clear()
    host.run(Session.start(tmp_path / "long", a_recipe(), minutes=2.3), Options(ranks=(1, 2, 4), device="cpu"))
    assert [(ranks, [mode for mode, _ in modes]) for ranks, modes in given[1:]] == [
        (1, ["off"]), (1, ["cpu_cuda", "after"]), (1, ["cuda"]), (1, ["execution_trace"]), (4, ["off"]),
    ]  # fmt: skip


def test_what_lies_between_ops_comes_first_and_the_ops_that_are_issued_most_follow() -> None:
    issued = grouped([(Call(f"aten::{name}.default", (TensorArg((4,)),)), 0, "sweep") for name in ("exp", "sum", "t")])
    kinds = [probe.kinds[0] for probe in probes(issued)]
    first = kinds[: kinds.index("op")]
    assert set(first) == set(BETWEEN_OPS)
    assert [one.small.op for one in issued] == ["aten::t.default", "aten::sum.default", "aten::exp.default"]
    assert kinds.index("table_batched") < kinds.index("copy") < kinds.index("op_python")


def test_a_group_that_ends_badly_is_started_once_more_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[Any]] = []

    def run_ranks(_job: str, _layout: Layout, plan: dict[str, Any], **_: Any) -> None:
        started.append(plan.get("modes", []))
        AvoidList(tmp_path, "host").marker(0).begin("op a")
        raise RanksError("planted")

    monkeypatch.setattr(restarts, "run_ranks", run_ranks)
    host.run(a_session(tmp_path), Options(device="cpu"))
    assert len(started) == 2 * (1 + len(host.GROUPS))
    assert "planted" in capsys.readouterr().err
