from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.measurements.test_store import a_recipe

from steptime._calibrate.harness.ranks import Layout, RanksError, cores_of, mps, run_ranks, share
from steptime._calibrate.harness.session import Budget, Progress, Session
from steptime._measurements.sets import HOST
from steptime._measurements.store import read
from steptime.errors import InputError

JOB = """
import time

from steptime._measurements.sets import HOST

def work(group, session, plan):
    if plan.get("fails_on") == group.rank:
        raise RuntimeError("planted")
    row = {"kind": "op", "op": f"rank{group.rank}", "call": "", "source": "sweep", "phase": "other", "profiler": "off",
           "launches": 0.0, "cores": 1, "share": group.share, "times_ns": [1.0 + sum(group.gather(group.rank))]}
    session.store.add(HOST, row)
    if plan.get("waits"):
        (session.folder / f"waits{group.rank}").touch()
        time.sleep(60)
    session.store.flush()
    assert group.decide(7 if group.rank == 0 else 9) == 7
    assert not group.all_agree(group.rank == 0)
    group.barrier()
    if plan.get("fails_late") == group.rank:
        raise RuntimeError("planted")
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job's module, where workers find it."""
    package = tmp_path / "more"
    package.mkdir()
    (package / "planted.py").write_text(JOB)
    paths = [str(package), *(entry for entry in sys.path if entry)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return "planted"


def run_two(job: str, folder: Path, **more: Any) -> None:
    session = Session.start(folder, a_recipe(), minutes=5)
    run_ranks(job, Layout(2, device="cpu"), session.to_plan(**more), limit_s=120)


@pytest.mark.slow
def test_every_rank_works_and_its_rows_come_together(job: str, tmp_path: Path) -> None:
    run_two(job, tmp_path / "out")
    rows = read(tmp_path / "out", HOST).to_pylist()
    assert sorted((row["op"], row["rank"], row["time_ns"]) for row in rows) == [("rank0", 0, 2.0), ("rank1", 1, 2.0)]


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_and_loses_no_flushed_row(job: str, tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="failed"):
        run_two(job, tmp_path / "out", fails_late=1)
    assert read(tmp_path / "out", HOST).num_rows == 2


@pytest.mark.slow
def test_interrupted_ranks_flush_their_rows_and_say_nothing(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pause = time.sleep

    def interrupted(seconds: float) -> None:
        if len(list((tmp_path / "out").glob("waits*"))) == 2 and not raised:
            raised.append(True)
            raise KeyboardInterrupt
        pause(seconds)

    raised: list[bool] = []
    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_two(job, tmp_path / "out", waits=True)
    assert read(tmp_path / "out", HOST).num_rows == 2
    assert "Traceback" not in capfd.readouterr().err


def test_ranks_that_take_too_long_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", _sleeping(subprocess.Popen))
    session = Session.start(tmp_path, a_recipe(), minutes=1)
    with pytest.raises(RanksError, match="not done after 0 s"):
        run_ranks("x", Layout(2, device="cpu"), session.to_plan(), limit_s=0.1)


def _sleeping(popen: Any) -> Any:
    def started(_: list[str], env: Mapping[str, str]) -> Any:
        return popen(["/bin/sleep", "60"], env=dict(env))

    return started


def test_ranks_on_one_gpu_get_a_share_and_a_host_name_each() -> None:
    one, other = (Layout(4, share_gpu=True).environment(rank) for rank in (0, 3))
    assert one["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert one["NCCL_HOSTID"] != other["NCCL_HOSTID"]
    assert one["STEPTIME_SHARE"] == "4"
    assert "CUDA_VISIBLE_DEVICES" not in one


def test_ranks_on_gpus_of_their_own_see_one_each_and_nothing_of_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = Layout(2).environment(1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["STEPTIME_SHARE"] == "1"
    assert not [name for name in environment if "MPS" in name or "NCCL" in name]


def test_ranks_keep_to_the_gpus_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 2")
    assert [Layout(2).environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["5", "2"]


def test_one_rank_that_shares_with_nobody_has_the_whole_gpu() -> None:
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in Layout(1, share_gpu=True).environment(0)


def test_ranks_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    every = [cores_of(rank, 4) for rank in range(4)]
    assert sorted(core for cores in every for core in cores) == list(range(16))
    assert share(2, 8)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12"


def fake_control(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    control = folder / "nvidia-cuda-mps-control"
    control.write_text(text)
    control.chmod(control.stat().st_mode | stat.S_IXUSR)


def test_the_mps_daemon_is_started_in_folders_of_its_own_and_told_to_quit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    fake_control(tmp_path / "bin", f'#!/bin/sh\necho "$1 $CUDA_MPS_PIPE_DIRECTORY" >> {log}\n[ "$1" = -d ] || cat >> {log}\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with mps() as environment:
        pipe = environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(pipe).is_dir()
        assert log.read_text() == f"-d {pipe}\n"
    assert log.read_text().endswith(f" {pipe}\nquit\n")
    assert not Path(pipe).exists()


def test_an_mps_daemon_that_is_absent_or_refuses_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="not installed"), mps():
        pass
    fake_control(tmp_path / "bin", "#!/bin/sh\necho already running >&2\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    with pytest.raises(InputError, match="did not start: already running"), mps():
        pass


def test_a_budget_hands_on_what_is_left_and_never_less_than_nothing() -> None:
    budget = Budget.of_minutes(1)
    assert 0 < budget.part(0.5).left_s() < budget.left_s() <= 60
    assert Budget.of_minutes(-1).left_s() == 0


def test_what_is_skipped_is_counted_and_said_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("kernels", 10, Budget.of_minutes(1))
    progress.step(7)
    progress.skip("does not fit", 2)
    progress.skip("not supported")
    progress.close()
    assert "kernels: 10/10, 2 skipped: does not fit, 1 skipped: not supported" in capsys.readouterr().err
