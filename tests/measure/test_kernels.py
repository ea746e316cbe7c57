from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.measurements.test_store import a_recipe

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.group import Group
from steptime._calibrate.harness.ranks import Layout, RanksError
from steptime._calibrate.harness.session import Budget, Session, Setting
from steptime._measurements.store import read
from steptime._models.kernels.call import Call, TensorArg
from steptime._units import MIB
from steptime.errors import InputError
from steptime_lab.measure import restarts
from steptime_lab.measure.device_profile import HostProfile, MarkersError, Segment
from steptime_lab.measure.kernels import bench, cases, remaining, run, shares_of, sweep, work
from steptime_lab.measure.kernels.bench import KernelBench, Sample, Sentinels
from steptime_lab.measure.kernels.cases import FILE_NAME, KernelCase, write_calls
from steptime_lab.measure.op_calls import Arena
from steptime_lab.measure.restarts import AvoidList
from steptime_lab.measurements.sets import KERNELS

GROUP = Group(0, 1, "cpu", 1)
RELU = Call("aten::relu.default", (TensorArg((64, 8)),))
FILL = Call("aten::zeros.default", ((5, 5),))
BROKEN = Call("aten::mm.default", (TensorArg((3, 4)), TensorArg((5, 6))))
UNKNOWN = Call("aten::no_such_op.default", ())
HUGE = Call("aten::relu.default", (TensorArg((64 * MIB,)),))


def case(call: Call, source: str = "sweep") -> KernelCase:
    return KernelCase(call, call.to_json(), "some", source)


def a_session(folder: Path, minutes: float = 5) -> Session:
    return Session.start(folder, a_recipe(), minutes)


def measured(folder: Path, calls: list[Call], run: str = "first") -> tuple[list[dict[str, object]], dict[str, int]]:
    session = Session.start(folder, replace(a_recipe(), run=run), minutes=5)
    progress = session.progress("kernels", len(calls))
    with torch.inference_mode():
        made = KernelBench(GROUP, session, Arena(GROUP.device, 8 * MIB), progress)
        asked = remaining(session, [case(call) for call in calls], Setting())
        sweep(session, made, asked, Setting(repeats=2))
        made.close()
    return read(folder, KERNELS).to_pylist(), progress.skipped


def test_every_call_has_a_cold_row_and_one_with_its_input_just_written(tmp_path: Path) -> None:
    rows, _ = measured(tmp_path, [RELU])
    assert [(row["op"], row["cache"], row["kernel_names"]) for row in rows] == [
        ("aten::relu.default", "cold", ["aten::relu.default"]),
        ("aten::relu.default", "warm", ["aten::relu.default"]),
    ]
    assert all(len(row["times_ns"]) == 2 for row in rows)  # type: ignore[arg-type]


def test_what_has_no_input_is_only_measured_cold(tmp_path: Path) -> None:
    rows, _ = measured(tmp_path, [FILL])
    assert [row["cache"] for row in rows] == ["cold"]


def test_calls_that_cannot_run_are_counted_and_the_others_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, skipped = measured(tmp_path, [BROKEN, RELU, UNKNOWN, HUGE])
    assert {row["op"] for row in rows} == {"aten::relu.default"}
    assert len(rows) == 2
    assert skipped == {"failed": 2, "does not fit the arena": 1}
    assert "aten::no_such_op.default failed: this torch" in capsys.readouterr().err


def test_what_is_measured_is_not_asked_again(tmp_path: Path) -> None:
    measured(tmp_path, [RELU])
    rows, _ = measured(tmp_path, [RELU, FILL], run="second")
    assert Counter(row["op"] for row in rows) == {"aten::relu.default": 2, "aten::zeros.default": 1}


def test_no_time_left_means_no_rows_and_no_error(tmp_path: Path) -> None:
    session = Session(tmp_path, a_recipe(), Budget(0.0), a_session(tmp_path).store)
    made = KernelBench(GROUP, session, Arena(GROUP.device, 8 * MIB), session.progress("kernels", 1))
    sweep(session, made, [case(RELU)], Setting())
    assert read(tmp_path, KERNELS).num_rows == 0


