"""`steptime predict --lookups`: one more section and one more key, nothing changed without it, one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.platforms.counting_lookups import counting_device
from tests.sim.test_lookup_scenarios import drawn

from steptime._cli.app import run
from steptime._hardware.device import FOLDER
from steptime._lookups.generators import Generator
from steptime._lookups.workload import RankLookups, WorkloadLookups, drawn_steps
from steptime._models.lookups.fitted import lookups_file
from steptime._platforms.device import Device

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "dlrm_overlap4"
ITERATION_KEYS = {
    "count", "mean_ms", "std_ms", "p10_ms", "p50_ms", "p90_ms", "min_ms", "max_ms", "per_iteration_ms", "slowest",
    "slowest_by_rank_ms",
}  # fmt: skip

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def lookups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations of the example's tables, at a smaller batch."""
    generators = [Generator(200_000, 20, "geometric", seed=place) for place in range(5)]
    ranks = {
        rank: RankLookups("embedding_bag_dense", "sgd", drawn_steps(generators[:tables], [64] * tables, 256, 4))
        for rank, tables in enumerate((5, 2, 3, 2))
    }
    file = tmp_path_factory.mktemp("lookups") / "lookups.json.gz"
    WorkloadLookups(ranks).save(file)
    return file


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices that were asked for; each has models that count."""
    names: list[str] = []

    def load(name: str) -> Device:
        names.append(name)
        return counting_device(name)

    monkeypatch.setattr(Device, "load", load)
    return names


def answer(arguments: list[str], capsys: Captured) -> str:
    assert run(["predict", str(EXAMPLE), *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_json_has_the_distribution_and_all_else_as_before(lookups: Path, asked: list[str], capsys: Captured) -> None:
    with_lookups = json.loads(answer(["--json", "--lookups", str(lookups)], capsys))
    assert asked == ["h200"]
    without = json.loads(answer(["--json"], capsys))
    found = with_lookups.pop("iterations")
    assert with_lookups == without
    assert set(found) == ITERATION_KEYS
    times = found["per_iteration_ms"]
    assert found["count"] == len(times) == 4
    assert found["min_ms"] == min(times) < found["p10_ms"] < found["p50_ms"] < found["p90_ms"] < max(times) == found["max_ms"]
    assert found["mean_ms"] == pytest.approx(np.mean(times), abs=1e-6)
    assert found["std_ms"] == pytest.approx(np.std(times), abs=1e-6)
    assert times[found["slowest"]] == found["max_ms"]
    assert sorted(found["slowest_by_rank_ms"]) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("columns", ["80", "100"])
def test_text_has_one_section_more(
    columns: str, lookups: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    found = answer(["--lookups", str(lookups), "--device", "h200-quarter"], capsys).splitlines()
    assert asked == ["h200-quarter"]
    without = answer([], capsys).splitlines()
    assert max(map(len, found)) <= int(columns)
    begin = next(place for place, line in enumerate(found) if line.startswith("  Iterations"))
    end = next(place for place, line in enumerate(found) if line.startswith("  Ranks"))
    assert [*found[: begin - 1], *found[end - 1 :]] == without
    section = " ".join(" ".join(found[begin:end]).split())
    assert "the recorded step stands for the mean iteration" in section
    assert "with the lookups of 4 iterations" in section
    assert "longer than the recorded step; with the lookups of rank 0 alone" in section


def test_lookups_that_are_hidden_are_said_to_be(lookups: Path, asked: list[str], capsys: Captured, tmp_path: Path) -> None:
    one = WorkloadLookups.load(lookups).ranks[3]  # rank 0 has more tables: the others wait for it
    WorkloadLookups({3: one}).save(tmp_path / "hidden.json")
    out = answer(["--lookups", str(tmp_path / "hidden.json")], capsys)
    assert asked
    assert "hidden behind other work" in out
    assert "Slowest" not in out


def test_what_is_wrong_is_one_line(lookups: Path, tmp_path: Path, capsys: Captured) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"schema_version": 1, "ranks": [{"rank": 0}]}', encoding="utf-8")
    bad = {
        "broken.json, ranks[0]: 'dtype' is missing": ["--lookups", str(broken)],
        "nowhere.json: cannot be read": ["--lookups", str(tmp_path / "nowhere.json")],
        "no device 'h1000'": ["--lookups", str(lookups), "--device", "h1000"],
        "give --platform NAME too, or --lookups FILE": ["--device", "h200"],
    }
    for said, arguments in bad.items():
        assert run(["predict", str(EXAMPLE), *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
        assert err.count("\n") == 1


@pytest.mark.skipif(not lookups_file(FOLDER, "h200").is_file(), reason="the package has no fitted lookup models of an H200")
def test_the_shipped_models_answer_for_the_example(tmp_path: Path, capsys: Captured) -> None:
    drawn().save(tmp_path / "lookups.json")
    arguments = ["--lookups", str(tmp_path / "lookups.json"), "--device", "h200-quarter", "--profiled", "--json"]
    assert run(["predict", str(EXAMPLES / "h200_mps4_dlrm"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not any("beyond what was measured" in warning for warning in found["warnings"])
    # The profiled host is what this step waits for: other rows do not change it.
    assert found["iterations"]["per_iteration_ms"] == pytest.approx([found["step_time_ms"]] * 3)
