"""`dlrm_workload`: a DLRM on so many ranks as a workload, and what every rank looks up: no torch, no index is drawn."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._build.config_values import nearest_multiples
from steptime._build.dlrm.exchanges import Nodes
from steptime._build.dlrm.model import KIND, MOST_BATCH, Dlrm, Table
from steptime._build.dlrm.plan import BY_NODE, DATA_PARALLEL, GRID, ROW_WISE, SLICED, Plan
from steptime._build.dlrm.rank_tables import groups_of, what_is_written
from steptime._build.dlrm.step import LocalTables, parameter_count, rank_program
from steptime._build.dlrm.tables import LocalTable
from steptime._build.emit.writer import GROUP
from steptime._lookups.estimated import expected_statistics, scaled
from steptime._lookups.generators import Generator
from steptime._lookups.spectrum import Spectrum, grid, of_rows, of_spectrum, of_statistics, with_totals
from steptime._lookups.statistics import QUANTILES, REUSE_EDGES, Lengths, Statistics, tally_of_offsets
from steptime._lookups.table import TableStatistics
from steptime._lookups.workload import (
    DENSE,
    TABLE_BATCHED,
    TOGETHER,
    RankLookups,
    StepLookups,
    WorkloadLookups,
    row_bytes,
    state_bytes,
)
from steptime._notices import Basis
from steptime._program.program import Program
from steptime._program.workload import Description, UnnamedMemory, Workload
from steptime.errors import InputError


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
    warnings += _unmeasured(plan)
    warnings += _above_a_tile(model)
    tables = [_RankTables.of(model, plan, rank, owned) for rank, owned in enumerate(plan.split(model.tables))]
    nodes = _nodes(model, plan)
    programs, owners = _programs(model, tables, nodes)
    return Workload(
        programs=programs,
        world_size=ranks,
        name=model.name,
        warnings=tuple(warnings),
        meta={KIND: model.to_dict(), "plan": plan.owners()},
        owners=() if len(programs) == ranks else owners,
        groups={} if len(programs) == ranks else _groups(ranks, nodes),
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
class _Held:
    """A table, a part or a copy of one on a rank, and what is looked up in it."""

    table: Table
    lookups: TableStatistics

    @property
    def local(self) -> LocalTable:
        """As the program has it."""
        found, table = self.lookups, self.table
        return LocalTable(found.rows, found.dim, found.lookups, found.unique, table.dtype, table.weighted, table.sequence)

    @property
    def nbytes(self) -> int:
        """Of its weights."""
        return self.lookups.rows * row_bytes(self.lookups.dim, self.table.dtype)


@dataclass(frozen=True)
class _RankTables:
    """What one rank holds and looks up, by how the tables are divided."""

    sharded: tuple[_Held, ...]
    row_wise: tuple[_Held, ...]
    copied: tuple[_Held, ...]
    by_node: tuple[_Held, ...]

    @classmethod
    def of(cls, model: Dlrm, plan: Plan, rank: int, owned: Sequence[Table]) -> _RankTables:
        """Of a rank that owns these shards."""
        division, per_node = plan.divided(model.tables)[0], plan.per_node
        shared = division.node_tables(model.tables, rank // per_node) if per_node else ()
        by_rows, copied = (plan.of_kind(model.tables, kind) for kind in (ROW_WISE, DATA_PARALLEL))
        return cls(
            tuple(_Held(table, table_lookups(table, model.batch)) for table in owned),
            tuple(_shares(by_rows, model.batch, plan.ranks)),
            tuple(_Held(table, table_lookups(table, model.batch // plan.ranks)) for table in copied),
            tuple(_shares(shared, model.batch, per_node)),
        )

    @property
    def local(self) -> LocalTables:
        """As the program has them."""
        every = (self.sharded, self.row_wise, self.copied, self.by_node)
        return LocalTables(*(tuple(held.local for held in item) for item in every))


def _shares(tables: Sequence[Table], batch: int, ranks: int) -> Iterator[_Held]:
    """What the busiest of so many ranks looks up that have a block of the rows of each table: all others wait for it.

    Ranks then do the same, as if every one of them had what the busiest has.
    """
    whole = [table_lookups(table, batch) for table in tables]
    shares = [_block_shares(table.generator, ranks) for table in tables]
    loads = [share * each.lookups * (each.dim + _ROW_COST) for share, each in zip(shares, whole, strict=True)]
    busiest = int(np.argmax(np.sum(loads, axis=0))) if tables else 0
    for table, each, share in zip(tables, whole, shares, strict=True):
        yield _Held(table, row_share(each, ranks, max(float(share[busiest]), _LEAST_SHARE / ranks)))


@lru_cache(maxsize=4096)
def _block_shares(generator: Generator, ranks: int) -> npt.NDArray[np.float64]:
    return generator.block_shares(ranks)


def check_batch(model: Dlrm, ranks: int, where: str) -> None:
    """Refuses a batch that ranks cannot share evenly, or that no step has."""
    if not 1 <= model.batch <= MOST_BATCH:
        raise InputError(f"{where}: a batch of {model.batch}; expected 1 to {MOST_BATCH} samples")
    if ranks < 1 or model.batch % ranks:
        raise InputError(
            f"{where}: a batch of {model.batch} cannot be split evenly over {ranks} ranks; give a multiple of "
            f"the ranks{nearest_multiples(model.batch, ranks)}"
        )


def check_kinds(model: Dlrm, plan: Plan) -> None:
    """Refuses a plan that divides tables in a way that is not modelled."""
    cut = next((name for name, placed in plan.placements.items() if placed.kind in (*SLICED, GRID)), None)
    if cut is not None and model.interaction == "dot":
        raise InputError(
            f'{model.name}: the plan cuts table {cut!r} into slices, and interaction "dot" takes whole vectors; '
            'leave it whole, or interaction = "cat"'
        )
    for table in model.tables:
        kind = plan.placements[table.name].kind
        if kind in (ROW_WISE, *BY_NODE) and not table.pooled:
            raise InputError(
                f"{model.name}: the plan divides table {table.name!r} by rows, and its rows are not summed: nothing adds up "
                "over ranks; leave it whole"
            )
        if kind == DATA_PARALLEL and table.precision == "int8":
            raise InputError(f"{model.name}: the plan copies table {table.name!r}, and rows in int8 have no gradient to reduce")


def _unmeasured(plan: Plan) -> list[str]:
    kinds = sorted({placed.kind for placed in plan.placements.values()} & set(BY_NODE))
    if not kinds or plan.ranks == 1:
        return []
    return [Basis(f"tables {' or '.join(kinds)}, of which no step was measured, by models of their parts")]


def _nodes(model: Dlrm, plan: Plan) -> Nodes | None:
    """Of a plan in which nodes share rows."""
    if not plan.per_node:
        return None
    division, _ = plan.divided(model.tables)
    count = plan.ranks // plan.per_node
    held = (division.node_tables(model.tables, node) for node in range(count))
    return Nodes(plan.per_node, tuple(sum(table.columns for table in tables) for tables in held))


def _groups(ranks: int, nodes: Nodes | None) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The sets of ranks that meet, by name of the group."""
    found: dict[str, list[tuple[int, ...]]] = {GROUP: [tuple(range(ranks))]}
    for rank in range(ranks if nodes is not None else 0):
        assert nodes is not None
        for name, members in nodes.groups(rank).items():
            if len(members) < ranks and members not in found.setdefault(name, []):
                found[name].append(members)
    return {name: tuple(sets) for name, sets in found.items()}


