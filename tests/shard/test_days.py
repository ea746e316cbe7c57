"""Lookups of several days: what is read of them, and the plan that is best on all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.shard.additive import model_of

from steptime._api.shard import shard
from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import TABLE_WISE
from steptime._build.dlrm.workload import table_lookups
from steptime._cli.app import run
from steptime._lookups.workload import RankLookups, StepLookups, WorkloadLookups
from steptime._platforms.platform import Platform
from steptime._shard.days import MEAN, OBJECTIVES, ROBUST, WORST, day_models, search_days
from steptime._shard.search_state import SearchBudget
from steptime._shard.task import Task
from steptime.errors import InputError

PLATFORM = Platform.load("4xh200-quarter-loopback")
MODEL = model_of(6, batch=8192)
TASK = Task(MODEL, 4, Constraints(kinds=(TABLE_WISE,)))


def busier(model: Dlrm, busy: set[int], factor: float) -> Dlrm:
    """Some of its tables with so many times the lookups."""
    tables = [
        replace(table, generator=replace(table.generator, pooling=table.pooling_factor * factor)) if index in busy else table
        for index, table in enumerate(model.tables)
    ]
    return replace(model, tables=tuple(tables))


def lookups(model: Dlrm) -> WorkloadLookups:
    tables = [table_lookups(table, model.batch) for table in model.tables]
    half = len(tables) // 2
    ranks = {number: StepLookups((tuple(part),)) for number, part in enumerate((tables[:half], tables[half:])) if part}
    return WorkloadLookups({rank: RankLookups("table_batched", "sgd", steps) for rank, steps in ranks.items()})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("days")
    for day, busy in (("monday", {0, 1, 2}), ("tuesday", {3, 4, 5})):
        lookups(busier(MODEL, busy, 8.0)).save(folder / f"{day}.json")
    return [folder / "monday.json", folder / "tuesday.json"]


def test_a_day_has_the_tables_of_the_task_with_its_own_lookups(files: list[Path]) -> None:
    days = day_models(files, MODEL)
    assert list(days) == ["monday", "tuesday"]
    for index, table in enumerate(MODEL.tables):
        factors = [day.tables[index].pooling_factor / table.pooling_factor for day in days.values()]
        assert sorted(factors) == pytest.approx([1.0, 8.0], rel=0.02)
    assert table_lookups(days["monday"].tables[0], MODEL.batch).lookups == pytest.approx(
        8 * table_lookups(MODEL.tables[0], MODEL.batch).lookups, rel=0.02
    )


def test_the_middle_of_several_iterations_stands_for_a_day(tmp_path: Path) -> None:
    (table,) = model_of(1).tables
    counted = [replace(table_lookups(busier(model_of(1), {0}, by).tables[0], 512), table=table.name) for by in (1, 3, 2)]
    file = tmp_path / "day.json"
    file.write_text(json.dumps(StepLookups(tuple((each,) for each in counted)).to_dict()), encoding="utf-8")
    found = day_models([file], model_of(1))["day"].tables[0]
    assert found.statistics is not None
    assert found.statistics.lookups == counted[2].lookups


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_plan_is_better_by_the_objective_than_the_robust_one(files: list[Path], objective: str) -> None:
    found = search_days(TASK, PLATFORM, day_models(files, MODEL), objective, SearchBudget(1500))
    days = found.days
    *alone, robust = days.plans
    assert [plan.name for plan in days.plans] == ["monday", "tuesday", ROBUST]
    assert all(robust.objective_ns <= plan.objective_ns * (1 + 1e-9) for plan in alone)
    for plan in days.plans:
        by = max(plan.steps_ns) if objective == WORST else sum(plan.steps_ns) / 2
        assert plan.objective_ns == pytest.approx(by)
        assert all(loss >= 0 for loss in days.losses(plan))
    assert [days.losses(plan)[day] for day, plan in enumerate(alone)] == pytest.approx([0.0, 0.0], abs=0.01)
    assert found.searched.best.plan == robust.plan
    assert found.searched.best.step_ns == pytest.approx(robust.objective_ns)


def test_days_are_in_the_answer_the_text_and_the_page(files: list[Path], tmp_path: Path, capsys: Any) -> None:
    tables = tmp_path / "tables.csv"
    lines = [f"{table.name},{table.rows},{table.dim}" for table in MODEL.tables]
    tables.write_text("\n".join(("name,rows,dim", *lines)), encoding="utf-8")
    page = tmp_path / "page.html"
    arguments = ["shard", str(tables), "--platform", PLATFORM.name, "--batch", "8192", "--evaluations", "60"]
    arguments += ["--lookups", *map(str, files)]
    assert run([*arguments, "--objective", MEAN, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["days"]["objective"] == MEAN
    assert [plan["name"] for plan in answer["days"]["plans"]] == ["monday", "tuesday", ROBUST]
    assert answer["days"]["plans"][-1]["plan"] == answer["best"]["plan"]
    assert not any("without a pooling factor" in warning for warning in answer["warnings"])
    assert run([*arguments, "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("Days", "best of monday", ROBUST, WORST))
    assert "best of tuesday" in page.read_text(encoding="utf-8")


def test_lookups_that_do_not_fit_the_task_are_one_line(files: list[Path], tmp_path: Path) -> None:
    more, other = model_of(7, batch=8192), replace(MODEL, tables=(replace_rows(MODEL), *MODEL.tables[1:]))
    copied = tmp_path / "twice.json"
    whole = lookups(MODEL)
    WorkloadLookups({0: whole.ranks[0], 1: whole.ranks[1], 2: whole.ranks[0]}).save(copied)
    for model, paths, message in (
        (more, files, "no statistics of table"),
        (other, files, "expected the same"),
        (MODEL, [files[0], files[0]], "is given twice"),
        (MODEL, [copied], "is there on several ranks"),
    ):
        with pytest.raises(InputError, match=message) as raised:
            day_models(paths, model)
        assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match="objective is 'best'; expected worst or mean"):
        shard(TASK, PLATFORM, lookups=files, objective="best")


def replace_rows(model: Dlrm) -> Any:
    table = model.tables[0]
    return replace(table, generator=replace(table.generator, rows=table.rows + 1))
