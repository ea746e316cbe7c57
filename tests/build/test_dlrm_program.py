"""A built DLRM has the ops that PyTorch recorded of the same step: the shipped traces are the truth."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from tests.support.same_ops import same_device_ops, same_ops
from tests.support.waits import needed_by_nobody

from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import Plan
from steptime._build.dlrm.step import LocalTables, rank_program
from steptime._build.dlrm.tables import LocalTable
from steptime._lookups.generators import Generator
from steptime._models.kernels.from_ops import questions_of
from steptime._models.memory.peak import peak_memory
from steptime._ops.waits import tensor_waits
from steptime._program.program import Program, Signature, Tensor
from steptime_lab.measurements.shipped import (
    FILE_NAME,
    FOLDER,
    CasePrograms,
    program_of,
    read_programs,
    shipped,
    shipped_programs,
)

Row = dict[str, Any]


def all_cases() -> dict[str, Row]:
    """Every shipped case, by name."""
    rows = shipped("steps").select(["workload", "name", "config", "batch", "ranks", "plan"]).to_pylist()
    return {row["name"]: row for row in sorted(rows, key=lambda row: str(row["name"])) if row["workload"] == "dlrm"}


def one_of_each() -> list[str]:
    """The first shipped case of every lookup, optimiser, interaction, loss and number of ranks."""
    found: dict[tuple[object, ...], str] = {}
    for name, row in CASES.items():
        config = json.loads(row["config"])
        kind = tuple(config[key] for key in ("lookup", "optimizer", "interaction", "loss"))
        found.setdefault((*kind, row["ranks"]), name)
    return sorted(found.values())


CASES = all_cases()
CHOSEN = one_of_each()


def model_of(row: Row) -> tuple[Dlrm, tuple[tuple[Table, ...], ...]]:
    model = Dlrm.from_dict(json.loads(row["config"])).with_batch(row["batch"])
    plan = json.loads(row["plan"]) if row["plan"] else {table.name: 0 for table in model.tables}
    return model, Plan.from_dict(plan, model.tables, row["ranks"]).split(model.tables)


def signatures_of(program: Program, name: str) -> list[Signature]:
    rows = [row for row, number in enumerate(program.ops.name.tolist()) if program.names[number] == name]
    return [program.signatures[program.ops.signature[row]] for row in rows]


def size(value: object) -> int:
    assert isinstance(value, Tensor)
    return value.numel


def as_drawn(recorded: Program, model: Dlrm, tables: Sequence[Table]) -> tuple[LocalTable, ...]:
    """The tables with the numbers of lookups that the recorded iteration drew: those alone cannot be known beforehand."""
    if model.lookup == "table_batched":
        total = size(signatures_of(recorded, "TableBatchedLookupFunction")[0].inputs[1])
        lookups, distinct = [total] + [0] * (len(tables) - 1), [0] * len(tables)
    else:
        lookups = [size(one.inputs[1]) for one in signatures_of(recorded, "aten::embedding_bag")]
        distinct = [size(one.outputs[0]) for one in signatures_of(recorded, "aten::indices")] or [0] * len(tables)
    found = zip(tables, lookups, distinct, strict=True)
    return tuple(LocalTable(table.rows, table.dim, drawn, rows) for table, drawn, rows in found)


def both(case: CasePrograms) -> Iterator[tuple[Program, Program]]:
    """Every distinct program of a case, built and recorded."""
    model, owned = model_of(CASES[case.name])
    widths = tuple(sum(table.dim for table in tables) for tables in owned)
    for owner in case.traces:
        recorded = program_of(case, owner)
        yield rank_program(model, LocalTables(as_drawn(recorded, model, owned[owner])), widths, owner), recorded


@cache
def chosen(name: str) -> tuple[tuple[Program, Program], ...]:
    return tuple(both(shipped_programs(name)))


@pytest.mark.parametrize("name", CHOSEN)
def test_every_op_of_every_rank_is_what_was_recorded(name: str) -> None:
    for built, recorded in chosen(name):
        found = same_ops(built, recorded)
        assert found.differences == ()
        assert found.total == len(recorded.ops)


@pytest.mark.parametrize("name", CHOSEN)
def test_kernel_models_are_asked_what_a_recording_makes_them_asked(name: str) -> None:
    for built, recorded in chosen(name):
        assert same_device_ops(built, recorded, caches=False).differences == ()
        # A recording gives freed memory to the next tensor, which then counts as just written; a built program does not.
        assert same_device_ops(built, recorded).fraction > 0.96


@pytest.mark.parametrize("name", CHOSEN)
def test_collectives_and_those_who_wait_for_them_are_what_was_recorded(name: str) -> None:
    for built, recorded in chosen(name):
        assert built.collectives == recorded.collectives
        ours, theirs = tensor_waits(built), tensor_waits(recorded)
        assert ours == theirs
        assert needed_by_nobody(ours) == ()


@pytest.mark.parametrize("name", CHOSEN)
def test_memory_peaks_where_that_of_the_recorded_step_does(name: str) -> None:
    for built, recorded in chosen(name):
        assert peak_memory(built) == peak_memory(recorded)


def small(lookup: str = "table_batched", optimizer: str = "sgd", rows: int = 1000) -> Dlrm:
    tables = tuple(Table(f"t{place}", 8, Generator(rows=rows, pooling=2.0, seed=place)) for place in range(3))
    return Dlrm("small", 16, 4, (16, 8), (16, 1), tables, lookup=lookup, optimizer=optimizer)


@pytest.mark.parametrize("lookup", ["table_batched", "embedding_bag"])
def test_a_rank_without_tables_takes_part_in_every_exchange(lookup: str) -> None:
    model = small(lookup)
    with_tables = rank_program(model, LocalTables((LocalTable(1000, 8, 32, 30),) * 3), (24, 0), 0)
    without = rank_program(model, LocalTables(()), (24, 0), 1)
    kinds = [[one.kind for one in program.collectives] for program in (with_tables, without)]
    assert kinds[0] == kinds[1]
    assert without.collectives[0].in_splits == (0, 0)
    assert without.collectives[0].out_splits == with_tables.collectives[0].out_splits == (8 * 24, 0)


def test_a_gradient_that_does_not_lie_in_rows_is_copied_before_it_is_looked_up() -> None:
    """Lookups are measured with gradients that do; on one rank these are columns of what the layers give."""
    local = LocalTables((LocalTable(1000, 8, 32, 30),) * 3)
    alone, first = rank_program(small(), local, (24,), 0), rank_program(small(), local, (24, 0), 0)
    copied = [[work.name for work in questions_of(program)].count("aten::clone") for program in (alone, first)]
    assert copied == [1, 0]


def test_long_runs_of_one_row_take_more_levels_to_sum() -> None:
    def levels(lookups: int) -> int:
        program = rank_program(small(), LocalTables((LocalTable(1000, 8, lookups, 1),) * 3), (24,), 0)
        backward = [row for row, name in enumerate(program.ops.name.tolist()) if program.names[name] == "aten::empty"]
        return len(backward)

    assert levels(10) < levels(1000) < levels(100_000)


def test_nothing_is_sorted_where_nothing_is_looked_up() -> None:
    program = rank_program(small(), LocalTables((LocalTable(1000, 8, 0, 0),) * 3), (24,), 0)
    assert not signatures_of(program, "aten::sort")


def test_keys_of_very_large_tables_are_sorted_as_64_bits() -> None:
    program = rank_program(small(), LocalTables((LocalTable(2**31, 8, 32, 30),) * 3), (24,), 0)
    (sort,) = signatures_of(program, "aten::sort")
    assert isinstance(sort.inputs[0], Tensor)
    assert sort.inputs[0].dtype == "int64"


def main() -> None:
    """Compares all shipped cases instead of one of each kind: python -m tests.build.test_dlrm_program, in a minute."""
    totals: Counter[str] = Counter()
    for case in read_programs(FOLDER / FILE_NAME, CASES):
        totals["cases"] += 1
        for built, recorded in both(case):
            totals["programs"] += 1
            asked = same_device_ops(built, recorded)
            parts = {"ops": same_ops(built, recorded), "device ops": asked}
            parts["device ops, caches left out"] = same_device_ops(built, recorded, caches=False)
            for name, found in parts.items():
                totals[name] += found.total
                totals[f"{name}, equal"] += found.equal
    for name, count in totals.items():
        sys.stdout.write(f"{name}: {count}\n")


if __name__ == "__main__":
    main()
