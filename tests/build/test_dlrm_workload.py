"""A DLRM as a workload: who runs what, who looks up what, and what changes when one thing does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.workload import dlrm_workload
from steptime._lookups.estimated import expected_statistics
from steptime._lookups.generators import Generator
from steptime._program.program import Program, Tensor
from steptime.errors import InputError
from steptime_lab.measurements.shipped import program_of, shipped, shipped_programs


def model(lookup: str = "table_batched", *, rows: tuple[int, ...] = (1000,) * 4) -> Dlrm:
    tables = tuple(
        Table(f"t{place}", 8, Generator(rows=count, pooling=2.0, kind="zipf", seed=place)) for place, count in enumerate(rows)
    )
    return Dlrm("small", 64, 4, (16, 8), (16, 1), tables, lookup=lookup)


def test_ranks_that_do_the_same_share_a_program() -> None:
    found = dlrm_workload(model(), 4)
    assert found.ranks == (0,)
    assert found.owners == (0, 0, 0, 0)
    assert found.groups == {"0": ((0, 1, 2, 3),)}


@pytest.mark.parametrize(("lookup", "distinct"), [("table_batched", 2), ("embedding_bag", 2)])
def test_ranks_that_differ_have_their_own_program(lookup: str, distinct: int) -> None:
    # A table-batched lookup's ops do not tell the rows of its tables; what is looked up and held does.
    found = dlrm_workload(model(lookup, rows=(1000, 1000, 1000, 2000)), 2, {"t0": 0, "t1": 0, "t2": 1, "t3": 1})
    assert len(found.programs) == distinct
    assert found.world_size == 2


def test_every_rank_looks_up_its_own_tables() -> None:
    found = dlrm_workload(model(), 2, {"t0": 0, "t1": 1, "t2": 1, "t3": 1})
    assert found.lookups is not None
    assert {rank: one.steps.tables for rank, one in found.lookups.ranks.items()} == {0: ("t0",), 1: ("t1", "t2", "t3")}
    assert found.unnamed[1].parameters == (3 * 4 * 1000 * 8,)


def test_a_rank_without_tables_looks_up_nothing() -> None:
    found = dlrm_workload(model(), 2, dict.fromkeys(("t0", "t1", "t2", "t3"), 1))
    assert found.lookups is not None
    assert set(found.lookups.ranks) == {1}
    assert set(found.unnamed) == {1}
    assert found.ranks == (0, 1)


def test_state_of_an_optimiser_counts_a_number_per_row() -> None:
    found = dlrm_workload(replace(model(), optimizer="rowwise_adagrad"))
    assert found.unnamed[0].optimizer_state == (4 * 4000,)


def test_a_missing_plan_is_said_where_it_matters() -> None:
    assert dlrm_workload(model(), 1).warnings == ()
    dealt = dlrm_workload(model(), 2)
    assert "dealt round" in dealt.warnings[0]
    assert dealt.meta["plan"] == {"t0": 0, "t1": 1, "t2": 0, "t3": 1}


def test_lookups_grow_with_the_batch_and_a_plan_is_kept() -> None:
    plan = {"t0": 0, "t1": 1, "t2": 1, "t3": 1}
    found = dlrm_workload(model(), 2, plan)
    larger = dlrm_workload(model().with_batch(128), 2, plan)
    assert found.lookups is not None
    assert larger.lookups is not None
    before, after = (one.lookups.ranks[0].steps.steps[0][0] for one in (found, larger) if one.lookups is not None)
    assert (after.batch, after.lookups) == (2 * before.batch, 2 * before.lookups)
    assert larger.meta["plan"] == plan
    assert larger.warnings == ()


def test_other_ranks_keep_the_global_batch_and_need_another_plan() -> None:
    found = dlrm_workload(model(), 2, {"t0": 0, "t1": 1, "t2": 1, "t3": 1})
    four = dlrm_workload(model(), 4)
    assert (four.world_size, four.description.batch) == (4, found.description.batch)
    assert "dealt round" in four.warnings[0]
    assert dlrm_workload(model(), 4, {"t0": 3, "t1": 2, "t2": 1, "t3": 0}).warnings == ()


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_batch_that_ranks_do_not_divide_is_refused(ranks: int) -> None:
    with pytest.raises(InputError, match="cannot be split evenly"):
        dlrm_workload(model(), ranks)


def test_counted_statistics_of_another_batch_are_scaled_and_that_is_said() -> None:
    counted = expected_statistics(Generator(rows=1000, pooling=2.0, kind="zipf"), 64, 8)
    plain = model()
    tables = tuple(replace(table, statistics=counted) for table in plain.tables)
    same = dlrm_workload(replace(plain, tables=tables))
    assert same.warnings == ()
    assert same.lookups is not None
    assert same.lookups.ranks[0].steps.steps[0][1] == replace(counted, table="t1")
    other = dlrm_workload(replace(plain, tables=tables, batch=32))
    assert other.lookups is not None
    assert "4 tables (first: t0, counted over a batch of 64) are scaled to a batch of 32" in other.warnings[0]
    assert other.lookups.ranks[0].steps.steps[0][0].lookups == 64


def lookups_of(program: Program) -> int:
    """Indices of all tables of a program, from the ops that look up."""
    total = 0
    for name, signature in zip(program.ops.name.tolist(), program.ops.signature.tolist(), strict=True):
        if program.names[name] in ("TableBatchedLookupFunction", "aten::embedding_bag"):
            indices = program.signatures[signature].inputs[1]
            assert isinstance(indices, Tensor)
            total += indices.numel
    return total


@pytest.mark.parametrize("name", ["dlrm-t03-b4096-r2", "dlrm-mlperf-b2048-r4", "dlrm-open-source-b2048-r4"])
def test_sizes_that_depend_on_what_was_drawn_are_near_those_recorded(name: str) -> None:
    rows = shipped("steps").select(["name", "config", "batch", "ranks", "plan"]).to_pylist()
    row = next(row for row in rows if row["name"] == name)
    built = dlrm_workload(
        Dlrm.from_dict(json.loads(row["config"])).with_batch(row["batch"]), row["ranks"], json.loads(row["plan"])
    )
    case = shipped_programs(name)
    owners = built.owners or tuple(range(row["ranks"]))
    programs = {program.rank: program for program in built.programs}
    for rank in range(row["ranks"]):
        recorded, found = program_of(case, case.owners[rank]), programs[owners[rank]]
        assert len(found.ops) == pytest.approx(len(recorded.ops), abs=6)  # levels of sums depend on the lookups
        assert lookups_of(found) == pytest.approx(lookups_of(recorded), rel=0.03)