def _programs(model: Dlrm, ranks: Sequence[_RankTables], nodes: Nodes | None) -> tuple[tuple[Program, ...], tuple[int, ...]]:
    """The distinct programs by the first rank that runs each, and per rank whose it runs."""
    widths = tuple(sum(held.table.columns for held in tables.sharded) for tables in ranks)
    owner_of: dict[Hashable, int] = {}
    programs, owners = [], []
    for rank, tables in enumerate(ranks):
        local = tables.local
        # Ranks that write the same ops may look up other rows, and hold tables of other sizes. What every rank has is alike.
        written = what_is_written(model, local.sharded), what_is_written(model, local.by_node)
        key = (written, tuple(replace(held.lookups, table="") for held in (*tables.sharded, *tables.by_node)))
        if key not in owner_of:
            owner_of[key] = rank
            programs.append(rank_program(model, local, widths, rank, nodes))
        owners.append(owner_of[key])
    return tuple(programs), tuple(owners)


def _lookups(model: Dlrm, ranks: Sequence[_RankTables]) -> WorkloadLookups:
    """One iteration, the expected one; a rank without tables looks up nothing."""
    copies = model.lookup if model.lookup in TOGETHER else f"{model.lookup}_dense"
    result = {}
    for rank, tables in enumerate(ranks):
        groups = [
            group
            for implementation, optimizer, item in (
                (model.lookup, model.optimizer, tables.sharded),
                (model.lookup, model.optimizer, tables.by_node),
                (model.lookup, model.optimizer, tables.row_wise),
                (copies, DENSE, tables.copied),
            )
            for group in _looked_up(implementation, optimizer, item)
        ]
        if groups:
            result[rank] = replace(groups[0], then=tuple(groups[1:]))
    return WorkloadLookups(result)


def _looked_up(implementation: str, optimizer: str, held: Sequence[_Held]) -> list[RankLookups]:
    """In the groups in which the program looks them up."""
    of_local: dict[LocalTable, list[_Held]] = {}
    for each in held:
        of_local.setdefault(each.local, []).append(each)
    groups = []
    for group in groups_of([each.local for each in held]):
        tables = tuple(of_local[local].pop(0).lookups for local in group)
        steps = StepLookups((tables,))
        groups.append(RankLookups(implementation, optimizer, steps, group[0].dtype, weighted=group[0].weighted))
    return groups