def test_batches_are_cut_by_count_and_by_the_bytes_drawn_per_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BATCH", 3)
    session = a_session(tmp_path)
    made = KernelBench(GROUP, session, Arena(GROUP.device, 8 * MIB), session.progress("kernels", 1))
    indices = case(Call("aten::relu.default", (TensorArg((MIB // 8,), "int64", high=3),)))
    assert [len(batch) for batch in made.batches([case(RELU)] * 7)] == [3, 3, 1]
    assert [len(batch) for batch in made.batches([indices] * 7)] == [2, 2, 2, 1]


def test_a_profile_that_lost_records_gives_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_profile: object) -> None:
        raise MarkersError("planted")

    monkeypatch.setattr(HostProfile, "segments", lost)
    rows, skipped = measured(tmp_path, [RELU, FILL])
    assert rows == []
    assert skipped == {"the profile lost records": 2}


def test_a_profile_that_lost_records_once_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tried = HostProfile.segments, []

    def lost_once(profile: HostProfile) -> list[Segment]:
        tried.append(profile)
        if len(tried) == 1:
            raise MarkersError("planted")
        return whole(profile)

    monkeypatch.setattr(HostProfile, "segments", lost_once)
    rows, _ = measured(tmp_path, [RELU])
    assert [(row["cache"], len(row["times_ns"])) for row in rows] == [("cold", 2), ("warm", 2)]  # type: ignore[arg-type]


def test_one_of_several_ranks_does_not_run_a_batch_again_beside_others_that_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def lost(profile: HostProfile) -> list[Segment]:
        tried.append(profile)
        raise MarkersError("planted")

    monkeypatch.setattr(HostProfile, "segments", lost)
    monkeypatch.setattr(Group, "barrier", lambda _: None)
    session = a_session(tmp_path)
    made = KernelBench(Group(1, 2, "cpu", 2), session, Arena(GROUP.device, 8 * MIB), session.progress("kernels", 1))
    assert made.measure([case(RELU)], Setting(share=2, others="same")) == []
    assert len(tried) == 1


def test_sentinels_that_drift_are_noticed_once_there_is_something_to_compare_with() -> None:
    sentinels = Sentinels()
    steady = [[100.0, 101.0, 99.0], [200.0]]
    assert not any(sentinels.drifted(times) for times in [steady] * 5)
    assert sentinels.drifted([[100.0], [204.0]])
    assert sentinels.drifted([[96.0], [200.0]])
    assert not sentinels.drifted([[102.0], [201.0]])
    assert "product at most -4.0 % off, copy +2.0 %" in sentinels.said()


def test_a_sample_is_timed_a_second_way_after_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SAMPLE", 1.0)
    monkeypatch.setattr(bench, "_LONG_ENOUGH_NS", 0)
    session = a_session(tmp_path)
    sample = Sample()
    with torch.inference_mode():
        made = KernelBench(GROUP, session, Arena(GROUP.device, 8 * MIB), session.progress("kernels", 1))
        sweep(session, made, [case(RELU)], Setting(), keep=sample.keeps)
        assert [row["cache"] for row in read(tmp_path, KERNELS).to_pylist()] == ["warm"]
        sample.release(made, session)
    held = {row["cache"]: row["event_ns"] for row in read(tmp_path, KERNELS).to_pylist()}
    assert held["warm"] is None
    assert held["cold"] > 0
    assert "over 1 calls" in capsys.readouterr().err


def test_a_call_that_ends_its_process_is_not_tried_again(tmp_path: Path) -> None:
    avoid = AvoidList(tmp_path, "kernels")
    avoid.marker(0).begin(case(BROKEN).text)
    avoid.marker(0).begin(case(RELU).text)
    assert avoid.add_crashed()
    assert avoid.cases() == {case(RELU).text}
    assert [one.call for one in remaining(a_session(tmp_path), [case(RELU), case(FILL)], Setting())] == [FILL]


def test_an_op_that_ended_two_processes_is_not_tried_again(tmp_path: Path) -> None:
    others = [Call("aten::relu.default", (TensorArg((size,)),)) for size in (1, 2)]
    for call in others:
        AvoidList(tmp_path, "kernels").add([case(call).text])
    assert [one.call for one in remaining(a_session(tmp_path), [case(RELU), case(FILL)], Setting())] == [FILL]


def test_a_process_that_ended_for_no_call_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, avoid = a_session(tmp_path), AvoidList(tmp_path, "kernels")
    started: list[str] = []

    def fails(job: str, *_: object, **__: object) -> None:
        started.append(job)
        if len(started) == 1:
            avoid.marker(0).begin("a call")
        raise RanksError("planted")

    monkeypatch.setattr(restarts, "run_ranks", fails)
    restarts.run_avoiding(session, "kernels", Layout(1, device="cpu"), {}, avoid, attempts=8)
    assert len(started) == 2


def test_what_an_interrupted_run_was_trying_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RanksError("planted")

    avoid = AvoidList(tmp_path, "kernels")
    avoid.marker(3).begin(case(RELU).text)
    monkeypatch.setattr(restarts, "run_ranks", fails)
    restarts.run_avoiding(a_session(tmp_path), "shares", Layout(4, share_gpu=True, device="cpu"), {}, avoid, attempts=8)
    assert avoid.cases() == set()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(), (True, ())),
        (Options(ranks=(1, 2, 4), share_gpu=True), (True, (2, 4))),
        (Options(ranks=(8,), share_gpu=True), (False, (8,))),
        (Options(ranks=(2,)), (True, ())),
    ],
)
def test_shares_are_measured_where_ranks_share_a_gpu(options: Options, expected: tuple[bool, tuple[int, ...]]) -> None:
    assert shares_of(options) == expected


def test_a_damaged_file_of_calls_is_said_before_ranks_are_started(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("damaged")
    with pytest.raises(InputError, match="not a file of recorded calls"):
        run(a_session(tmp_path), Options(device="cpu", small=True))


def test_a_worker_measures_the_calls_of_workloads_and_of_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SMALL", 4)
    session = a_session(tmp_path)
    write_calls(tmp_path / FILE_NAME, "a_model", {RELU: 3})
    work(GROUP, session, session.to_plan(seed=0, small=True, only=["activation"]))
    sources = Counter(row["source"] for row in read(tmp_path, KERNELS).to_pylist())
    assert sources["a_model"] == 2
    assert sources["sweep"] >= 2


@pytest.mark.slow
def test_ranks_that_share_a_device_measure_it_busy_idle_and_streaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    session = a_session(tmp_path)
    run(session, Options(ranks=(2,), share_gpu=True, device="cpu", small=True, only=("softmax",)))
    rows = read(tmp_path, KERNELS).to_pylist()
    assert {row["others"] for row in rows if row["rank"] == 0} == {"same", "idle", "streaming"}
    assert {row["share"] for row in rows} == {2}
    assert not list(tmp_path.glob("*.done"))
