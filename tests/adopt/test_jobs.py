from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.measurements.test_store import a_recipe

from steptime._calibrate.harness.command import Options
from steptime._calibrate.harness.session import Session
from steptime.errors import InputError
from steptime_lab.adopt import jobs
from steptime_lab.adopt.jobs import FILE, Share, Spent, measure, shares


def test_the_shares_are_all_of_the_time_and_one_gpu_has_no_collectives() -> None:
    one, several = shares(10.0, 1), shares(10.0, 2)
    assert sum(share.seconds for share in one) == pytest.approx(600)
    assert sum(share.seconds for share in several) == pytest.approx(600)
    assert {share.job for share in several} - {share.job for share in one} == {"collectives"}
    assert max(one, key=lambda share: share.seconds).job == "kernels"


def test_power_and_host_are_measured_where_there_is_time_for_them() -> None:
    assert {"power", "host"} <= {share.job for share in shares(10.0, 1)}
    short = shares(2.0, 1)
    assert {share.job for share in short} == {"kernels", "lookups", "calibrate"}
    assert sum(share.seconds for share in short) == pytest.approx(120)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """Jobs that ran and the seconds they were given; one called `cut` is interrupted."""
    result: list[tuple[str, float]] = []

    def job(name: str) -> Any:
        def run(session: Session, _: Options) -> None:
            result.append((name, session.budget.left_s()))
            if name == "cut":
                raise KeyboardInterrupt

        return SimpleNamespace(load=lambda: SimpleNamespace(run=run))

    monkeypatch.setattr(jobs, "JOBS", {name: job(name) for name in ("kernels", "cut", "host")})
    return result


def test_a_run_that_was_cut_off_goes_on_with_what_is_left_of_every_share(tmp_path: Path, ran: list[tuple[str, float]]) -> None:
    session = Session.start(tmp_path, a_recipe(), 1.0)
    asked = [Share("kernels", 30.0), Share("cut", 20.0), Share("host", 25.0)]
    with pytest.raises(KeyboardInterrupt):
        measure(session, Options(), asked, Spent.read(tmp_path))
    assert [name for name, _ in ran] == ["kernels", "cut"]
    spent = Spent.read(tmp_path)
    assert set(spent.seconds) == {"kernels", "cut"}
    spent.seconds["kernels"] = 29.0
    measure(session, Options(), [Share("kernels", 30.0), Share("host", 25.0)], spent)
    assert [name for name, _ in ran] == ["kernels", "cut", "host"]
    assert ran[-1][1] == pytest.approx(25.0, abs=1.0)
    # More time is asked for: what a job had counts.
    measure(session, Options(), [Share("kernels", 60.0)], Spent(tmp_path / FILE, {"kernels": 29.0}))
    assert ran[-1][0] == "kernels"
    assert ran[-1][1] == pytest.approx(31.0, abs=1.0)


def test_damaged_progress_is_one_line(tmp_path: Path) -> None:
    file, dice = tmp_path / FILE, random.Random(1)
    text = json.dumps({"schema_version": 1, "seconds": {"kernels": 12.5, "host": 3}})
    for _ in range(500):
        place, planted = dice.randrange(len(text)), dice.choice(["", "x", '"', "}", "null", "[]"])
        file.write_text(text[:place] + planted + text[place + 1 :], encoding="utf-8")
        try:
            assert all(value >= 0 for value in Spent.read(tmp_path).seconds.values())
        except InputError as error:
            assert "\n" not in str(error)
    file.write_text('{"schema_version": 1, "seconds": []}', encoding="utf-8")
    with pytest.raises(InputError, match="remove it to measure every share anew"):
        Spent.read(tmp_path)