def _unnamed(model: Dlrm, ranks: Sequence[_RankTables]) -> dict[int, UnnamedMemory]:
    """Tables that our own kernel looks up together are no argument of any op; copies are, for an optimiser takes them."""
    if model.lookup != TABLE_BATCHED:
        return {}
    groups = {
        rank: [item for item in (tables.sharded, tables.by_node, tables.row_wise) if item] for rank, tables in enumerate(ranks)
    }
    return {rank: _memory(model, held) for rank, held in groups.items() if held}


def _memory(model: Dlrm, groups: Sequence[Sequence[_Held]]) -> UnnamedMemory:
    states = [sum(state_bytes(held.lookups.rows, held.lookups.dim, model.optimizer) for held in item) for item in groups]
    return UnnamedMemory(tuple(sum(held.nbytes for held in item) for item in groups), tuple(states) if any(states) else ())


# Columns of a product that a block of threads computes together (NVIDIA, "Matrix Multiplication Background User's Guide", on
# tile quantization); of a wide layer one more tile counts, where it is nearly empty.
_TILE, _WIDE, _LITTLE = 128, 500, 0.02


def _above_a_tile(model: Dlrm) -> Iterator[str]:
    """Layers a little wider than whole tiles of a product, whose last tile is nearly empty."""
    for name, widths in (("bottom", model.bottom), ("top", model.top)):
        for width in widths:
            over = width % _TILE
            if width > _WIDE and 0 < over <= _LITTLE * width:
                whole = f"{width - over}, whole tiles of {_TILE}"
                yield f"{name}: {width} is just above {whole}: that layer can take a tile's time more"


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

# What a row costs beside its columns, in columns; and the least share of lookups that the busiest rank has, over an even one.
_ROW_COST, _LEAST_SHARE = 16, 0.01
# Tables times batches that are kept: a sharding search asks for the same ones again and again.
_KEPT = 1 << 14
# Exponents among which a skew like that of counted lookups is sought (none is 1, where the formula has another form), and into
# how many groups of rows, each of like popularity, a table is divided for it.
_ALPHAS = np.linspace(0.011, 4.0, 400)
_GROUPS = 200


def table_lookups(table: Table, batch: int) -> TableStatistics:
    """The statistics of a table at a global batch."""
    if table.statistics is not None:
        found = _scaled(table.statistics, batch)
    else:
        generator = table.generator
        if generator.lengths == "fixed":  # then no length is drawn, and the seed does not matter
            generator = replace(generator, seed=0)
        found = _expected(generator, batch)
    if not table.pooled:
        found = _row_by_row(found, table.sequence)
    return replace(found, table=table.name, dim=table.dim)


def _row_by_row(pooled: TableStatistics, sequence: int) -> TableStatistics:
    """The same lookups where none are summed: as many bags of one row."""
    counted = replace(pooled.counted, batch=pooled.batch * sequence, pooling_spread=0.0)
    return replace(pooled, counted=counted, lengths=Lengths((1.0,) * len(QUANTILES)))


def row_share(whole: TableStatistics, ranks: int, share: float | None = None) -> TableStatistics:
    """What one of so many ranks looks up that have equal shares of a table's rows.

    A row is looked up as often as before, on the one rank that has it. Where popular and rare rows are spread evenly, a share
    has so many times fewer rows, distinct rows and lookups, a window of its lookups has the share of the rows that so many
    times as many of all lookups have, and a bag has a binomial number of its lookups there. `share`: of the lookups, on a rank
    that has more of the most popular rows than others, or fewer.
    """
    if ranks == 1:
        return whole
    share = 1 / ranks if share is None else share
    lookups = round(whole.lookups * share)
    hot = max(lookups - whole.lookups / ranks, 0.0)  # that go to rows as popular as the most popular one
    hot_rows = hot / max(whole.hottest[0], 1)
    unique = min(max(round(whole.unique / ranks + hot_rows), 1), lookups)
    spectrum = Spectrum((), ())
    if lookups:
        evenly = with_totals(whole.spectrum, max(unique - hot_rows, 1e-9), lookups - hot)
        spectrum = Spectrum((*evenly.rows, hot_rows), (*evenly.lookups, hot)) if hot_rows else evenly
    windows = grid(lookups)
    lengths, spread = _thinned(whole, share)
    rows = -(-whole.rows // ranks)
    counted = replace(whole.counted, rows=rows, lookups=lookups, unique=unique, pooling_spread=spread)
    return replace(
        whole,
        counted=counted if lookups else replace(counted, reuse=(0.0,) * len(counted.reuse)),
        lengths=lengths,
        hottest=spectrum.hottest() if lookups else (0,) * len(whole.hottest),
        spectrum=spectrum,
        footprint=of_rows(windows, whole.footprint.distinct(np.minimum(windows / share, whole.lookups)) / ranks),
    )


def _thinned(whole: TableStatistics, share: float) -> tuple[Lengths, float]:
    """Lengths of bags of which each lookup is kept with this chance, and their standard deviation."""
    mean, kept = whole.lookups / whole.batch * share, whole.counted.pooling_spread * share
    spread = math.sqrt(kept**2 + mean * (1 - share))
    shares = np.minimum(QUANTILES, 1 - 0.5 / whole.batch)
    wide = np.array(whole.lengths.quantiles) * share - mean
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
