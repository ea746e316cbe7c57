"""What a shard takes of its rank's memory, and what every rank needs beside: partial evaluations of the allocator's replay.

What `predict` says of a plan is a replay of every rank's allocations (`models.memory.peak`). A search asks about thousands of
plans, so here a few programs of one rank are replayed for a model and a number of ranks, and what they reserve is told apart
by what was changed from one to the next: columns, lookups, a table divided by rows, a copied table. Weights and optimiser state
are counted. A plan's fullest rank is within 5 % of its replay (tests/shard/test_task_memory.py); ranks with several times an
even share of the lookups, whose allocator fragments, reserved up to 14 % more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import DATA_PARALLEL, ROW_WISE, Division
from steptime._build.dlrm.step import LocalTables, rank_program
from steptime._build.dlrm.tables import LocalTable
from steptime._hardware.device import DeviceLimits
from steptime._models.memory.fit import has_room, usable_bytes
from steptime._models.memory.peak import peak_memory, process_bytes
from steptime._shard.task import FREE, Places

Bytes = npt.NDArray[np.int64]
Ranks = npt.NDArray[np.intp] | Sequence[int]

# A program of more ranks has as many more blocks in its exchange and smaller activations, which are not worth its length.
_MOST_RANKS = 64
# Weights of the copied table that is replayed: large beside what allocators round to.
_COPIED_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class Memory:
    """Bytes per shard of a division, and of every rank whatever it holds; `limit` is what a rank has."""

    names: tuple[str, ...]
    shard_bytes: Bytes  # [shards]
    rank_bytes: int
    limit: int
    node_bytes: Bytes | None = None  # [ranks] of tables whose rows the ranks of nodes share

    @property
    def room(self) -> int:
        """For shards, on every rank."""
        return self.limit - self.rank_bytes

    def used(self, rank_of: Ranks, ranks: int) -> Bytes:
        """Bytes on every rank, [..., ranks], of one plan or many."""
        owners = np.asarray(rank_of, dtype=np.intp)
        flat = owners.reshape(math.prod(owners.shape[:-1]), owners.shape[-1]) if owners.ndim else owners
        places = flat + ranks * np.arange(len(flat))[:, None]
        weights = np.broadcast_to(self.shard_bytes, flat.shape).ravel()
        summed = np.bincount(places.ravel(), weights=weights, minlength=ranks * len(flat))
        result: Bytes = summed.astype(np.int64).reshape(*owners.shape[:-1], ranks) + self.rank_bytes
        return result if self.node_bytes is None else result + self.node_bytes

    def fits(self, rank_of: Ranks, ranks: int) -> npt.NDArray[np.bool_]:
        """Whether no rank has too much, of one plan or many."""
        return np.asarray(has_room(self.used(rank_of, ranks), self.limit).all(axis=-1))


def memory_of(model: Dlrm, division: Division, ranks: int, limit: int, outside_bytes: int = 0) -> Memory:
    """Of a model divided so; `limit` of a rank, `outside_bytes` held by its process beside the allocator."""
    shards = division.shard_tables(model.tables)
    replayed = _replays(model, min(ranks, _MOST_RANKS))
    everywhere = sum(
        replayed.everywhere_bytes(model, model.tables[index], kind, ranks) for index, kind in division.everywhere().items()
    )
    return Memory(
        names=tuple(table.name for table in shards),
        shard_bytes=np.array([replayed.shard_bytes(model, table) for table in shards], dtype=np.int64),
        rank_bytes=round(replayed.rank_bytes + everywhere) + outside_bytes,
        limit=limit,
        node_bytes=_node_bytes(model, division, ranks, replayed) if division.shares_nodes else None,
    )


def _node_bytes(model: Dlrm, division: Division, ranks: int, replayed: _Replays) -> Bytes:
    """Shares of rows on every rank of the nodes that have them, [ranks]."""
    held = [
        sum(
            replayed.everywhere_bytes(model, table, ROW_WISE, division.per_node)
            for table in division.node_tables(model.tables, node)
        )
        for node in range(ranks // division.per_node)
    ]
    return np.repeat(np.ceil(held), division.per_node).astype(np.int64)


def packed(memory: Memory, pinned: Places, ranks: int) -> Places | None:
    """A plan that fits, largest shards first, each where most is free; None where that fails."""
    result = pinned.copy()
    free = np.full(ranks, memory.room, dtype=np.int64)
    if memory.node_bytes is not None:
        free -= memory.node_bytes
    held = np.flatnonzero(pinned != FREE)
    np.subtract.at(free, pinned[held], memory.shard_bytes[held])
    if (free < 0).any():
        return None
    for shard in np.argsort(-memory.shard_bytes, kind="stable"):
        if result[shard] != FREE:
            continue
        rank = int(np.argmax(free))
        if free[rank] < memory.shard_bytes[shard]:
            return None
        result[shard] = rank
        free[rank] -= memory.shard_bytes[shard]
    return result


def rank_limit(limits: DeviceLimits, ranks: int, constraints: Constraints) -> tuple[int, int]:
    """What a rank may use of its device, and what its process holds of that outside the allocator."""
    return usable_bytes(limits, constraints.memory_bytes, constraints.headroom), process_bytes(ranks, limits.share)


@dataclass(frozen=True)
class Reserved:
    """What the allocator of a rank reserves that has so many tables like the mean one."""

    model: Dlrm
    ranks: int
    count: int
    dim: int
    lookups: int

    @classmethod
    def of(cls, model: Dlrm, ranks: int) -> Reserved:
        """As many tables as an even plan gives a rank."""
        tables = model.tables
        dim = max(4, 4 * round(sum(table.dim for table in tables) / len(tables) / 4))
        lookups = max(1, round(sum(_lookups(model, table) for table in tables) / len(tables)))
        return cls(model, ranks, -(-len(tables) // ranks), dim, lookups)

    def bytes_of(self, wider: int = 1, more: int = 1, *, by_rows: bool = False, copied: bool = False) -> float:
        """With columns and lookups so many times the mean, and one more table that every rank has a part of."""
        dim, lookups = wider * self.dim, more * self.lookups
        usual = LocalTable(1, dim, lookups, max(lookups // 2, 1))
        share = (LocalTable(1, self.dim, max(lookups // self.ranks, 1), 1),) if by_rows else ()
        copy = (LocalTable(_COPIED_ELEMENTS // self.dim, self.dim, 1, 1),) if copied else ()
        own, every = dim * self.count, sum(table.dim for table in self.model.tables)
        others = (own, max(every - own, 0), *[0] * (self.ranks - 2))[: self.ranks]
        program = rank_program(self.model, LocalTables((usual,) * self.count, share, copy), others, 0)
        return float(peak_memory(program).reserved)


@dataclass(frozen=True)
class _Replays:
    """Bytes that the allocator reserves, by what a rank looks up."""

    rank_bytes: float  # without a table
    per_column: float  # of the shards of a rank
    per_lookup: float
    per_element: float  # looked up: `nn.EmbeddingBag` keeps a gradient row for each lookup
    usual: Reserved
    usual_bytes: float

    @cached_property
    def per_shared_column(self) -> float:
        """Of tables divided by rows."""
        usual = self.usual
        more = usual.bytes_of(by_rows=True) - self.usual_bytes
        passing = (self.per_lookup + self.per_element * usual.dim) * usual.lookups / usual.ranks
        return max((more - passing) / usual.dim, 0.0)

    @cached_property
    def copies(self) -> float:
        """Of the weights of a copied table: with its gradient, the buckets, and temporaries of its update."""
        return (self.usual.bytes_of(copied=True) - self.usual_bytes) / (4 * _COPIED_ELEMENTS)

    def shard_bytes(self, model: Dlrm, table: Table) -> float:
        """All that one more shard takes on its rank."""
        return table.nbytes + model.state_bytes(table) + self.passing_bytes(table.dim, _lookups(model, table))

    def passing_bytes(self, columns: float, lookups: float) -> float:
        """What the lookups of a shard hold during a step: inputs, sums, gradients, buffers of the exchange and of the sort."""
        return self.per_column * columns + (self.per_lookup + self.per_element * columns) * lookups

    def everywhere_bytes(self, model: Dlrm, table: Table, kind: str, ranks: int) -> float:
        """Of a table that every rank has a share or a copy of."""
        state, lookups = model.state_bytes(table), _lookups(model, table) / ranks
        if kind == DATA_PARALLEL:
            return self.copies * table.nbytes + state + self.passing_bytes(table.dim / ranks, lookups)
        held = (table.nbytes + state) / ranks
        return held + self.per_shared_column * table.dim + (self.per_lookup + self.per_element * table.dim) * lookups


def _lookups(model: Dlrm, table: Table) -> float:
    return model.batch * table.pooling_factor


@lru_cache(maxsize=256)
def _replays(model: Dlrm, ranks: int) -> _Replays:
    """Of programs of a rank that has tables like the mean one, as many as an even plan gives it.

    What tables add is told from vectors laid side by side: pairs of products need as many whole ones as the model has.
    """
    usual = Reserved.of(replace(model, interaction="cat") if model.interaction == "dot" else model, ranks)
    count, dim, lookups = usual.count, usual.dim, usual.lookups
    base, per_element = usual.bytes_of(), 0.0
    wider, more = usual.bytes_of(wider=2), usual.bytes_of(more=2)
    if model.lookup == "embedding_bag":
        both = usual.bytes_of(wider=2, more=2)
        per_element = max(both - wider - more + base, 0.0) / (count * dim * lookups)
    per_column = max((wider - base) / (count * dim) - per_element * lookups, 0.0)
    per_lookup = max((more - base) / (count * lookups) - per_element * dim, 0.0)
    result = _Replays(0.0, per_column, per_lookup, per_element, usual, base)
    own = Reserved.of(model, ranks).bytes_of() if model.interaction == "dot" else base
    return replace(result, rank_bytes=own - count * result.passing_bytes(dim, lookups))
