"""What a lookup model is asked: one lookup of one or many tables, with the statistics of what it looks up."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from steptime._lookups.table import TableStatistics
from steptime._lookups.workload import (
    DENSE,
    EMBEDDING_BAG,
    IMPLEMENTATIONS,
    ITEM_BYTES,
    OPTIMIZERS,
    TABLE_BATCHED,
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
    "FORWARD",
    "IMPLEMENTATIONS",
    "ITEM_BYTES",
    "OPTIMIZERS",
    "TABLE_BATCHED",
    "Lookup",
    "rank_questions",
]


@dataclass(frozen=True, slots=True)
class Lookup:
    """One lookup. Backward is with the optimiser's update of the rows; only table-batched lookups have several tables."""

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
            (self.optimizer in OPTIMIZERS, "optimizer", OPTIMIZERS),
            ((self.optimizer == "none") == (self.direction == FORWARD), "optimizer", "none forward, one backward"),
            (bool(self.tables), "tables", "at least one"),
            (self.implementation == TABLE_BATCHED or len(self.tables) == 1, "tables", "one, unless table_batched"),
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

    A dense gradient is asked for like the update of plain SGD, which also writes every distinct row once.
    """
    update = "sgd" if lookups.optimizer == DENSE else lookups.optimizer
    optimizer = update if direction == BACKWARD else "none"
    together = lookups.implementation == TABLE_BATCHED
    first = (
        tuple(
            Lookup(lookups.implementation, direction, tables, optimizer, lookups.dtype, weighted=lookups.weighted)
            for tables in ([step] if together else [(table,) for table in step])
        )
        for step in lookups.steps.steps
    )
    groups = (first, *(rank_questions(group, direction) for group in lookups.then))
    return tuple(tuple(chain.from_iterable(iteration)) for iteration in zip(*groups, strict=True))
