from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.measurements.test_store import a_recipe

from steptime._calibrate.collectives.cases import CollectiveCase
from steptime._calibrate.collectives.sweep import LapReadings
from steptime._calibrate.collectives.timing import result_of
from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.ranks import Layout, run_ranks
from steptime._calibrate.harness.session import Session
from steptime._measurements.sets import COLLECTIVES
from steptime._measurements.store import read
from steptime_lab.measure.collectives import run
from steptime_lab.measure.collectives.circumstances import mean_inside

NAN = math.nan
SMALL = Options(ranks=(2,), device="cpu", small=True)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return list(read(folder, COLLECTIVES).to_pylist())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs into one folder: the first was only asked for broadcasts, the second for everything."""
    folder = tmp_path_factory.mktemp("collectives")
    for only in (("broadcast",), ()):
        run(Session.start(folder, a_recipe(), minutes=3), Options(ranks=(2,), device="cpu", small=True, only=only))
    return folder


@pytest.mark.slow
def test_a_small_run_measures_every_collective_in_every_circumstance(measured: Path) -> None:
    rows = rows_of(measured)
    assert {row["collective"] for row in rows} >= {
        "all_reduce",
        "all_to_all",
        "all_gather",
        "broadcast",
        "reduce",
        "send_recv",
        "barrier",
    }
    for column, values in {
        "mode": {"stream", "single"},
        "beside": {"none", "gemm", "copy"},
        "host_threads": {"idle", "busy"},
        "arrival": {"together", "skewed"},
        "dtype": {"float32", "bfloat16"},
    }.items():
        assert {row[column] for row in rows} == values, column
    assert all(row["ranks"] == 2 and row["fabric"] == "gloo" and row["share"] == 1 for row in rows)


@pytest.mark.slow
def test_every_time_is_positive_and_each_case_has_its_repeats(measured: Path) -> None:
    for row in rows_of(measured):
        assert all(value > 0 for value in row["times_ns"])
        assert len(row["times_ns"]) == 5 or row["beside"] != "none"


@pytest.mark.slow
def test_a_second_run_measures_only_what_is_missing(measured: Path) -> None:
    keys = [row["key"] for row in rows_of(measured)]
    assert len(keys) == len(set(keys))
    before = len(keys)
    run(Session.start(measured, a_recipe(), minutes=3), SMALL)
    assert len(rows_of(measured)) == before


@pytest.mark.slow
def test_company_is_timed_with_and_without_the_collective(measured: Path) -> None:
    for row in rows_of(measured):
        if row["beside"] == "none":
            assert row["beside_ns"] is row["beside_alone_ns"] is None
        else:
            assert row["beside_alone_ns"] > 0


@pytest.mark.slow
def test_waiting_for_a_late_rank_is_recorded_and_not_part_of_the_time(measured: Path) -> None:
    skewed = [row for row in rows_of(measured) if row["arrival"] == "skewed"]
    assert skewed
    for row in skewed:
        assert row["rank"] == row["late_rank"] == 1
        assert row["waiting_ns"] > 0.5 * row["skew_ns"]


@pytest.mark.slow
def test_uneven_rows_hold_their_whole_matrix(measured: Path) -> None:
    uneven = [row for row in rows_of(measured) if row["splits"]]
    assert len(uneven) == 4
    for row in uneven:
        assert len(row["splits"]) == 4
        assert row["bytes"] == max(sum(row["splits"][:2]), sum(row["splits"][2:]))


def test_a_run_without_time_says_so_and_adds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Session.start(tmp_path, a_recipe(), minutes=0.001), SMALL)
    assert "no time left for collectives on 2 ranks, gloo" in capsys.readouterr().err
    assert not rows_of(tmp_path)


def readings(*repeats: list[tuple[float, ...]]) -> np.ndarray:
    """Of shape (ranks, repeats, 4), from one list of ranks per repeat."""
    padded = [[(*rank, NAN, NAN)[:4] for rank in repeat] for repeat in repeats]
    return np.asarray(padded).swapaxes(0, 1)


def test_the_time_runs_from_the_last_arrival_to_the_last_end() -> None:
    result = result_of(CollectiveCase("all_reduce", 4, mode="single"), readings([(100.0, 190.0), (130.0, 180.0)]))
    assert result is not None
    assert result["times_ns"] == [60.0]
    assert result["waiting_ns"] == 30.0


def test_back_to_back_calls_take_as_long_as_the_slowest_rank_says() -> None:
    result = result_of(CollectiveCase("all_reduce", 4), readings([(0.0, 7.0), (0.0, 9.0)], [(0.0, 8.0), (0.0, 6.0)]))
    assert result is not None
    assert result["times_ns"] == [9.0, 8.0]
    assert result["waiting_ns"] is None


def test_a_repeat_that_failed_on_one_rank_counts_on_none() -> None:
    case = CollectiveCase("all_reduce", 4, beside="gemm")
    result = result_of(case, readings([(0.0, 5.0, 3.0, 2.0), (NAN, NAN)], [(0.0, 6.0, 4.0, 2.0), (0.0, 7.0, 5.0, 2.0)]))
    assert result is not None
    assert (result["times_ns"], result["beside_ns"], result["beside_alone_ns"]) == ([7.0], 4.5, 2.0)
    assert result_of(case, readings([(0.0, 5.0), (NAN, NAN)])) is None


def test_only_kernels_wholly_beside_the_collective_are_averaged() -> None:
    assert mean_inside([0.0, 10.0, 21.0, 33.0, 50.0], begun=9.0, ended=40.0) == 11.5
    assert math.isnan(mean_inside([0.0, 10.0], begun=2.0, ended=40.0))


def test_every_repeat_keeps_what_the_sentinel_took_in_its_block() -> None:
    cases = [CollectiveCase("all_reduce", 4), CollectiveCase("broadcast", 8)]
    lap = LapReadings(cases, ranks=2, passes=3)
    for repeat, sentinel in enumerate((50.0, 60.0)):
        one = np.full((2, 2, 2, 4), NAN)  # (ranks, cases, own and sentinel, fields)
        one[:, :, :, 0] = 0.0
        one[:, 0, 0, 1], one[:, 1, 0, 1] = (1.0, 2.0), (3.0, 4.0 if repeat else NAN)
        one[:, :, 1, 1] = [[sentinel], [sentinel + 1]]
        lap.add(repeat, one)
    (_, first), (_, second) = lap.results()
    assert first is not None
    assert second is not None
    assert (first["times_ns"], first["reference_ns"]) == ([2.0, 2.0], [51.0, 61.0])
    assert (second["times_ns"], second["reference_ns"]) == ([4.0], [61.0])
    found = result_of(CollectiveCase("all_reduce", 4), lap.sentinels())
    assert found is not None
    assert found["times_ns"] == [51.0, 61.0]


JOB = """
from steptime._calibrate.collectives.sweep import sample


def work(group, session, plan):
    assert sample(group, session, "gloo", seconds=20, largest_bytes=2 << 20) == 8
"""


@pytest.mark.slow
def test_a_sample_adds_rows_of_the_same_kind_beside_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "more"
    package.mkdir()
    (package / "planted_sample.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *(entry for entry in sys.path if entry)]))
    session = Session.start(tmp_path / "out", a_recipe(), minutes=2)
    run_ranks("planted_sample", Layout(2, device="cpu"), session.to_plan(), limit_s=120)
    rows = rows_of(tmp_path / "out")
    sizes = (1 << 10, 64 << 10, 512 << 10, 2 << 20)
    asked = {(name, size) for name in ("all_reduce", "all_to_all") for size in sizes}
    assert {(row["collective"], row["bytes"]) for row in rows} == {*asked, ("all_reduce", 1 << 20)}
    # The last one is the sentinel itself.
    assert all(len(row["reference_ns"]) == len(row["times_ns"]) == 5 for row in rows if row["bytes"] != 1 << 20)
    assert {(row["mode"], row["fabric"]) for row in rows} == {("stream", "gloo")}
