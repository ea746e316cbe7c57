"""`dlrm_workload`: a DLRM on so many ranks as a workload, and what every rank looks up: no torch, no index is drawn."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np

from steptime._build.dlrm.model import KIND, MOST_BATCH, Dlrm, Table
from steptime._build.dlrm.plan import COLUMN_WISE, DATA_PARALLEL, EVERYWHERE, ROW_WISE, Plan
from steptime._build.dlrm.step import LocalTables, parameter_count, rank_program, what_is_written
from steptime._build.dlrm.tables import LocalTable
from steptime._build.emit.writer import GROUP
from steptime._lookups.estimated import expected_statistics, scaled
from steptime._lookups.generators import Generator
from steptime._lookups.spectrum import Spectrum, grid, of_rows, of_spectrum, of_statistics, with_totals
from steptime._lookups.statistics import QUANTILES, REUSE_EDGES, Lengths, Statistics, tally_of_offsets
from steptime._lookups.table import TableStatistics
from steptime._lookups.workload import DENSE, TABLE_BATCHED, RankLookups, StepLookups, WorkloadLookups
from steptime._program.program import Program
from steptime._program.workload import Description, UnnamedMemory, Workload
from steptime.errors import InputError

_FLOAT_BYTES = 4


def dlrm_workload(model: Dlrm, ranks: int = 1, plan: Plan | Mapping[str, Any] | None = None) -> Workload:
    """The step of every rank; ranks that do the same share a program. Without a plan, tables are dealt round in their order.

    A plan in plain values is what `Plan.from_dict` takes.
    """
    check_batch(model, ranks, model.name)
    warnings = list(_scaling_warnings(model))
    if plan is None:
        plan = Plan.whole(model.tables, [index % ranks for index in range(len(model.tables))], ranks)
        if ranks > 1:
            warnings.append(f"{model.name}: no plan says which rank holds which table; they are dealt round in their order")
    elif not isinstance(plan, Plan):
        plan = Plan.from_dict(plan, model.tables, ranks, f"{model.name}: the plan")
    check_kinds(model, plan)
    warnings += _unmeasured(model, plan)
    tables = [_RankTables.of(model, plan, owned) for owned in plan.split(model.tables)]
    programs, owners = _programs(model, tables)
    return Workload(
        programs=programs,
        world_size=ranks,
        name=model.name,
        warnings=tuple(warnings),
        meta={KIND: model.to_dict(), "plan": plan.owners()},
        owners=() if len(programs) == ranks else owners,
        groups={} if len(programs) == ranks else {GROUP: (tuple(range(ranks)),)},
        lookups=_lookups(model, tables),
        unnamed=_unnamed(model, tables),
        description=Description(
            batch=model.batch,
            precision=model.precision,
            parallelism={"data": ranks, "tables": ranks} if ranks > 1 else {},
            parameters=parameter_count(model),
        ),
    )


@dataclass(frozen=True)
class _RankTables:
    """The statistics of what one rank looks up, by how the tables are divided."""

    sharded: tuple[TableStatistics, ...]
    row_wise: tuple[TableStatistics, ...]
    copied: tuple[TableStatistics, ...]

    @classmethod
    def of(cls, model: Dlrm, plan: Plan, owned: Sequence[Table]) -> _RankTables:
        """Of a rank that owns these shards."""
        by_rows, copied = (plan.of_kind(model.tables, kind) for kind in (ROW_WISE, DATA_PARALLEL))
        return cls(
            tuple(table_lookups(table, model.batch) for table in owned),
            tuple(row_share(table_lookups(table, model.batch), plan.ranks) for table in by_rows),
            tuple(table_lookups(table, model.batch // plan.ranks) for table in copied),
        )

    @property
    def local(self) -> LocalTables:
        """As the program has them."""
        return LocalTables(*(tuple(map(_local, item)) for item in (self.sharded, self.row_wise, self.copied)))


def _local(table: TableStatistics) -> LocalTable:
    return LocalTable(table.rows, table.dim, table.lookups, table.unique)


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
    cut = next((name for name, placed in plan.placements.items() if placed.kind == COLUMN_WISE), None)
    if cut is not None and model.interaction == "dot":
        raise InputError(
            f'{model.name}: the plan cuts table {cut!r} into slices, and interaction "dot" takes whole vectors; '
            'leave it whole, or interaction = "cat"'
        )


def _unmeasured(model: Dlrm, plan: Plan) -> list[str]:
    kinds = sorted({placed.kind for placed in plan.placements.values()} & set(EVERYWHERE))
    if not kinds or plan.ranks == 1:
        return []
    return [f"{model.name}: no step with {' or '.join(kinds)} tables was measured; its pieces are modelled like any other"]


def _programs(model: Dlrm, ranks: Sequence[_RankTables]) -> tuple[tuple[Program, ...], tuple[int, ...]]:
    """The distinct programs by the first rank that runs each, and per rank whose it runs."""
    widths = tuple(sum(table.dim for table in tables.sharded) for tables in ranks)
    owner_of: dict[Hashable, int] = {}
    programs, owners = [], []
    for rank, tables in enumerate(ranks):
        local = tables.local
        # Ranks that write the same ops may look up other rows, and hold tables of other sizes. What every rank has is alike.
        key = (what_is_written(model, local.sharded), tuple(replace(table, table="") for table in tables.sharded))
        if key not in owner_of:
            owner_of[key] = rank
            programs.append(rank_program(model, local, widths, rank))
        owners.append(owner_of[key])
    return tuple(programs), tuple(owners)


def _lookups(model: Dlrm, ranks: Sequence[_RankTables]) -> WorkloadLookups:
    """One iteration, the expected one; a rank without tables looks up nothing."""
    copies = model.lookup if model.lookup == TABLE_BATCHED else f"{model.lookup}_dense"
    result = {}
    for rank, tables in enumerate(ranks):
        groups = [
            RankLookups(implementation, optimizer, StepLookups((item,)))
            for implementation, optimizer, item in (
                (model.lookup, model.optimizer, tables.sharded),
                (model.lookup, model.optimizer, tables.row_wise),
                (copies, DENSE, tables.copied),
            )
            if item
        ]
        if groups:
            result[rank] = replace(groups[0], then=tuple(groups[1:]))
    return WorkloadLookups(result)


def _unnamed(model: Dlrm, ranks: Sequence[_RankTables]) -> dict[int, UnnamedMemory]:
    """Tables that one kernel looks up together are no argument of any op; copies are, for an optimiser takes them."""
    if model.lookup != TABLE_BATCHED:
        return {}
    adagrad = model.optimizer == "rowwise_adagrad"
    groups = {rank: [item for item in (tables.sharded, tables.row_wise) if item] for rank, tables in enumerate(ranks)}
    return {
        rank: UnnamedMemory(
            tuple(_FLOAT_BYTES * sum(table.rows * table.dim for table in item) for item in held),
            tuple(_FLOAT_BYTES * sum(table.rows for table in item) for item in held) if adagrad else (),
        )
        for rank, held in groups.items()
        if held
    }


def _scaling_warnings(model: Dlrm) -> list[str]:
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


# What a batch looks up in one table: statistics of its generator without drawing, or counted ones at this batch

# Tables times batches that are kept: a sharding search asks for the same ones again and again.
_KEPT = 1 << 14
# Exponents among which a skew like that of counted lookups is sought (none is 1, where the formula has another form), and into
# how many groups of rows, each of like popularity, a table is divided for it.
_ALPHAS = np.linspace(0.011, 4.0, 400)
_GROUPS = 200


def table_lookups(table: Table, batch: int) -> TableStatistics:
    """The statistics of a table at a global batch."""
    if table.statistics is not None:
        return replace(_scaled(table.statistics, batch), table=table.name, dim=table.dim)
    generator = table.generator
    if generator.lengths == "fixed":  # then no length is drawn, and the seed does not matter
        generator = replace(generator, seed=0)
    return replace(_expected(generator, batch), table=table.name, dim=table.dim)


def row_share(whole: TableStatistics, ranks: int) -> TableStatistics:
    """What one of so many ranks looks up that hold equal shares of a table's rows, popular and rare ones alike.

    A row is looked up as often as before, on the one rank that has it. So a share has so many times fewer rows, distinct rows
    and lookups, a window of its lookups has the share of the rows that so many times as many of all lookups have, and a bag
    has a binomial number of its lookups there.
    """
    if ranks == 1:
        return whole
    lookups = round(whole.lookups / ranks)
    unique = min(max(round(whole.unique / ranks), 1), lookups)
    spectrum = with_totals(whole.spectrum, unique, lookups) if lookups else Spectrum((), ())
    windows = grid(lookups)
    lengths, spread = _thinned(whole, ranks)
    rows = -(-whole.rows // ranks)
    counted = replace(whole.counted, rows=rows, lookups=lookups, unique=unique, pooling_spread=spread)
    return replace(
        whole,
        counted=counted if lookups else replace(counted, reuse=(0.0,) * len(counted.reuse)),
        lengths=lengths,
        hottest=spectrum.hottest() if lookups else (0,) * len(whole.hottest),
        spectrum=spectrum,
        footprint=of_rows(windows, whole.footprint.distinct(np.minimum(windows * ranks, whole.lookups)) / ranks),
    )


def _thinned(whole: TableStatistics, ranks: int) -> tuple[Lengths, float]:
    """Lengths of bags of which each lookup is kept with one chance in `ranks`, and their standard deviation."""
    mean, kept = whole.lookups / whole.batch / ranks, whole.counted.pooling_spread / ranks
    spread = math.sqrt(kept**2 + mean * (1 - 1 / ranks))
    shares = np.minimum(QUANTILES, 1 - 0.5 / whole.batch)
    wide = np.array(whole.lengths.quantiles) / ranks - mean
    # The larger of the two causes has the shape of the whole, widened to the deviation of both.
    apart = wide * (spread / kept) if kept**2 > mean else spread * np.array([NormalDist().inv_cdf(share) for share in shares])
    longest = np.minimum(np.maximum(np.round(mean + apart), 0.0), whole.lengths.quantiles)
    return Lengths(tuple(np.maximum.accumulate(longest).tolist())), spread


@lru_cache(maxsize=_KEPT)
def _expected(generator: Generator, batch: int) -> TableStatistics:
    return expected_statistics(generator, batch)


@lru_cache(maxsize=_KEPT)
def _scaled(statistics: TableStatistics, batch: int) -> TableStatistics:
    return scaled(statistics, batch)


def of_reuse(
    generator: Generator, dim: int, batch: int, reuse: tuple[float, ...], unique: int | None = None
) -> TableStatistics:
    """Statistics from the 17-bin reuse histogram alone: lookups in random order, bags all of one length.

    Without the number of distinct rows it follows from the lookups, a bin standing for the geometric mean of its ends.
    """
    offsets, lookups = generator.offsets(batch)
    shares = np.array(reuse) / max(sum(reuse), 1e-300)
    ends = np.array((1.0, *REUSE_EDGES[1:], 2.0 * REUSE_EDGES[-1]))
    begins = np.array((1.0, 2.0, *(edge + 1.0 for edge in REUSE_EDGES[1:])))
    result = round(lookups / float(shares @ np.sqrt(begins * ends))) if unique is None else unique
    distinct = max(min(result, generator.rows, lookups), min(1, lookups))
    counted = Statistics(generator.rows, batch, lookups, distinct, float(np.diff(offsets).std()), tuple(shares.tolist()))
    spectrum = of_statistics(counted)
    if lookups:
        spectrum = with_totals(spectrum, distinct, lookups)
    return TableStatistics(
        table="table",
        dim=dim,
        counted=counted,
        lengths=Lengths.of(tally_of_offsets(offsets, "table")),
        hottest=spectrum.hottest(),
        spectrum=spectrum,
        footprint=of_spectrum(spectrum),
    )


def generator_like(rows: int, pooling: float, batch: int, unique: int, seed: int) -> Generator:
    """A generator that finds about as many distinct rows in such a batch: a zipf skew with the exponent that does."""
    edges = np.unique(np.append(0.0, np.round(np.geomspace(1.0, rows, _GROUPS))))
    exponents = 1 - _ALPHAS[:, None]
    below = np.expm1(exponents * np.log1p(edges)) / np.expm1(exponents * np.log1p(float(rows)))  # as lookups.skew has it
    sizes = np.diff(edges)
    distinct = (sizes * -np.expm1(-pooling * batch * np.diff(below, axis=1) / sizes)).sum(axis=1)  # falls with the exponent
    alpha = float(np.interp(unique, distinct[::-1], _ALPHAS[::-1]))
    return Generator(rows=rows, pooling=pooling, kind="zipf", alpha=round(alpha, 4), seed=seed)
