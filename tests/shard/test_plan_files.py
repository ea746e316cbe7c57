"""Plans from files: what `steptime shard` writes is what `predict --plan`, a config's `plan` and `shard --evaluate` read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steptime._build.config_values import Overrides
from steptime._build.dlrm.plan import Plan
from steptime._build.dlrm.plan_files import read_plans, torchrec_document
from steptime._build.dlrm.workload import dlrm_workload
from steptime._platforms.platform import Platform
from steptime._shard.configs import configured_in
from steptime._shard.given_plans import evaluated, plans_in
from steptime._shard.task import read_task
from steptime._sim.modelled.prediction import predict_on
from steptime.errors import InputError

CONFIG = """
batch = 256
dense_features = 8
bottom = [16]
top = [16, 1]
interaction = "cat"
tables = [
  { name = "user", rows = 1000, dim = 32, pooling_factor = 3.5, skew = { kind = "zipf" } },
  { name = "item", rows = 2000, dim = 16, pooling_factor = 20, skew = { kind = "uniform" } },
]
[constraints]
pinned = { item = 1 }
"""
PLANS: dict[str, dict[str, Any]] = {
    "whole": {"user": 0, "item": 1},
    "sliced": {"user": [0, 1], "item": 1},
    "row-wise": {"user": {"kind": "row_wise", "ranks": [0, 1]}, "item": 1},
    "copied": {"user": {"kind": "data_parallel", "ranks": [0, 1]}, "item": 1},
}


def written(tmp_path: Path, name: str, values: Any) -> Path:
    path = tmp_path / name
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return path


def forms(plan: Plan) -> dict[str, Any]:
    """A plan in every form in which it may stand in a file."""
    option = {"plan": plan.to_dict(), "kinds": plan.kinds(), "step_time_ms": 1.0}
    tables = read_tables(plan)
    return {
        "alone": plan.owners(),
        "named": {"mine": plan.owners()},
        "listed": [plan.owners()],
        "searched": {"schema_version": 1, "best": option, "alternatives": [option], "warnings": []},
        "evaluated": {"schema_version": 1, "plans": [{"name": "mine", **option}]},
        "torchrec": torchrec_document(plan, tables),
    }


def read_tables(plan: Plan) -> tuple[Any, ...]:
    from steptime._build.dlrm.model import Table
    from steptime._lookups.generators import Generator

    sizes = {"user": (1000, 32), "item": (2000, 16)}
    return tuple(Table(name, sizes[name][1], Generator(rows=sizes[name][0], pooling=1.0)) for name in plan.placements)


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_is_read_in_every_form_in_which_it_is_written(tmp_path: Path, kind: str) -> None:
    config = written(tmp_path, "task.toml", CONFIG)
    task = read_task(config, Overrides(platform_ranks=2))
    plan = Plan.from_dict(PLANS[kind], task.tables, 2)
    direct = configured_in(config, ranks=2, plan=written(tmp_path, "direct.json", PLANS[kind]))
    assert direct.meta["plan"] == PLANS[kind]
    for form, values in forms(plan).items():
        file = written(tmp_path, f"{form}.json", values)
        assert all(found == plan for found in plans_in(file, task).values())
        assert configured_in(config, plan=file, platform_ranks=2).meta == direct.meta
    own = written(tmp_path, "own.toml", 'ranks = 2\nplan = "torchrec.json"\n' + CONFIG)
    assert configured_in(own).meta["plan"] == PLANS[kind]


def test_a_plan_that_moves_a_pinned_table_is_not_evaluated(tmp_path: Path) -> None:
    task = read_task(written(tmp_path, "task.toml", CONFIG), Overrides(platform_ranks=2))
    with pytest.raises(InputError, match=r"table 'item' is on ranks \[0\] and pinned to 1"):
        plans_in(written(tmp_path, "plan.json", {"user": 0, "item": 0}), task)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("3", "int found; expected table and ranks"),
        ("[]", "no plan in it"),
        ('{"a": 1, "b": {"c": 2}}', "plan 'a' is '1'"),
        ('{"plan": {"": {"t": {"sharding_type": "by_moon", "ranks": [0]}}}, "torchrec": ""}', "sharding_type 'by_moon'"),
        ("[" + "9" * 5000 + "]", "cannot be read as JSON"),
    ],
)
def test_a_file_that_holds_no_plan_is_one_line(tmp_path: Path, values: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        read_plans(written(tmp_path, "plan.json", values))
    assert "\n" not in str(raised.value)


def test_a_batch_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="batch is 0; expected 1 or more"):
        configured_in(written(tmp_path, "task.toml", CONFIG), batch=0)


def test_a_task_without_ranks_takes_those_of_the_platform_and_keeps_its_pins(tmp_path: Path) -> None:
    found = configured_in(written(tmp_path, "task.toml", CONFIG), platform_ranks=2)
    assert found.world_size == 2
    assert found.meta["plan"]["item"] == 1


def test_shard_and_predict_say_the_same_of_a_plan_with_rows_on_every_rank(tmp_path: Path) -> None:
    task = read_task(written(tmp_path, "task.toml", CONFIG), Overrides(platform_ranks=2))
    platform = Platform.load("2xh200-half-loopback")
    plans = plans_in(written(tmp_path, "plan.json", {name: PLANS[name] for name in ("row-wise", "copied")}), task)
    for found in evaluated(task, platform, plans):
        step_ms = predict_on(dlrm_workload(task.model, 2, found.plan), platform).step_time_ms
        assert found.step_ns / 1e6 == pytest.approx(step_ms, rel=0.005)
