"""What a lookup model is asked: one lookup of one or many tables, with the statistics of what it looks up."""

from __future__ import annotations

from dataclasses import dataclass

from steptime._lookups.table import TableStatistics
from steptime._models.kernels.question import OTHERS
from steptime.errors import InputError

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)

TABLE_BATCHED, EMBEDDING_BAG = "table_batched", "embedding_bag"
# `nn.EmbeddingBag` (sparse and dense gradients), `nn.Embedding` (the same), and all tables of a rank in one launch.
IMPLEMENTATIONS = (TABLE_BATCHED, EMBEDDING_BAG, "embedding_bag_dense", "embedding_sparse", "embedding_dense")

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
OPTIMIZERS = ("none", "sgd", "adagrad", "rowwise_adagrad")


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
            (self.share >= 1, "share", "1 or more equal parts of a GPU"),
            (self.others in OTHERS, "others", OTHERS),
            (len({table.batch for table in self.tables}) <= 1, "tables", "all of one batch"),
        )
        for holds, name, expected in checks:
            if not holds:
                value = getattr(self, name)
                said = [f"{table.table} (batch {table.batch})" for table in self.tables] if name == "tables" else repr(value)
                raise InputError(f"Lookup: {name} is {said}; expected {expected}.")
