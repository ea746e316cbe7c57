"""`Task`: a model whose tables are to be divided over ranks, and what a plan must respect."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steptime._build.config import read_dlrm_config
from steptime._build.config_values import Overrides
from steptime._build.dlrm.config import Doubt
from steptime._build.dlrm.constraints import Constraints
from steptime._build.dlrm.model import Dlrm, Table
from steptime._build.dlrm.plan import (
    BY_NODE,
    DATA_PARALLEL,
    GRID,
    KINDS,
    ROW_WISE,
    SLICED,
    TABLE_COLUMN_WISE,
    TABLE_WISE,
    Division,
)
from steptime._build.dlrm.workload import check_batch
from steptime.errors import InputError

Places = npt.NDArray[np.intp]

FREE = -1
"""In place of a rank: a shard that may go anywhere."""


@dataclass(frozen=True, slots=True)
class Task:
    """A model on so many ranks."""

    model: Dlrm
    ranks: int
    constraints: Constraints = field(default_factory=Constraints)
    notes: tuple[str, ...] = ()  # what was taken for granted
    doubts: tuple[Doubt, ...] = ()

    def __post_init__(self) -> None:
        where = self.model.name
        check_batch(self.model, self.ranks, where)
        self.constraints.check(self.tables, where)
        self.constraints.check_ranks(self.ranks, where)
        odd = next((table.name for index, table in enumerate(self.tables) if not self.allowed(index)), None)
        if odd is not None:
            raise InputError(
                f'{where}: table {odd!r} may only be divided in ways that its model cannot have (interaction "dot" takes whole '
                f"vectors, rows that are not pooled do not add up, int8 has no gradient to reduce); allow {TABLE_WISE}"
            )

    @property
    def tables(self) -> tuple[Table, ...]:
        """The model's."""
        return self.model.tables

    def pinned_shards(self, division: Division) -> Places:
        """The rank of every shard that is pinned or belongs on a node, else FREE; [shards]."""
        shards = division.shards(self.tables)
        ranks = [self.constraints.pinned.get(self.tables[shard.table].name, FREE) for shard in shards]
        given = [0] * self.ranks  # slices of a node's ranks
        for at, shard in enumerate(shards):
            if division.kinds[shard.table] == TABLE_COLUMN_WISE and division.nodes:
                first = division.nodes[shard.table][0] * division.per_node
                ranks[at] = min(range(first, first + division.per_node), key=lambda rank: (given[rank], rank))
                given[ranks[at]] += 1
        return np.array(ranks, dtype=np.intp)

    def allowed(self, index: int) -> tuple[str, ...]:
        """Kinds for a table: of those that the constraints allow, what such a model can have (`check_kinds`)."""
        table = self.tables[index]
        never: tuple[str, ...] = (*SLICED, GRID) if self.model.interaction == "dot" else ()
        never += () if table.pooled else (ROW_WISE, *BY_NODE)
        never += (DATA_PARALLEL,) if table.precision == "int8" else ()
        return tuple(kind for kind in self.constraints.allowed(table.name) if kind not in never)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that any table may be divided by."""
        found = {kind for index in range(len(self.tables)) for kind in self.allowed(index)}
        return tuple(kind for kind in KINDS if kind in found)


def read_task(path: Path, overrides: Overrides, memory_bytes: int | None = None, headroom: float | None = None) -> Task:
    """The task in a file (docs/sharding.md), on the ranks that are asked for, else the file's, else the platform's."""
    config = read_dlrm_config(path, overrides)
    notes = config.notes
    if config.plan is not None or config.rule is not None:
        notes = (*notes, "the config's own plan and rule are left aside: the search makes the plan")
    constraints = config.constraints or Constraints()
    if memory_bytes is not None:
        constraints = replace(constraints, memory_bytes=memory_bytes)
    if headroom is not None:
        constraints = replace(constraints, headroom=headroom)
    return Task(config.model, config.ranks or overrides.platform_ranks, constraints, notes, config.doubts)
