"""Replay reports: unprofiled step times beside the traces are found, and bad ones are one clear line."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from steptime._api.predict import find_measured
from steptime._program.load import load
from steptime._report.answers import Replayed, Unprofiled
from steptime._sim.recorded.replay import Replay, replay
from steptime._units import ms
from steptime.errors import InputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200_mps4_dlrm"


@cache
def played() -> Replay:
    return replay(load([EXAMPLE]))


def test_unprofiled_times_are_found_beside_a_folder_or_a_file() -> None:
    assert find_measured([EXAMPLE]) == EXAMPLE / "measured.json"
    assert find_measured([EXAMPLE / "rank0.kineto.json.gz"]) == EXAMPLE / "measured.json"
    assert find_measured([EXAMPLE.parent]) is None


def test_without_unprofiled_times_there_is_nothing_to_compare_with() -> None:
    assert Replayed.of(played()).unprofiled is None


def test_taking_out_the_profiler_never_makes_the_step_longer() -> None:
    found = Unprofiled.read(EXAMPLE / "measured.json", played())
    assert found.low_ms <= found.step_ms <= found.high_ms
    assert found.deflated_ms <= found.as_recorded_ms
    assert found.as_recorded_error == pytest.approx(found.as_recorded_ms / found.step_ms - 1)


def test_the_window_of_a_replay_is_its_steps() -> None:
    report = Replayed.of(played())
    for rank in report.prediction.ranks:
        assert rank.step_ms == pytest.approx(report.prediction.step_time_ms)


def test_the_range_of_a_replay_holds_its_step_and_the_recorded_ones() -> None:
    for step in played().steps:
        report = Replayed.of(replace(played(), steps=(step,)))
        assert step.error != 0
        low, high = report.prediction.interval_ms
        assert low <= ms(step.measured_ns) <= high
        assert low <= report.prediction.step_time_ms <= high


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no unprofiled step times"),
        ("[]", "no unprofiled step times"),
        ('{"measured_step_ms_unprofiled": "fast"}', "no unprofiled step times"),
        ('{"measured_step_ms_unprofiled": []}', "expected one or more positive"),
        ('{"measured_step_ms_unprofiled": [1.0, -2.0]}', "expected one or more positive"),
    ],
)
def test_unusable_unprofiled_times_are_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "measured.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said) as caught:
        Unprofiled.read(file, played())
    assert "\n" not in str(caught.value)
