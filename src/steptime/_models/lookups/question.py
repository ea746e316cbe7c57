"""What a lookup model is asked: one lookup of one or many tables (`Lookup`), and many of them as columns (`Lookups`).

Lookups of one implementation and direction share a pool of tables, whose own part of the work is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._lookups.table import Floats, Places, TableColumns, TableStatistics
from steptime._lookups.workload import (
    DENSE,
    EMBEDDING_BAG,
    FBGEMM,
    IMPLEMENTATIONS,
    ITEM_BYTES,
    OPTIMIZERS,
    TABLE_BATCHED,
    TOGETHER,
    RankLookups,
)
from steptime._models.kernels.question import OTHERS
from steptime.errors import InputError

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)

__all__ = [
    "BACKWARD",
    "DIRECTIONS",
    "EMBEDDING_BAG",
    "FBGEMM",
    "FORWARD",
    "IMPLEMENTATIONS",
    "ITEM_BYTES",
    "OPTIMIZERS",
    "TABLE_BATCHED",
    "TOGETHER",
    "Lookup",
    "rank_questions",
]
Flags = npt.NDArray[np.bool_]
DTYPES = tuple(ITEM_BYTES)


@dataclass(frozen=True, slots=True)
class Lookup:
    """One lookup. Backward is with the optimiser's update of the rows; only table-batched lookups have several tables.

    FBGEMM's may leave a dense gradient (`DENSE`) in place of an update.
    """

    implementation: str
    direction: str
    tables: tuple[TableStatistics, ...]
    optimizer: str = "none"  # of the backward pass; forward: none
    dtype: str = "float32"  # of the rows
    weighted: bool = False  # per-sample weights
    warm: bool = False  # whether the same rows were in use just before (backward: by the forward pass)
    share: int = 1  # one of so many equal parts of the GPU
    others: str = "none"  # what the other parts do: none | idle | same | streaming

    def __post_init__(self) -> None:
        checks = (
            (self.implementation in IMPLEMENTATIONS, "implementation", IMPLEMENTATIONS),
            (self.direction in DIRECTIONS, "direction", DIRECTIONS),
            (self.dtype in ITEM_BYTES, "dtype", tuple(ITEM_BYTES)),
            (self.optimizer in (*OPTIMIZERS, *((DENSE,) if self.implementation == FBGEMM else ())), "optimizer", OPTIMIZERS),
            ((self.optimizer == "none") == (self.direction == FORWARD), "optimizer", "none forward, one backward"),
            (bool(self.tables), "tables", "at least one"),
            (self.implementation in TOGETHER or len(self.tables) == 1, "tables", f"one, unless {' or '.join(TOGETHER)}"),
            (self.share >= 1, "share", "1 or more equal shares of a GPU"),
            (self.others in OTHERS, "others", OTHERS),
            (len({table.batch for table in self.tables}) <= 1, "tables", "all of one batch"),
        )
        for holds, name, expected in checks:
            if not holds:
                value = getattr(self, name)
                text = [f"{table.table} (batch {table.batch})" for table in self.tables] if name == "tables" else repr(value)
                raise InputError(f"Lookup: {name} is {text}; expected {expected}.")


def rank_questions(lookups: RankLookups, direction: str) -> tuple[tuple[Lookup, ...], ...]:
    """What a model is asked of every iteration of a rank: all tables at once where one launch looks them up, else each.

    A dense gradient is asked for like the update of plain SGD, which also writes every distinct row once; FBGEMM's as it is.
    """
    update = "sgd" if lookups.optimizer == DENSE and lookups.implementation != FBGEMM else lookups.optimizer
    optimizer = update if direction == BACKWARD else "none"
    together = lookups.implementation in TOGETHER
    first = (
        tuple(
            Lookup(lookups.implementation, direction, tables, optimizer, lookups.dtype, weighted=lookups.weighted)
            for tables in ([step] if together else [(table,) for table in step])
        )
        for step in lookups.steps.steps
    )
    groups = (first, *(rank_questions(group, direction) for group in lookups.then))
    return tuple(tuple(chain.from_iterable(iteration)) for iteration in zip(*groups, strict=True))


@dataclass(frozen=True)
class Pool:
    """Tables with the type of their rows: what a table costs by itself is computed once, however many plans place it."""

    tables: TableColumns
    dtype: Places  # [tables] place in `DTYPES`

    def __len__(self) -> int:
        """How many tables there are."""
        return len(self.tables)

    @property
    def item(self) -> Floats:
        """Bytes of an element."""
        return np.array([float(size) for size in ITEM_BYTES.values()])[self.dtype]

    @property
    def row_bytes(self) -> Floats:
        """Bytes of a row."""
        return self.tables.dim * self.item

    def take(self, places: npt.NDArray[Any]) -> Pool:
        """Some of the tables."""
        return Pool(self.tables.take(places), self.dtype[places])


@dataclass(frozen=True)
class Shares:
    """Which share of a GPU each lookup has, and what the other shares do meanwhile; all [lookups]."""

    count: Floats  # equal shares that the GPU is divided into; 1: a whole one
    others: Places  # place in `OTHERS`

    @property
    def divided(self) -> Flags:
        """Whether there are other shares at all."""
        return self.count > 1

    @property
    def crowded(self) -> Floats:
        """1 where other shares use caches and memory as well."""
        return (self.divided & (self.others >= OTHERS.index("same"))).astype(np.float64)

    @property
    def same(self) -> Flags:
        """Whether the others look up as well."""
        same: Flags = self.others == OTHERS.index("same")
        return same

    @property
    def streaming(self) -> Flags:
        """Whether the others copy memory all the time."""
        streaming: Flags = self.others == OTHERS.index("streaming")
        return streaming

    def columns(self) -> Floats:
        """For trees, [lookups, 2]."""
        return np.column_stack([self.count, self.others])

    def take(self, places: npt.NDArray[Any]) -> Shares:
        """Of some lookups."""
        return Shares(self.count[places], self.others[places])


@dataclass(frozen=True)
class Lookups:
    """Lookups, one launch sequence each. Those of one call are of one implementation and direction."""

    implementation: str
    direction: str
    pool: Pool
    member: Places  # tables of all lookups, lookup by lookup: places in the pool
    starts: Places  # [lookups + 1] where each lookup's begin and the last one's end
    optimizer: Places  # [lookups] place in `question.OPTIMIZERS`
    dtype: Places  # [lookups] place in `DTYPES`
    weighted: Flags  # [lookups]
    warm: Flags  # [lookups]
    share: Floats  # [lookups]
    others: Places  # [lookups] place in `OTHERS`

    def __len__(self) -> int:
        """How many lookups there are."""
        return len(self.starts) - 1

    @property
    def shares(self) -> Shares:
        """The shares of a GPU that they have."""
        return Shares(self.share, self.others)

    @property
    def counts(self) -> Places:
        """Tables of each lookup."""
        return np.diff(self.starts)

    @property
    def lookup(self) -> Places:
        """Of each member, which lookup it belongs to."""
        return np.repeat(np.arange(len(self)), self.counts)

    def sums(self, values: Floats) -> Floats:
        """Values of the pool's tables summed over each lookup's tables, of which there is at least one."""
        return self.member_sums(values[self.member])

    def maxima(self, values: Floats) -> Floats:
        """Of values of the pool's tables the largest of each lookup's tables."""
        return self.member_maxima(values[self.member])

    def member_sums(self, values: Floats) -> Floats:
        """Values of members, lookup by lookup, summed over each lookup."""
        result: Floats = np.add.reduceat(values, self.starts[:-1], axis=0)
        return result

    def member_maxima(self, values: Floats) -> Floats:
        """Of values of members the largest of each lookup."""
        result: Floats = np.maximum.reduceat(values, self.starts[:-1], axis=0)
        return result

    def take(self, places: npt.NDArray[Any]) -> Lookups:
        """Some of the lookups, over the same pool; `places` may be a mask."""
        chosen = np.arange(len(self))[places]
        counts = self.counts[chosen]
        starts = np.concatenate([[0], np.cumsum(counts)])
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        member = self.member[np.repeat(self.starts[:-1][chosen], counts) + within]
        own = ("optimizer", "dtype", "weighted", "warm", "share", "others")
        return Lookups(
            self.implementation, self.direction, self.pool, member, starts, *(getattr(self, name)[chosen] for name in own)
        )

    @classmethod
    def of(cls, lookups: Sequence[Lookup]) -> Lookups:
        """From questions of one implementation and direction. Tables that are the same object share a place in the pool."""
        places: dict[tuple[int, str], int] = {}
        tables: list[tuple[TableStatistics, int]] = []
        member: list[int] = []
        for lookup in lookups:
            for table in lookup.tables:
                key = (id(table), lookup.dtype)
                if key not in places:
                    places[key] = len(tables)
                    tables.append((table, DTYPES.index(lookup.dtype)))
                member.append(places[key])
        pool = Pool(TableColumns.of([table for table, _ in tables]), np.array([dtype for _, dtype in tables], dtype=np.intp))
        return cls(
            implementation=lookups[0].implementation,
            direction=lookups[0].direction,
            pool=pool,
            member=np.array(member, dtype=np.intp),
            starts=np.concatenate([[0], np.cumsum([len(lookup.tables) for lookup in lookups])]).astype(np.intp),
            optimizer=np.array([OPTIMIZERS.index(lookup.optimizer) for lookup in lookups], dtype=np.intp),
            dtype=np.array([DTYPES.index(lookup.dtype) for lookup in lookups], dtype=np.intp),
            weighted=np.array([lookup.weighted for lookup in lookups], dtype=np.bool_),
            warm=np.array([lookup.warm for lookup in lookups], dtype=np.bool_),
            share=np.array([float(lookup.share) for lookup in lookups]),
            others=np.array([OTHERS.index(lookup.others) for lookup in lookups], dtype=np.intp),
        )
