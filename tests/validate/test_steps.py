"""Laws of validating steps: regimes, medians over visits, baselines, bars; and the sample of shipped steps keeps its bars."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.step_sample import sample_names, sample_of

from steptime._cli.app import run
from steptime._platforms.calibration import Calibration
from steptime.errors import InputError
from steptime_lab.validate.engine import SAMPLE, SHIPPED_BARS, bars_left, read_bars
from steptime_lab.validate.steps.cases import GPU_BOUND, HOST_BOUND, MIXED, WIRE_BOUND, StepCase, Visit
from steptime_lab.validate.steps.predict import (
    HOST_ALONE,
    KERNEL_SUM,
    STREAM_MAX,
    CaseOutcome,
    RankOutcome,
    Split,
    VisitOutcome,
)
from steptime_lab.validate.steps.steps import BY_VISIT, StepValidation, between_visits, imbalance, validate_steps, validation_of

STEP_NS = 10_000_000


def profile(compute_ns: float, wire_ns: float = 0.0, rank: int = 0) -> dict[str, Any]:
    names = ["gemm", *(["ncclDevKernel_AllReduce"] if wire_ns else [])]
    times = [[int(compute_ns)] * 2, *([[int(wire_ns)] * 2] if wire_ns else [])]
    return {"name": "one", "rank": rank, "op": ["aten::mm"] * len(names), "kernel": names, "kernel_ns": times,
            "start_ns": [0, int(compute_ns)][: len(names)], "host_ns": [STEP_NS], "machine": "a"}  # fmt: skip


def visit(measured_ns: float = STEP_NS, process: str = "run p1", machine: str = "a", spread: float = 0.01) -> Visit:
    times = tuple(measured_ns * factor for factor in (0.99, 1.0, 1.01))
    return Visit(process, machine, measured_ns, times, spread, Calibration())


def case(*rows: dict[str, Any], visits: tuple[Visit, ...] = ()) -> StepCase:
    return StepCase("one", "dlrm", len(rows), "{}", "{}", 64, visits or (visit(),), rows, Calibration())


def outcome(name: str = "one", *errors: float, **more: Any) -> CaseOutcome:
    visits = tuple(
        VisitOutcome(
            visit(process=f"run p{place}"),
            STEP_NS * (1 + error),
            (0.9 * STEP_NS, 1.1 * STEP_NS),
            {KERNEL_SUM: STEP_NS / 2, STREAM_MAX: STEP_NS / 4, HOST_ALONE: STEP_NS / 8},
        )
        for place, error in enumerate(errors)
    )
    given = {"workload": "dlrm", "ranks": 2, "regime": MIXED, "fallback": 0.0}
    ranks = (RankOutcome(1e6, 1e6, 1e6, 1e6), RankOutcome(2e6, 0.0, 2e6, 0.0))
    return CaseOutcome(**{"name": name, "visits": visits, "by_rank": ranks, **given, **more})


@pytest.mark.parametrize(
    ("rows", "regime"),
    [
        ((profile(0.95 * STEP_NS),), GPU_BOUND),
        ((profile(0.94 * STEP_NS),), MIXED),
        ((profile(0.59 * STEP_NS),), HOST_BOUND),
        ((profile(0.5 * STEP_NS, 0.41 * STEP_NS), profile(0.5 * STEP_NS, 0.45 * STEP_NS, 1)), WIRE_BOUND),
        ((profile(0.5 * STEP_NS, 0.39 * STEP_NS), profile(0.5 * STEP_NS, 0.45 * STEP_NS, 1)), HOST_BOUND),
    ],
)
def test_a_regime_is_what_the_profile_shows_most_of_and_the_rank_that_waits_least_tells_of_the_wire(
    rows: tuple[dict[str, Any], ...], regime: str
) -> None:
    assert case(*rows).regime == regime


def test_a_case_is_the_median_of_its_visits() -> None:
    found = case(profile(1.0), visits=(visit(8.0), visit(9.0), visit(30.0)))
    assert found.measured_ns == 9.0
    several = outcome("one", 0.0, 0.1, 0.9)
    assert several.predicted_ns == pytest.approx(1.1 * several.measured_ns)


def test_parts_are_told_by_case_and_by_visit_with_the_baselines_beside() -> None:
    found = validation_of([outcome("one", 0.1, 0.2, 0.3), outcome("two", -0.05)])
    assert [one.name for one in found.cases] == ["one", "two"]
    assert found.whole.summary.rows == found.groups["DLRM 2 and 4 ranks"].summary.rows == 2
    assert found.groups[BY_VISIT].summary.rows == 4
    assert found.whole.summary.mape == pytest.approx(0.125)
    assert found.whole.summary.interval_coverage == 1.0  # the interval holds the measured step, however wrong its middle
    assert found.whole.baselines[KERNEL_SUM].mape == pytest.approx(0.5)
    assert set(found.whole.baselines) == {KERNEL_SUM, STREAM_MAX, HOST_ALONE}


def test_cases_whose_repeats_disagree_are_no_part_of_the_steady_ones() -> None:
    wild = outcome("wild", 0.4)
    wild = replace(wild, visits=tuple(replace(one, visit=replace(one.visit, spread=0.06)) for one in wild.visits))
    found = validation_of([outcome("calm", 0.01), wild])
    assert found.groups["DLRM 2 and 4 ranks steady"].summary.max == pytest.approx(0.01)
    assert found.groups["DLRM 2 and 4 ranks"].summary.max == pytest.approx(0.4)


def test_the_noise_between_visits_counts_both_ways_and_never_a_visit_against_itself() -> None:
    one = outcome("one", 0.0, 0.0)
    first, second = (
        replace(each, visit=replace(each.visit, measured_ns=time)) for each, time in zip(one.visits, (10.0, 20.0), strict=True)
    )
    found = between_visits([replace(one, visits=(first, second)), outcome("two", 0.0)])
    assert sorted(found) == pytest.approx([-0.5, 1.0])
    elsewhere = replace(second, visit=replace(second.visit, machine="b"))
    assert between_visits([replace(one, visits=(first, elsewhere))], same_machine=True) == []


def test_ranks_that_compute_alike_are_balanced() -> None:
    assert imbalance([5.0, 5.0]) == 0.0
    assert imbalance([1.0, 3.0]) == pytest.approx(0.5)


def test_a_sample_has_some_of_every_workload_and_does_not_depend_on_the_order() -> None:
    names = [(f"dlrm-{place}", "dlrm", ranks) for place in range(20) for ranks in (2, 4)]
    assert sample_of(names) == sample_of(reversed(names))
    workloads = {name.split("-")[0] for name in sample_names()}
    assert workloads == {"dlrm", "bert", "gpt2", "xlnet", "resnet50", "inception"}
    assert {name.rsplit("-", 1)[1] for name in sample_names() if name.startswith("dlrm")} >= {"r2", "r4"}


def write(folder: Path, text: str) -> Path:
    file = folder / "bars.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_every_bar_that_is_not_kept_is_one_line(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'schema_version = 1\n[trace.all]\ngeomean = 0.05\nmax = 0.2\ncoverage = [0.5, 0.9]\n[trace."GPU-bound"]\nmax = 0.1\n',
    )
    left = bars_left(validation_of([outcome("one", 0.1), outcome("two", 0.1)]), read_bars(file, "trace"))
    assert [line.split(":")[0] for line in left] == ["all", "all", "GPU-bound"]
    assert "geomean is 10.04%, the bar is at most 5.0%" in left[0]
    assert "coverage is 100.00%, the bar is 50.0% to 90.0%" in left[1]
    assert "no case" in left[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("geomean = ", "not a readable file of bars"),
        ("schema_version = 9\n", "bars of version 9"),
        ("schema_version = 1\n", "no bars for 'trace'"),
        ("schema_version = 1\n[trace]\nall = 3\n", "expected a table of figures"),
        ("schema_version = 1\n[trace.all]\nmode = 0.1\n", "expected one of geomean"),
        ("schema_version = 1\n[trace.all]\ngeomean = true\n", "expected one of geomean"),
        ("schema_version = 1\n[trace.all]\ncoverage = 0.9\n", "coverage with two"),
    ],
)
def test_bars_that_cannot_be_read_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        read_bars(write(tmp_path, text), "trace")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["validate", "kernels", "--explain"], "are for steps"),
        (["validate", "steps", "--from", "memory"], "steps from 'memory'"),
        (["validate", "steps", "--models", "nowhere"], "no such folder"),
        (["validate", "steps", "--models", "tests"], "drop --models"),
        (["validate", "steps", "--bars", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_what_cannot_be_validated_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_command_fails_where_a_bar_is_not_kept_and_still_says_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    split = Split(0.1, 0.05, 0.02, 0.02, 0.01, 0.0)
    one = outcome("one", 0.1)
    one = replace(one, visits=(replace(one.visits[0], split=split),))
    monkeypatch.setattr(
        "steptime_lab.validate.steps.steps.validate_steps", lambda *_, **__: StepValidation(validation_of([one]), (one,))
    )
    file = write(tmp_path, "schema_version = 1\n[trace.all]\ngeomean = 0.05\n")
    assert run(["validate", "steps", "--bars", str(file), "--explain", "--json"]) == 1
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert "bar not kept: all: geomean" in told.err
    found = json.loads(told.out)
    assert found["explained"]["cases"][0]["device"] == 0.05
    assert found["explained"]["groups"]["dlrm 2 ranks"]["absolute_host"] == pytest.approx(0.02)
    assert run(["validate", "steps", "--explain"]) == 0
    assert "Whose error" in capsys.readouterr().out


@pytest.mark.slow
def test_a_sample_of_the_shipped_steps_keeps_its_bars() -> None:
    with ThreadPoolExecutor(1) as executor:
        found = validate_steps(names=sample_names(), executor=executor).validation
    assert bars_left(found, read_bars(SHIPPED_BARS, SAMPLE)) == []
    own, beside = found.whole.summary.gmae, [one.gmae for one in found.whole.baselines.values()]
    assert own < min(beside), "simulating is worth it"
    assert np.isfinite(list(found.facts.values())).all()
