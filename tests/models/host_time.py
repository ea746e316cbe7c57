"""What the host spends on one step of a program, by phase: its ops, its launches, and what lies between ops.

The sum over the pieces in which the host spends it (`columns`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from steptime._models.host.columns import HostColumns, Piece, host_columns
from steptime._models.host.model import STEP, HostCost, HostModel, Speed
from steptime._ops.table import op_table
from steptime._program.program import Phase, Program


class Part(StrEnum):
    """What a piece of host time is spent on."""

    OPS = "ops"
    LAUNCHES = "launches"
    BETWEEN = "between"  # Python, autograd engine, recording the graph
    OPTIMIZER = "optimizer"
    DATA_PARALLEL = "data_parallel"  # DDP and calling collectives


# Where a piece counts; an op's launches count as such, apart from its CPU work.
_PART_OF = {
    Piece.OP: Part.OPS, Piece.OWN_LAUNCHES: Part.LAUNCHES, Piece.PYTHON: Part.BETWEEN, Piece.RECORD: Part.BETWEEN,
    Piece.FUNCTION: Part.BETWEEN, Piece.NODE: Part.BETWEEN, Piece.BACKWARD_CALL: Part.BETWEEN,
    Piece.OPTIMIZER_STEP: Part.OPTIMIZER, Piece.ZERO_GRAD: Part.OPTIMIZER, Piece.DDP_FORWARD: Part.DATA_PARALLEL,
    Piece.DDP_GRADIENT: Part.DATA_PARALLEL, Piece.DDP_BUCKET: Part.DATA_PARALLEL, Piece.DDP_COPY: Part.DATA_PARALLEL,
    Piece.COLLECTIVE: Part.DATA_PARALLEL, Piece.STREAM_WAIT: Part.DATA_PARALLEL,
}  # fmt: skip
# Pieces whose launches cost apart; others were measured with theirs.
_LAUNCHING = (Piece.OP, Piece.OWN_LAUNCHES)


@dataclass(frozen=True)
class HostTime:
    """Cost by phase and part; what is unknown is said in `warnings`. `launches` are those of ops, collectives left out."""

    costs: Mapping[tuple[Phase, Part], HostCost]
    launches: float
    warnings: tuple[str, ...] = ()

    def phase_ns(self, speed: Speed = STEP) -> dict[Phase, float]:
        """Nanoseconds of every phase."""
        result = dict.fromkeys(Phase, 0.0)
        for (phase, _), cost in self.costs.items():
            result[phase] += speed.time_ns(cost)
        return result

    def total_ns(self, speed: Speed = STEP) -> float:
        """Nanoseconds of the step: forward and backward take turns, so that they add up."""
        return sum(self.phase_ns(speed).values())


def columns_of(program: Program, model: HostModel, launches: Mapping[str, float] | None = None) -> HostColumns:
    """Host time with so many launches of all calls of an op in a step, an op around itself not counted."""
    if launches is None:
        return host_columns(program, model)
    table = op_table(program)
    calls = Counter(name for row, name in enumerate(table.names) if row not in table.same_inside)
    steps = max(1, len(program.steps))
    each = {name: count / (calls[name] / steps) for name, count in launches.items() if calls[name]}
    by_row = [0.0 if row in table.same_inside else each.get(name, 0.0) for row, name in enumerate(table.names)]
    return host_columns(program, model, by_row)


def host_time(program: Program, model: HostModel, launches: Mapping[str, float] | None = None) -> HostTime:
    """What one step of a program costs the host. Without `launches` each op launches as many as it usually does."""
    return summed(columns_of(program, model, launches), max(1, len(program.steps)))


def summed(columns: HostColumns, steps: int) -> HostTime:
    """The pieces of all steps as the cost of one."""
    share = 1.0 / steps
    costs: dict[tuple[Phase, Part], HostCost] = {}
    for phase in Phase:
        for piece, part in _PART_OF.items():
            chosen = (columns.phase == phase) & (columns.piece == piece)
            if not chosen.any():
                continue
            cost = HostCost(float(columns.cpu_ns[chosen].sum()), float(columns.launch_ns[chosen].sum())).times(share)
            split = {Part.OPS: HostCost(cost.cpu_ns), Part.LAUNCHES: HostCost(0.0, cost.launch_ns)}
            for key, more in (split if piece is Piece.OP else {part: cost}).items():
                costs[phase, key] = costs.get((phase, key), HostCost()) + more
    launched = float(columns.launches[np.isin(columns.piece, _LAUNCHING)].sum())
    return HostTime(costs, launched * share, columns.warnings)
