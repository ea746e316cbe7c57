from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.measurements.test_store import a_recipe

from steptime._calibrate.harness.command import Options, _without_paths
from steptime._calibrate.harness.ranks import FAILED, RanksError
from steptime._calibrate.harness.session import Session
from steptime._measurements.sets import HOST
from steptime._measurements.store import Store, read
from steptime.errors import InputError
from steptime_lab.measure import kernels
from steptime_lab.measure.command import JOBS, main

CPU = ["--device", "cpu", "--small"]


def store_a_row(folder: Path, device: str) -> None:
    store = Store(folder, replace(a_recipe(), device=device), "p1")
    row = {"kind": "op", "op": "a", "call": "", "source": "sweep", "phase": "other", "profiler": "off", "launches": None}
    store.add(HOST, {**row, "cores": 1, "share": 1, "times_ns": [1.0]})
    store.flush()


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_there_has_to_be_some_time(minutes: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--minutes .* expected (more than 0|a time)"):
        main(["kernels", "-o", str(tmp_path), "--minutes", minutes, *CPU])


@pytest.mark.parametrize("job", [job for job in JOBS if job != "calibrate"])
def test_a_name_that_nothing_has_is_said(job: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"--only nothing: unknown name for {job}; choose from "):
        main([job, "-o", str(tmp_path), "--only", "nothing", *CPU])
    assert not list(tmp_path.iterdir())


def test_a_folder_holds_the_measurements_of_one_device(tmp_path: Path) -> None:
    store_a_row(tmp_path, "NVIDIA H200")
    with pytest.raises(InputError, match="holds host of NVIDIA H200, this is cpu; give every device a folder"):
        main(["kernels", "-o", str(tmp_path), *CPU])


def test_an_interrupted_run_says_where_its_rows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    store_a_row(tmp_path, "")
    monkeypatch.setattr(kernels, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["kernels", "-o", str(tmp_path), *CPU])
    assert f"interrupted; what was measured is in {tmp_path}" in capsys.readouterr().err
    assert read(tmp_path, HOST).num_rows == 1


def test_a_recipe_names_no_folder_of_the_machine() -> None:
    for words in (["-o", "/home/me"], ["--out", "/home/me"], ["--out=/home/me"], ["-o/home/me"]):
        assert "/home/me" not in " ".join(_without_paths(["steptime", "measure", "host", *words, "--small"]))


def test_without_the_command_line_a_folder_that_cannot_be_made_is_one_line_too(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    command = [sys.executable, "-m", "steptime_lab.measure", "kernels", "-o", str(file), *CPU]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stderr) == (2, f"steptime: error: {file}: File exists\n")


def test_a_run_whose_ranks_all_failed_is_an_error_and_one_that_had_nothing_to_do_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(session: Session, options: Options) -> None:
        del options
        session.warn(str(RanksError(f"kernels on 1 ranks: {FAILED}, exit codes [1]")))

    def has_nothing_to_do(session: Session, options: Options) -> None:
        del session, options

    monkeypatch.setattr(kernels, "run", fails)
    with pytest.raises(InputError, match=r"nothing was measured, its ranks failed: kernels on 1 ranks"):
        main(["kernels", "-o", str(tmp_path), *CPU])
    monkeypatch.setattr(kernels, "run", has_nothing_to_do)
    assert main(["kernels", "-o", str(tmp_path), *CPU]) == 0
