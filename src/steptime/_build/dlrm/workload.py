"""`dlrm_workload`: a DLRM on so many ranks as a workload, and what every rank looks up: no torch, no index is drawn."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from steptime._build.dlrm.model import KIND, Dlrm, Table
from steptime._build.dlrm.program import parameter_count, rank_program, what_is_written
from steptime._build.dlrm.tables import LocalTable
from steptime._build.emit.ops import GROUP
from steptime._build.dlrm.table_lookups import table_lookups
from steptime.errors import InputError
from steptime._program.program import Program
from steptime._program.workload import Description, UnnamedMemory, Workload
from steptime._lookups.steps import StepLookups
from steptime._lookups.table import TableStatistics
from steptime._lookups.workload import RankLookups, WorkloadLookups

_FLOAT_BYTES = 4


def dlrm_workload(model: Dlrm, ranks: int = 1, plan: Mapping[str, int] | None = None) -> Workload:
    """The step of every rank; ranks that do the same share a program. Without a plan, tables are dealt round in their order."""
    if ranks < 1 or model.batch < 1 or model.batch % ranks:
        raise InputError(
            f"{model.name}: a batch of {model.batch} cannot be split evenly over {ranks} ranks; give a multiple of the ranks"
        )
    warnings = list(_scaled(model))
    if plan is None:
        plan = {table.name: place % ranks for place, table in enumerate(model.tables)}
        if ranks > 1:
            warnings.append(f"{model.name}: no plan says which rank holds which table; they are dealt round in their order")
    owned = owned_tables(model, ranks, plan)
    known = {table.name: table_lookups(table, model.batch) for table in model.tables}
    found = [[known[table.name] for table in tables] for tables in owned]
    programs, owners = _programs(model, found)
    return Workload(
        programs=programs,
        world_size=ranks,
        name=model.name,
        warnings=tuple(warnings),
        meta={KIND: model.to_dict(), "plan": dict(plan)},
        owners=() if len(programs) == ranks else owners,
        groups={} if len(programs) == ranks else {GROUP: (tuple(range(ranks)),)},
        lookups=_lookups(model, found),
        unnamed=_unnamed(model, owned),
        description=Description(
            batch=model.batch,
            precision="fp32",
            parallelism={"data": ranks, "tables": ranks} if ranks > 1 else {},
            parameters=parameter_count(model),
        ),
    )


def owned_tables(model: Dlrm, ranks: int, plan: Mapping[str, int]) -> list[list[Table]]:
    """The tables of every rank, in the model's order; a plan that does not fit the model says why."""
    names = {table.name for table in model.tables}
    unknown = next((name for name in plan if name not in names), None)
    if unknown is not None:
        raise InputError(
            f"{model.name}: the plan places {unknown!r}, which is no table of the model; expected its tables alone"
        )
    owned: list[list[Table]] = [[] for _ in range(ranks)]
    for table in model.tables:
        rank = plan.get(table.name)
        if rank is None:
            raise InputError(f"{model.name}: the plan does not place table {table.name!r}; expected a rank for every table")
        if not 0 <= rank < ranks:
            raise InputError(
                f"{model.name}: the plan puts table {table.name!r} on rank {rank}; expected 0 to {ranks - 1}, or more ranks"
            )
        owned[rank].append(table)
    return owned


def _programs(model: Dlrm, found: Sequence[Sequence[TableStatistics]]) -> tuple[tuple[Program, ...], tuple[int, ...]]:
    """The distinct programs by the first rank that runs each, and per rank whose it runs."""
    widths = [sum(table.dim for table in tables) for tables in found]
    owner_of: dict[Hashable, int] = {}
    programs, owners = [], []
    for rank, tables in enumerate(found):
        local = [LocalTable(table.rows, table.dim, table.lookups, table.unique) for table in tables]
        # Ranks that write the same ops may look up other rows, and hold tables of other sizes.
        key = (what_is_written(model, local), tuple(replace(table, table="") for table in tables))
        if key not in owner_of:
            owner_of[key] = rank
            programs.append(rank_program(model, local, widths, rank))
        owners.append(owner_of[key])
    return tuple(programs), tuple(owners)


def _lookups(model: Dlrm, found: Sequence[Sequence[TableStatistics]]) -> WorkloadLookups:
    """One iteration, the expected one; a rank without tables looks up nothing."""
    return WorkloadLookups(
        {
            rank: RankLookups(model.lookup, model.optimizer, StepLookups((tuple(tables),)))
            for rank, tables in enumerate(found)
            if tables
        }
    )


def _unnamed(model: Dlrm, owned: Sequence[Sequence[Table]]) -> dict[int, UnnamedMemory]:
    if model.lookup != "table_batched":
        return {}
    adagrad = model.optimizer == "rowwise_adagrad"
    return {
        rank: UnnamedMemory(
            (sum(table.nbytes for table in tables),),
            (_FLOAT_BYTES * sum(table.rows for table in tables),) if adagrad else (),
        )
        for rank, tables in enumerate(owned)
        if tables
    }


def _scaled(model: Dlrm) -> list[str]:
    """What is said of tables whose statistics were counted at another batch."""
    other = [table for table in model.tables if table.statistics is not None and table.statistics.batch != model.batch]
    if not other:
        return []
    first = other[0].statistics
    assert first is not None
    return [
        f"{model.name}: statistics of {len(other)} tables (first: {other[0].name}, counted over a batch of {first.batch}) are "
        f"scaled to a batch of {model.batch}: distinct rows are an estimate then"
    ]

