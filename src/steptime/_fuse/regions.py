"""`Regions`: what of a program is compiled and what stays as it is, in order.

Forward and backward are compiled, what is between them and beside them is not: hooks of DistributedDataParallel and FSDP,
gradients that are accumulated, the optimiser. A collective inside forward or backward is a call of the graph around it; hooks
end a graph. Parts of a program that repeats (`Repetition`) are graphs of their own, as where layers are compiled one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from steptime._models.kernels.from_ops import IssuedWork
from steptime._ops.table import OpTable
from steptime._program.program import Phase, Program

COMPILED_PHASES = (Phase.FORWARD, Phase.BACKWARD)
_ACCUMULATES = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
# What autograd and wrappers of modules do around what is compiled.
_STAYS = re.compile(
    rf"^(?:FSDP::|{_ACCUMULATES}|torch::autograd::AccumulateGrad|c10d::|_?c10d_functional|record_param_comms"
    r"|torch::distributed::|torch\.distributed\.)"
)
_ENDS_GRAPH = ("FSDP::", "torch.distributed.ddp.", _ACCUMULATES)


@dataclass(frozen=True, slots=True)
class Stays:
    """An op that stays, with what is inside it if `whole`: within a graph (`inside`), beside it, or after it (`deferred`)."""

    row: int
    graph: int
    whole: bool = True
    inside: bool = False
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class Compiles:
    """A work that is compiled, with others of its segment; segments of one graph follow each other."""

    work: IssuedWork
    segment: int
    graph: int
    backward: bool


def regions(program: Program, table: OpTable, works: Mapping[int, IssuedWork]) -> Iterator[Stays | Compiles]:
    """The program in order."""
    hooks = _hooks(table)
    starts = frozenset(() if program.repetition is None else program.repetition.starts)
    segment = graph = row = 0
    previous: Phase | None = None
    while row < len(table):
        phase = Phase(table.phases[row])
        if row in starts or phase is not previous:
            segment, graph, previous = segment + 1, graph + 1, phase
        if phase not in COMPILED_PHASES:
            yield Stays(row, graph, whole=False)
            row += 1
        elif row in hooks:
            name, meets = table.names[row], hooks[row]
            ends, accumulates = name.startswith(_ENDS_GRAPH), name.startswith(_ACCUMULATES)
            if accumulates and not meets:
                yield Stays(row, graph, deferred=True)
            else:
                segment, graph = segment + 1, graph + ends
                yield Stays(row, graph, inside=not ends)
            row = table.last[row] + 1
        elif row in works:
            yield Compiles(works[row], segment, graph, phase is Phase.BACKWARD)
            row = table.last[row] + 1
        else:
            row += 1


def _hooks(table: OpTable) -> dict[int, bool]:
    """Rows of ops that stay with all that is inside them, and whether a collective is."""
    launched = np.zeros(len(table) + 1, dtype=np.int64)
    for row, _ in table.launching_collectives():
        launched[row + 1] += 1
    before = np.cumsum(launched)
    result, row = {}, 0
    while row < len(table):
        if _STAYS.match(table.names[row]):
            result[row] = bool(before[table.last[row] + 1] - before[row])
            row = table.last[row]
        row += 1
    return result
