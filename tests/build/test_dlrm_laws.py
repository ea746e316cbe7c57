"""Laws of any DLRM on any ranks, whatever the plan."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.waits import needed_by_nobody

from steptime._build.dlrm.model import (
    AUTOCAST,
    DENSE_OPTIMIZERS,
    EXCHANGE_DTYPES,
    INTERACTIONS,
    LOOKUPS,
    LOSSES,
    OPTIMIZERS,
    PREFETCHES,
    Dlrm,
    Table,
)
from steptime._build.dlrm.step import parameter_count, top_width
from steptime._build.dlrm.workload import dlrm_workload
from steptime._lookups.generators import Generator
from steptime._ops.waits import tensor_waits
from steptime._program.program import Collective, Program
from steptime._program.workload import Workload


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Dlrm, Workload]:
    """A model with up to five tables on up to four ranks."""
    interaction = draw(st.sampled_from(INTERACTIONS))
    count, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    last = 4 * draw(st.integers(1, 4))
    dims = [last if interaction == "dot" else 4 * draw(st.integers(1, 8)) for _ in range(count)]
    tables = tuple(
        Table(f"t{place}", dim, Generator(rows=draw(st.integers(1, 500)), pooling=draw(st.integers(0, 9)) / 2, seed=place))
        for place, dim in enumerate(dims)
    )
    model = Dlrm(
        name="drawn",
        batch=ranks * draw(st.integers(1, 16)),
        dense_features=draw(st.integers(2, 8)),
        bottom=(*draw(st.lists(st.integers(2, 600), max_size=2)), last),
        top=(*draw(st.lists(st.integers(2, 600), max_size=2)), 1),
        tables=tables,
        lookup=draw(st.sampled_from(LOOKUPS)),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        interaction=interaction,
        loss=draw(st.sampled_from(LOSSES)),
        precision=draw(st.sampled_from(("fp32", "tf32", *AUTOCAST))),
        dense_optimizer=draw(st.sampled_from(DENSE_OPTIMIZERS)),
        prefetch=draw(st.sampled_from(PREFETCHES)),
        exchange_precision=draw(st.sampled_from(list(EXCHANGE_DTYPES))),
        cross_layers=draw(st.integers(1, 3)),
        cross_rank=draw(st.none() | st.integers(2, 8)),
    )
    plan = {table.name: draw(st.integers(0, ranks - 1)) for table in tables}
    return model, dlrm_workload(model, ranks, plan)


def by_rank(found: Workload) -> list[Program]:
    programs = {program.rank: program for program in found.programs}
    return [programs[owner] for owner in found.owners or sorted(programs)]


def exchanges(program: Program) -> list[Collective]:
    return [one for one in program.collectives if one.kind == "all_to_all"]


@settings(max_examples=25)
@given(jobs())
def test_ranks_meet_in_the_same_order_with_as_much_to_reduce(job: tuple[Dlrm, Workload]) -> None:
    calls = [
        [(one.kind, one.sequence, one.bytes_in if one.kind == "all_reduce" else 0) for one in program.collectives]
        for program in by_rank(job[1])
    ]
    assert all(each == calls[0] for each in calls)
    assert (len(calls) > 1) == bool(calls[0])


@settings(max_examples=25)
@given(jobs())
def test_what_one_rank_sends_is_what_the_other_receives(job: tuple[Dlrm, Workload]) -> None:
    programs = by_rank(job[1])
    for ours, one in enumerate(programs):
        for theirs, other in enumerate(programs):
            for sent, received in zip(exchanges(one), exchanges(other), strict=True):
                assert sent.in_splits[theirs] == received.out_splits[ours]


@settings(max_examples=25)
@given(jobs())
def test_gradients_go_back_the_way_the_rows_came(job: tuple[Dlrm, Workload]) -> None:
    for program in by_rank(job[1]):
        for there, back in zip(exchanges(program)[::2], exchanges(program)[1::2], strict=True):
            assert (there.in_splits, there.out_splits) == (back.out_splits, back.in_splits)


@settings(max_examples=25)
@given(jobs())
def test_all_dense_parameters_are_reduced_once(job: tuple[Dlrm, Workload]) -> None:
    model, found = job
    widths = (model.dense_features, *model.bottom), (top_width(model), *model.top)
    parameters = sum((before + 1) * after for some in widths for before, after in pairwise(some))
    if model.interaction == "dcnv2":
        width, rank = top_width(model), model.cross_rank
        parameters += model.cross_layers * (width + (width * width if rank is None else 2 * rank * width))
    assert parameters == parameter_count(model) - sum(table.rows * table.dim for table in model.tables)
    for program in by_rank(found):
        reduced = sum(one.bytes_in for one in program.collectives if one.kind == "all_reduce")
        assert reduced == (4 * parameters if found.world_size > 1 else 0)


@settings(max_examples=25)
@given(jobs())
def test_somebody_waits_for_every_collective(job: tuple[Dlrm, Workload]) -> None:
    for program in job[1].programs:
        moving = {place for place, one in enumerate(program.collectives) if one.bytes_in or one.bytes_out}
        assert not moving & set(needed_by_nobody(tensor_waits(program)))


@settings(max_examples=25)
@given(jobs())
def test_every_table_is_looked_up_by_one_rank_for_the_whole_batch(job: tuple[Dlrm, Workload]) -> None:
    model, found = job
    assert found.lookups is not None
    tables = [table for one in found.lookups.ranks.values() for table in one.steps.steps[0]]
    assert sorted(table.table for table in tables) == sorted(table.name for table in model.tables)
    assert {table.batch for table in tables} == {model.batch}
