from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from tests.slow import slow_unless

from steptime._build.dlrm.model import Dlrm
from steptime._calibrate.collectives.cases import fabric_of
from steptime._lookups.generators import Generator
from steptime._lookups.table import table_statistics
from steptime._measurements.recipe import spread_of
from steptime._measurements.store import key_of
from steptime._models.kernels.call import Call
from steptime._models.kernels.family import family_of, swept_families
from steptime_lab.measure.steps.timing import key_of_case
from steptime_lab.measure.tables import noise_lines, noises
from steptime_lab.measurements.kernels import rows_of
from steptime_lab.measurements.sets import SETS, measured_set
from steptime_lab.measurements.shipped import FOLDER, shipped
from steptime_lab.workloads.cases import step_cases
from steptime_lab.workloads.drawn_tasks import further_tasks, sharding_tasks

PAGE = Path(__file__).parents[2] / "docs" / "measuring.md"


# Measured by a script that kept less of the recipe (docs/compile.md).
NO_MACHINE = ("generated",)


@pytest.mark.parametrize("name", slow_unless(("collectives", "host", "sharding", "steps"), sorted(SETS)))
def test_every_shipped_row_is_whole(name: str) -> None:
    rows = shipped(name).to_pylist()
    assert rows
    for row in rows[:: max(1, len(rows) // 500)]:
        assert row["key"] == key_of(measured_set(name), row)
        assert row["time_ns"] == np.median(row["times_ns"])
        assert row["spread"] == pytest.approx(spread_of(row["times_ns"]), rel=1e-4, abs=1e-6)
        assert row["device"] == "NVIDIA H200"
        assert all(row[column] for column in ("run", "torch", "cuda", "date", "command"))
        assert name in NO_MACHINE or all(row[column] for column in ("machine", "driver", "nccl"))


def test_every_measured_time_is_positive() -> None:
    for name in set(SETS) - {"host"}:  # differences of host times may fall below zero
        assert min(shipped(name)["time_ns"].to_pylist()) > 0


def test_every_family_was_measured_cold_and_warm() -> None:
    table = shipped("kernels")
    seen = set(zip(table["family"].to_pylist(), table["cache"].to_pylist(), strict=True))
    # Products of eight bits and of groups are answered by kin until they are.
    assert {(name, cache) for name in swept_families() if name != "grouped_products" for cache in ("cold", "warm")} <= seen


def test_a_measured_call_can_be_read_back_and_belongs_to_its_family() -> None:
    rows = shipped("kernels").select(["call", "op", "family"]).to_pylist()
    for row in rows[::40]:
        call = Call.from_json(row["call"])
        assert call.to_json() == row["call"]
        assert call.op == row["op"]
        # Ops that no family had when they were measured are `other`; some have one by now.
        assert row["family"] in ("transfer", "other") or family_of(call.op) == row["family"]


def test_a_lookup_row_can_be_drawn_again_from_its_seed() -> None:
    rows = [row for row in shipped("lookups").slice(0, 400).to_pylist() if 0 < sum(row["lookups"]) < 200_000]
    assert rows
    for row in rows[:5]:
        for place, text in enumerate(row["generators"]):
            generator = Generator.from_dict(json.loads(text))
            bags = generator.bags(row["batch"])
            found = table_statistics(bags.indices, bags.offsets, generator.rows).counted
            assert found.lookups == row["lookups"][place]
            assert found.unique == row["unique"][place]
            assert list(found.reuse) == pytest.approx(row["reuse"][place], abs=1e-5)


def test_plans_of_a_sharding_task_were_timed_in_every_block() -> None:
    blocks: dict[tuple[str, str], set[int]] = {}
    for row in shipped("sharding").to_pylist():
        blocks.setdefault((row["task"], row["rule"]), set()).add(row["block"])
    assert {len(found) for found in blocks.values()} == {8}


@pytest.mark.slow
def test_the_noise_floor_in_the_docs_is_that_of_the_shipped_rows() -> None:
    found = re.search(r"<!-- noise -->\n(.*?)\n<!-- /noise -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, "scripts/accuracy_tables.py noise --docs puts it there"
    assert found[1].splitlines() == noise_lines(noises(FOLDER, parts=False))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_case_keeps_its_name_only_as_long_as_it_is_the_same_case(ranks: int) -> None:
    """Kernel times and traces know a case by its name: who changes what a case is has to rename it."""
    measured = {row["name"]: row["key"] for row in shipped("steps").select(["name", "key"]).to_pylist()}
    cases = {case.name: case for case in step_cases(ranks)}
    known = set(cases) & set(measured)
    assert known
    fabric = fabric_of(ranks, ranks, "cuda")
    changed = [name for name in sorted(known) if key_of_case(cases[name], ranks, fabric) != measured[name]]
    assert changed == []


def test_a_sharding_task_keeps_its_name_only_as_long_as_it_is_the_same_task() -> None:
    measured = {row["task"]: json.loads(row["config"]) for row in shipped("sharding").select(["task", "config"]).to_pylist()}
    tasks = {task.name: task for task in (*sharding_tasks(), *further_tasks())}
    assert set(measured) <= set(tasks)
    assert [name for name, config in measured.items() if Dlrm.from_dict(config) != tasks[name]] == []


def test_kernels_that_ran_side_by_side_have_their_shares_of_the_time_that_any_ran() -> None:
    table = shipped("kernels")
    grouped = table.filter(pc.less(table["busy_ns"], pc.multiply(table["time_ns"], 0.8))).slice(0, 50)
    assert grouped.num_rows
    for row, busy_ns in zip(rows_of(grouped), grouped["busy_ns"].to_pylist(), strict=True):
        assert row.time_ns == pytest.approx(busy_ns)
        assert len(row.kernel_ns) == len(row.kernel_names)
    alone = table.filter(pc.is_null(table["span_ns"])).slice(0, 50)
    assert [row.time_ns for row in rows_of(alone)] == alone["time_ns"].to_pylist()
