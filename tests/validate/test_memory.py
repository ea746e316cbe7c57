"""Laws of comparing memory, and how close shipped steps come."""

from __future__ import annotations

import json
from typing import Any

import pytest

from steptime._build.dlrm.model import Dlrm, Table
from steptime._lookups.generators import Generator
from steptime._models.memory.peak import PeakMemory
from steptime_lab.measurements.shipped import shipped
from steptime_lab.validate.memory import (
    Measured,
    RankMemory,
    measured_alone,
    rank_memories,
    unnamed_bytes,
    validate_memory,
    validation_of,
)


def row(lookup: str, optimizer: str) -> dict[str, Any]:
    tables = tuple(
        Table(f"t{number}", 8, Generator(rows=100 * (number + 1), pooling=2.0, kind="zipf", seed=number)) for number in range(3)
    )
    model = Dlrm("small", 8, 13, (16, 8), (16, 1), tables, lookup=lookup, interaction="dot", optimizer=optimizer)
    plan = {"t0": 0, "t1": 1, "t2": 0}
    return {"workload": "dlrm", "config": json.dumps(model.to_dict()), "plan": json.dumps(plan)}


@pytest.mark.parametrize(
    ("lookup", "optimizer", "rank", "nbytes"),
    [
        ("embedding_bag", "sgd", 0, (0, 0)),
        ("table_batched", "sgd", 0, (4 * 8 * 400, 0)),
        ("table_batched", "rowwise_adagrad", 1, (4 * 8 * 200, 4 * 200)),
        ("table_batched", "sgd", 2, (0, 0)),
    ],
)
def test_tables_that_no_op_names_come_from_the_plan(lookup: str, optimizer: str, rank: int, nbytes: tuple[int, int]) -> None:
    assert unnamed_bytes(row(lookup, optimizer), rank) == nbytes


def test_tables_of_one_rank_need_no_plan() -> None:
    assert unnamed_bytes({**row("table_batched", "sgd"), "plan": None}, 0) == (4 * 8 * 600, 0)
    assert unnamed_bytes({"workload": "bert"}, 0) == (0, 0)


def alone(name: str, left: int, reserved: int | None = 200, share: int = 2) -> dict[str, Any]:
    return {
        "name": name, "rank": 0, "ranks": 2, "share": share, "allocated_bytes": 100 + left, "reserved_bytes": reserved,
        "left_bytes": left,
    }  # fmt: skip


def test_of_several_measurements_the_one_before_which_least_was_left_counts() -> None:
    found = measured_alone([alone("a", 5), alone("a", 0), alone("a", 3), alone("b", 7, None), alone("c", 0, share=1)])
    assert found == {("a", 0): Measured(100, 200, alone=True), ("b", 0): Measured(107, None, alone=True)}


def rank(name: str, ranks: int, steady: int, first: int, measured: int, *, reserved: bool = True) -> RankMemory:
    peak = PeakMemory(first, steady, first, steady, {})
    return RankMemory(name, "bert", ranks, peak, Measured(measured, measured if reserved else None, alone=True))


def test_parts_are_workloads_by_ranks_and_an_interval_holds_what_lies_between() -> None:
    found = [rank("a", 1, 100, 100, 101), rank("b", 2, 100, 120, 110), rank("c", 2, 100, 120, 130)]
    checked = validation_of(found)
    assert list(checked.groups) == [
        "bert, 1 rank", "bert, 2 ranks", "all, reserved", "bert, 1 rank, reserved", "bert, 2 ranks, reserved"
    ]  # fmt: skip
    assert [case.covered for case in checked.cases] == [True, True, False]
    assert checked.facts["allocated_within_5_percent"] == pytest.approx(1 / 3)
    assert checked.facts["reserved_within_10_percent"] == 1.0


def test_reserved_memory_that_is_not_known_is_no_case() -> None:
    checked = validation_of([rank("a", 2, 100, 100, 100), rank("b", 4, 100, 100, 100, reserved=False)])
    assert checked.groups["all, reserved"].summary.rows == 1
    assert "bert, 4 ranks, reserved" not in checked.groups


def test_shipped_steps_on_one_rank_come_within_the_bars() -> None:
    checked = validate_memory(["bert-b8-r1", "resnet50-b16-r1", "dlrm-ddp-bags-b2048-r1"])
    assert len(checked.cases) == 3
    assert checked.whole.summary.max < 0.02
    assert checked.groups["all, reserved"].summary.max < 0.10


def test_every_rank_of_a_sharded_case_has_its_own_memory() -> None:
    found = rank_memories(["dlrm-t00-b2048-r4"])
    assert [each.name for each in found] == [f"dlrm-t00-b2048-r4 rank {number}" for number in range(4)]
    assert all(each.measured.alone for each in found)
    assert all(abs(each.allocated_case.error) < 0.02 for each in found)
    assert all(each.reserved_cases is not None and abs(each.reserved_cases[0].error) < 0.02 for each in found)
    # Tables are sharded, and the plan is not even: what differs between ranks is what differs in the measurement.
    most, least = max(found, key=lambda each: each.measured.allocated), min(found, key=lambda each: each.measured.allocated)
    predicted = most.peak.allocated - least.peak.allocated
    assert predicted == pytest.approx(most.measured.allocated - least.measured.allocated, rel=0.02)


def test_a_case_measures_the_same_in_a_new_process_and_where_everything_was_let_go_of_before() -> None:
    by_rank: dict[tuple[str, int, int], list[int]] = {}
    for each in shipped("memory").to_pylist():
        by_rank.setdefault((each["name"], each["rank"], each["share"]), []).append(each["allocated_bytes"])
    repeated = [found for found in by_rank.values() if len(found) > 1]
    assert len(repeated) >= 20
    assert all(max(found) / min(found) < 1.015 for found in repeated)
