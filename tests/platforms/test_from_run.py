"""Speeds from a recording: what is slower is found slower, what is known stays, and nothing gets worse for it."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from tests.support.mutated import mutated_tree

from steptime._api.read import read
from steptime._calibrate.calibrate import write
from steptime._calibrate.from_run import CalibrationOfRun, device_of, platform_of
from steptime._cli.app import run
from steptime._models.host.model import STEP, Speed
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.machine_costs import MachineCosts
from steptime._platforms.platform import Platform
from steptime._program.program import Calls, Ops, Works
from steptime._program.workload import Workload
from steptime._sim.modelled.step import modelled
from steptime._sim.recorded.replay import read_measured
from steptime._sim.recorded.speeds import recorded_speeds
from steptime.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE = EXAMPLES / "prefetch_sync"
PLATFORMS = {
    "prefetch_sync": "1xh200",
    "gpt_compiled": "1xh200",
    "gpt_fsdp2_small": "2xh200-half-loopback",
    "h200_mps4_dlrm": "4xh200-quarter-loopback",
}
Table = TypeVar("Table", Ops, Calls, Works)
CASES = 60  # of each kind of file; 500 were tried by hand


def slower(workload: Workload, times: float) -> Workload:
    """The run with all its times so many times as long."""

    def stretched(table: Table) -> Table:
        columns = {"start_ns": table.columns()["start_ns"], "end_ns": table.columns()["end_ns"]}
        return table.replace(
            **{name: np.where(each < 0, each, each * times).astype(np.int64) for name, each in columns.items()}
        )

    programs = tuple(
        replace(each, ops=stretched(each.ops), calls=stretched(each.calls), works=stretched(each.works))
        for each in workload.programs
    )
    return replace(workload, programs=programs)


def test_a_slower_run_is_found_slower() -> None:
    platform, workload = Platform.load("1xh200"), read([ONE])
    usual, slow = (recorded_speeds(each, platform) for each in (workload, slower(workload, 1.5)))
    assert usual.host is not None and slow.host is not None and usual.device is not None and slow.device is not None
    assert slow.device.factor == pytest.approx(1.5 * usual.device.factor, rel=0.01)
    # What the profiler spends and what launching costs do not grow as fast, so that the rest grows by more.
    assert 1.5 < slow.host.factor / usual.host.factor < 2.2


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_calibration_from_a_run_does_not_make_that_run_worse(name: str) -> None:
    platform, workload = Platform.load(PLATFORMS[name]), read([EXAMPLES / name])
    measured_ms = read_measured(EXAMPLES / name / "measured.json")
    found = CalibrationOfRun.of(workload, platform, measured_ms)
    step, errors = modelled(workload, platform), []
    for calibration in (UNCALIBRATED, Calibration.of(found.costs, platform)):
        period_ms = step.play(calibration).step_ns / 1e6
        errors.append(abs(np.log(period_ms / np.median(measured_ms))))
    # Both sides of a median that lies anywhere between repeats are as good as each other.
    spread = float(np.log(max(measured_ms) / min(measured_ms)))
    assert errors[1] <= max(errors[0] + 0.02, spread / 3)


def test_step_times_without_a_profiler_tell_the_speed_of_a_host_that_binds() -> None:
    platform = Platform.load("1xh200")
    workload = read(["src/steptime_lab/data/measurements/traces/resnet50-b16-r1.rank0.kineto.json.gz"])
    slow = replace(UNCALIBRATED, speed=Speed.of_cpu(1.5 * STEP.cpu))
    period_ns = modelled(workload, platform).play(slow).step_ns
    found = recorded_speeds(workload, platform, [period_ns])
    assert found.unprofiled is not None
    assert found.unprofiled.factor == pytest.approx(1.5, rel=0.03)


def test_hosts_that_nobody_measured_are_believed_to_be_slower_than_those_that_are_known() -> None:
    run_of = recorded_speeds(slower(read([ONE]), 1.5), Platform.load("1xh200"))
    speeds = {}
    for name in ("1xh200", "1xa100"):
        platform = Platform.load(name)
        speeds[name] = Calibration.of(MachineCosts((), (), run_of), platform)
    assert 1.0 < speeds["1xh200"].speed.cpu / STEP.cpu < speeds["1xa100"].speed.cpu / STEP.cpu < 1.5
    assert speeds["1xh200"].host_error < speeds["1xa100"].host_error < 0.35
    assert 1.0 < speeds["1xh200"].device < speeds["1xa100"].device


def test_the_platform_is_the_one_that_the_recording_names() -> None:
    assert platform_of(read([ONE])) == "1xh200"
    with pytest.raises(InputError, match="has 4 ranks; name the machine"):
        platform_of(read([EXAMPLES / "dlrm_overlap4"]))


def test_the_command_writes_what_predict_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    assert run(["calibrate", "--from-run", str(ONE), "-o", str(file), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["platform"] == "1xh200"
    assert document["parts"].keys() == {"host", "device"}
    assert all(part["error"] > 0 for part in document["parts"].values())
    assert run(["predict", str(ONE), "--platform", "1xh200", "--calibration", str(file), "--json"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([str(ONE), "--platform", "1xa100"], "was made on NVIDIA H200, which platform 1xa100 is not"),
        ([str(EXAMPLES / "h200_mps4_dlrm" / "rank0.et.json.gz"), "--platform", "1xh200"], "no device times"),
        ([str(EXAMPLES / "absent")], "absent"),
        ([str(EXAMPLES / "configs" / "bert.toml")], "was never recorded on a GPU"),
    ],
)
def test_what_is_no_recording_of_such_a_machine_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", "--from-run", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("device", "platform", "said"),
    [
        ("NVIDIA A100-SXM4-80GB", "1xh200", "was made on NVIDIA A100-SXM4-80GB, which platform 1xh200 is not"),
        ("NVIDIA H200", "8xh100-nvlink", "was made on NVIDIA H200, which platform 8xh100-nvlink is not"),
        ("", "1xh200", "was made without a GPU"),
        ("NVIDIA GB200", "1xb200", "was made on NVIDIA GB200, which platform 1xb200 is not"),
        ("NVIDIA H100 80GB HBM3", "1xh100", ""),
        ("NVIDIA GeForce RTX 4090", "1xrtx-4090", ""),
        ("NVIDIA H200", "4xh200-quarter-loopback", ""),
        ("A GPU of next year", "1xh200", ""),
    ],
)
def test_a_calibration_of_another_machine_is_refused(tmp_path: Path, device: str, platform: str, said: str) -> None:
    file, workload = tmp_path / "calibration.json", read([ONE])
    write(file, CalibrationOfRun.of(workload, Platform.load("1xh200")).content(device))
    if not said:
        assert Calibration.read(file, Platform.load(platform)).speed.cpu > 0
        return
    with pytest.raises(InputError, match=said):
        Calibration.read(file, Platform.load(platform))


def test_mutated_calibrations_of_runs_are_read_or_refused(tmp_path: Path) -> None:
    draw, platform, file = random.Random(1), Platform.load("1xh200"), tmp_path / "calibration.json"
    workload = read([ONE])
    content = CalibrationOfRun.of(workload, platform).content(device_of(workload))
    refused = 0
    for _ in range(CASES):
        file.write_text(json.dumps(mutated_tree(content, draw)))
        try:
            found = Calibration.read(file, platform)
        except InputError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert 0.02 < found.speed.cpu / STEP.cpu < 50
            assert 0.02 < found.device < 50
            assert 0 < found.host_error < 1
    assert 0 < refused < CASES


def test_mutated_recordings_give_speeds_or_one_line(tmp_path: Path) -> None:
    draw, platform, file = random.Random(2), Platform.load("1xh200"), tmp_path / "rank0.kineto.json"
    trace = json.loads(gzip.decompress((ONE / "rank0.kineto.json.gz").read_bytes()))
    for _ in range(CASES // 3):
        file.write_text(json.dumps(mutated_tree(mutated_tree(trace, draw), draw)))
        try:
            found = CalibrationOfRun.of(read([file]), platform)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert all(0 < part.believed.factor < 100 for part in found.parts())
