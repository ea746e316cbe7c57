"""`dlrm_workload`: a DLRM on so many ranks as a workload, and what every rank looks up: no torch, no index is drawn."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from steptime._build.dlrm.model import KIND, MOST_BATCH, Dlrm, Table
from steptime._build.dlrm.plan import COLUMN_WISE, EVERYWHERE, Plan
from steptime._build.dlrm.program import parameter_count, rank_program, what_is_written
from steptime._build.dlrm.tables import LocalTable
from steptime._build.emit.ops import GROUP
from steptime._lookups.workload import RankLookups, WorkloadLookups
from steptime._build.dlrm.table_lookups import table_lookups
from steptime.errors import InputError
from steptime._program.program import Program
from steptime._program.workload import Description, UnnamedMemory, Workload
from steptime._lookups.steps import StepLookups
from steptime._lookups.table import TableStatistics

_FLOAT_BYTES = 4


def dlrm_workload(model: Dlrm, ranks: int = 1, plan: Plan | Mapping[str, Any] | None = None) -> Workload:
    """The step of every rank; ranks that do the same share a program. Without a plan, tables are dealt round in their order.

    A plan in plain values is what `Plan.from_dict` takes.
    """
    check_batch(model, ranks, model.name)
    warnings = list(_scaled(model))
    if plan is None:
        plan = Plan.whole(model.tables, [index % ranks for index in range(len(model.tables))], ranks)
        if ranks > 1:
            warnings.append(f"{model.name}: no plan says which rank holds which table; they are dealt round in their order")
    elif not isinstance(plan, Plan):
        plan = Plan.from_dict(plan, model.tables, ranks, f"{model.name}: the plan")
    check_kinds(model, plan)
    owned = plan.split(model.tables)
    found = [[table_lookups(table, model.batch) for table in tables] for tables in owned]
    programs, owners = _programs(model, found)
    return Workload(
        programs=programs,
        world_size=ranks,
        name=model.name,
        warnings=tuple(warnings),
        meta={KIND: model.to_dict(), "plan": plan.owners()},
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


def check_batch(model: Dlrm, ranks: int, where: str) -> None:
    """Refuses a batch that ranks cannot share evenly, or that no step has."""
    if not 1 <= model.batch <= MOST_BATCH:
        raise InputError(f"{where}: a batch of {model.batch}; expected 1 to {MOST_BATCH} samples")
    if ranks < 1 or model.batch % ranks:
        raise InputError(
            f"{where}: a batch of {model.batch} cannot be split evenly over {ranks} ranks; give a multiple of the ranks"
        )


def check_kinds(model: Dlrm, plan: Plan) -> None:
    """Refuses a plan that divides tables in a way that is not modelled."""
    odd = next((name for name, placed in plan.placements.items() if placed.kind in EVERYWHERE), None)
    if odd is not None:
        raise InputError(f"{model.name}: the plan has table {odd!r} on every rank; expected whole tables or slices of columns")
    cut = next((name for name, placed in plan.placements.items() if placed.kind == COLUMN_WISE), None)
    if cut is not None and model.interaction == "dot":
        raise InputError(
            f'{model.name}: the plan cuts table {cut!r} into slices, and interaction "dot" takes whole vectors; '
            'leave it whole, or interaction = "cat"'
        )


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
