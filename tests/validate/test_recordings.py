"""Recorded runs by what is predicted of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime._program.load import load
from steptime.errors import InputError
from steptime_lab.validate.recordings import DEVICE_TIME, ONE_RANK, STEP, UNPROFILED, own_platform, runs_in, validate_recordings

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_run_is_predicted_on_its_own_machine_and_without_its_profiler() -> None:
    found = validate_recordings(EXAMPLES / "prefetch_sync")
    assert {name.split(": ")[1] for name in (case.name for case in found.cases)} == {DEVICE_TIME, STEP, UNPROFILED}
    assert all(abs(case.error) < 0.06 for case in found.cases)
    assert all(case.covered is not False for case in found.cases)


def test_ranks_alone_say_what_all_say() -> None:
    found = validate_recordings(EXAMPLES / "gpt_fsdp2_small")
    assert found.groups[ONE_RANK].summary.rows == 2
    assert found.groups[ONE_RANK].summary.max < 0.05


@pytest.mark.parametrize(
    ("run", "platform"),
    [("dlrm_overlap4", "4xh200-quarter-loopback"), ("gpt_fsdp2_small", "2xh200-half-loopback"), ("gpt_graph", "1xh200")],
)
def test_a_run_tells_its_machine(run: str, platform: str) -> None:
    assert own_platform(load([EXAMPLES / run])).name == platform


def test_files_of_ranks_are_one_run_and_folders_are_runs(tmp_path: Path) -> None:
    for name in ("a.rank0.json", "a.rank1.json", "b.json.gz"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "rank0.json").write_text("{}")
    assert [[file.name for file in run] for run in runs_in(tmp_path)] == [
        ["c"],
        ["a.rank0.json", "a.rank1.json"],
        ["b.json.gz"],
    ]
    with pytest.raises(InputError, match="no recorded run here"):
        validate_recordings(tmp_path)
