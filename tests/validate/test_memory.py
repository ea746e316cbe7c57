"""Laws of comparing memory, and how close shipped steps come."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from steptime.build.dlrm import Dlrm, Table
from steptime.graph.memory.peak import PeakMemory
from steptime.lookups.generators import Generator
from steptime.validate.memory import RankMemory, rank_memories, unnamed_bytes, validate_memory, validation_of


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
        ("embedding_bag", "sgd", 0, []),
        ("table_batched", "sgd", 0, [4 * 8 * 400]),
        ("table_batched", "rowwise_adagrad", 1, [4 * 8 * 200, 4 * 200]),
        ("table_batched", "sgd", 2, []),
    ],
)
def test_tables_that_no_op_names_come_from_the_plan(lookup: str, optimizer: str, rank: int, nbytes: list[int]) -> None:
    assert unnamed_bytes(row(lookup, optimizer), rank) == nbytes


def test_tables_of_one_rank_need_no_plan() -> None:
    assert unnamed_bytes({**row("table_batched", "sgd"), "plan": None}, 0) == [4 * 8 * 600]
    assert unnamed_bytes({"workload": "bert"}, 0) == []


def rank(name: str, ranks: int, steady: int, first: int, measured: int) -> RankMemory:
    peak = PeakMemory(first, steady, first, 0, 0, first - steady, 0, 0, 0)
    return RankMemory(name, "bert", ranks, peak, measured, measured, measured, measured)


def test_parts_are_workloads_by_ranks_and_an_interval_holds_what_lies_between() -> None:
    found = [rank("a", 1, 100, 100, 101), rank("b", 2, 100, 120, 110), rank("c", 2, 100, 120, 130)]
    checked = validation_of(found)
    assert list(checked.parts) == [
        "bert, 1 rank", "bert, 2 ranks", "all, reserved", "bert, 1 rank, reserved", "bert, 2 ranks, reserved"
    ]  # fmt: skip
    assert [case.covered for case in checked.cases] == [True, True, False]
    assert checked.facts["allocated_within_5_percent"] == pytest.approx(1 / 3)
    assert checked.facts["reserved_within_10_percent"] == 1.0


def test_the_first_case_of_a_process_is_a_part_of_its_own() -> None:
    used, fresh = rank("a", 2, 100, 100, 150), rank("b", 2, 100, 100, 150)
    checked = validation_of([used, replace(fresh, fresh=(100, 100))])
    assert checked.parts["bert, 2 ranks"].summary.rows == 2
    assert checked.parts["dlrm, first case of its process"].summary.rows == 1
    assert checked.parts["dlrm, first case of its process"].summary.max == 0.0


def test_shipped_steps_on_one_rank_come_within_the_bars() -> None:
    checked = validate_memory(["bert-b8-r1", "resnet50-b16-r1"])
    assert len(checked.cases) == 2
    assert checked.whole.summary.max < 0.05
    assert checked.parts["all, reserved"].summary.max < 0.10


def test_every_rank_of_a_sharded_case_has_its_own_memory() -> None:
    found = rank_memories(["dlrm-t05-b2048-r4"])
    assert [each.name for each in found] == [f"dlrm-t05-b2048-r4 rank {number}" for number in range(4)]
    assert all(abs(each.steady_case.error) < 0.03 for each in found)
    # Tables are sharded, and the plan is not even: what differs between ranks is what differs in the measurement.
    most, least = max(found, key=lambda each: each.allocated), min(found, key=lambda each: each.allocated)
    predicted = most.peak.steady_allocated - least.peak.steady_allocated
    assert predicted == pytest.approx(most.allocated - least.allocated, rel=0.01)
