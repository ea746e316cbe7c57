"""Recordings predicted on a platform: what no model knows keeps its recorded time, and nothing is silently zero."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from steptime._models.host.speed import STEP
from steptime._platforms.platform import Platform
from steptime._program.load import load
from steptime._shard.configs import configured_in
from steptime._sim.modelled.calibrated import read_calibration
from steptime._sim.modelled.memory import memory_of
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import InputError

EXAMPLES = Path(__file__).parents[2] / "examples"


def unprofiled_ms(name: str) -> tuple[float, float]:
    times = json.loads((EXAMPLES / name / "measured.json").read_text())["measured_step_ms_unprofiled"]
    return min(times), max(times)


@pytest.mark.parametrize(
    ("name", "platform"), [("gpt_fsdp2_small", "2xh200-half-loopback"), ("dlrm_overlap4", "4xh200-quarter-loopback")]
)
def test_recordings_of_many_ranks_are_predicted_near_their_unprofiled_time(name: str, platform: str) -> None:
    found = predict_on(load([EXAMPLES / name]), Platform.load(platform))
    low, high = unprofiled_ms(name)
    assert 0.9 * low <= found.step_time_ms <= 1.1 * high


@pytest.mark.parametrize(("name", "off"), [("gpt_compiled", 0.15), ("gpt_graph", 0.10), ("prefetch_sync", 0.10)])
def test_compiled_steps_and_graphs_are_predicted_near_their_unprofiled_time(name: str, off: float) -> None:
    found = predict_on(load([EXAMPLES / name]), Platform.load("1xh200"))
    low, high = unprofiled_ms(name)
    assert low * (1 - off) <= found.step_time_ms <= high * (1 + off)
    assert found.coverage["measured"] > 0
    assert any("keep the time they were recorded with on NVIDIA H200" in warning for warning in found.warnings)


def calibration(folder: Path, **changed: object) -> Path:
    host = {"kind": "op", "op": "aten::add.Tensor", "call": "", "phase": "", "time_ns": 9000.0, "spread": 0.2, "repeats": 9}
    slope = {**host, "kind": "module_call_fixed", "op": "nested", "time_ns": -3.0}
    wire = {"collective": "all_reduce", "bytes": 1 << 20, "mode": "stream", "ranks": 2, "time_ns": 1e6, "spread": 0.1}
    content = {"schema_version": 1, "host": [host, slope], "fabric": [wire], **changed}
    file = folder / "calibration.json"
    file.write_text(json.dumps(content))
    return file


def test_a_calibration_says_how_fast_host_and_wire_are(tmp_path: Path) -> None:
    platform = Platform.load("2xh200-half-loopback")
    found = read_calibration(calibration(tmp_path), platform)
    assert platform.fabric is not None
    assert found.wire.keys() == {"all_reduce"}
    assert found.wire["all_reduce"] > 1.5
    assert found.speed != STEP
    other = read_calibration(calibration(tmp_path), Platform.load("4xh200-quarter-loopback"))
    assert other.wire == {}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schema_version": 9}, "no calibration of version 1"),
        ({"host": "many"}, "host is str; expected a list"),
        ({"host": [{"kind": "op", "op": "made.up", "time_ns": 1.0, "spread": 0.0}]}, "none of its host costs is known"),
        ({"host": [{"kind": "op", "op": "x", "time_ns": "long", "spread": 0.0}]}, "time_ns is 'long'"),
    ],
)
def test_a_broken_calibration_is_one_clear_line(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    file = calibration(tmp_path, **changed)
    with pytest.raises(InputError, match=said) as raised:
        read_calibration(file, Platform.load("2xh200-half-loopback"))
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_memory_says_whether_a_step_fits() -> None:
    given = configured_in(EXAMPLES / "configs" / "llama-8b.toml")
    small = configured_in(EXAMPLES / "configs" / "dlrm_small.toml")
    one = memory_of(small, Platform.load("1xh200"))
    assert one["fits"]
    assert sum(one["ranks"][0]["parts"].values()) <= one["allocated_bytes"] <= one["reserved_bytes"] < one["peak_bytes"]
    same = memory_of(replace(small, unnamed={}), Platform.load("1xh200"))
    assert same["allocated_bytes"] == pytest.approx(one["allocated_bytes"], rel=0.02)
    crowded = predict_on(configured_in(EXAMPLES / "configs" / "llama-8b.toml", batch=256), Platform.load("8xh200-nvlink"))
    assert given.world_size == 8
    assert not crowded.memory["fits"]
    assert "does not fit" in crowded.warnings[0]


def test_kernels_recorded_on_another_device_are_a_guess() -> None:
    here, there = (predict_on(load([EXAMPLES / "gpt_graph"]), Platform.load(name)) for name in ("1xh200", "1xa100"))
    assert here.coverage["measured"] > 0.9
    assert there.coverage["fallback"] > 0.9
    assert there.interval_ms[1] / there.interval_ms[0] > 3 > here.interval_ms[1] / here.interval_ms[0]
    assert any("nobody here ran a100" in warning for warning in there.warnings)


def test_nothing_is_said_of_memory_without_identities_of_tensors() -> None:
    assert predict_on(load([EXAMPLES / "gpt_graph"]), Platform.load("1xh200")).memory == {"peak_bytes": None}
