"""When the storages of a step live, and what they are for, read from the arguments of its ops.

An execution trace names a storage by the address of its memory, which later storages take over: every op that returns a storage
it was not given starts a new life of that name. A life ends with the last op that takes the storage; what autograd saves is
taken by the backward op, so activations last until then. A storage that is taken before anything in the step returned it was
there before the step and stays: parameters, optimiser state, gradient buckets, inputs.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import numpy as np

from steptime._hardware.device import DeviceLimits
from steptime._models.memory.scratch import scratch
from steptime._models.memory.tensors import Extent, extents, without_wrappers
from steptime._ops.catalogue import ADDS_TO_KEPT
from steptime._ops.compiled import Frame, frame_of
from steptime._ops.table import OpTable, op_table
from steptime._program.program import PARAMETER_STORAGES, Phase, Program, Tensor
from steptime._values import value_class

BEFORE = -1
_BUCKET_OP = "c10d::allreduce_"
_COPY_OF_INPUTS, _SEED = "aten::_foreach_copy_", "aten::fill_"  # before PyTorch replays a graph
_AUTOGRAD_NODE = "autograd::engine::evaluate_function"
_DERIVATIVE = re.compile(r"^\w+Backward\d+$")  # nodes that are written in C++
_COLLECTIVE_OPS = ("c10d::", "record_param_comms")
_PHASES = {int(phase): phase for phase in Phase}


class MemoryKind(StrEnum):
    """The parts of a peak, as a person asks for them."""

    PARAMETERS = "parameters"  # there before the step; forward and the optimiser take them, or they are known to be frozen
    OPTIMIZER_STATE = "optimizer_state"  # there before the step; only the optimiser takes it
    GRADIENTS = "gradients"  # made or added to by backward, taken by the optimiser
    INPUTS = "inputs"  # there before the step; no optimiser takes them: batches, masks, buffers, frozen weights of recordings
    ACTIVATIONS = "activations"  # made by forward, taken by backward
    TEMPORARIES = "temporaries"  # made and dropped within a phase, or by an op for itself
    COMMUNICATION = "communication"  # gradient buckets, and what collectives send and receive
    WORKSPACES = "workspaces"  # what libraries keep: cuBLAS
    ROUNDING = "rounding"  # by which the allocator's blocks are larger than what was asked for


@value_class
class Storage:
    """Memory that ops share; rows are those of `Program.ops`."""

    nbytes: int
    born: int  # the op that makes it; -1: before the step
    dies: int  # the last op that takes it; the number of ops: it is there when the step ends
    kind: MemoryKind
    pooled: bool = False  # made inside a CUDA graph: its pool keeps the memory, and only what is reserved counts it

    @property
    def stays(self) -> bool:
        """Whether it is there before the step and after it."""
        return self.born == BEFORE


@dataclass(slots=True, eq=False)
class _Life:
    born: int
    born_in: Phase
    dies: int = 0
    nbytes: int = 0
    phases: int = 0  # a bit for each
    fractions: bool = False
    collective: bool = False
    reduced: bool = False
    parameter: bool = False  # is known to be one

    def storage(self, ops: int, *, pooled: bool = False) -> Storage:
        optimizer, backward = self._taken_in(Phase.OPTIMIZER), self._taken_in(Phase.BACKWARD)
        if self.born == BEFORE:
            return Storage(self.nbytes, BEFORE, ops, self._kept_kind(optimizer=optimizer, backward=backward))
        # A gradient is dropped where the next step begins, not where the optimiser has read it.
        if backward and optimizer:
            return Storage(self.nbytes, self.born, ops, MemoryKind.GRADIENTS, pooled)
        kind = MemoryKind.COMMUNICATION if self.collective else MemoryKind.TEMPORARIES
        if not self.collective and backward and self.born_in is Phase.FORWARD:
            kind = MemoryKind.ACTIVATIONS
        return Storage(self.nbytes, self.born, self.dies, kind, pooled)

    def _kept_kind(self, *, optimizer: bool, backward: bool) -> MemoryKind:
        if self.reduced:
            return MemoryKind.COMMUNICATION
        if self.parameter:
            return MemoryKind.PARAMETERS
        # The optimiser takes indices as well, where gradients are sparse.
        if not optimizer or not self.fractions:
            return MemoryKind.INPUTS
        if self._taken_in(Phase.FORWARD):
            return MemoryKind.PARAMETERS
        return MemoryKind.GRADIENTS if backward else MemoryKind.OPTIMIZER_STATE

    def _taken_in(self, phase: Phase) -> bool:
        return bool(self.phases >> phase & 1)


def storages(program: Program, device: DeviceLimits) -> tuple[Storage, ...]:
    """Every storage on the device that the ops of a program of one step name, as they are seen; then what ops take beside."""
    return storages_with(program, tuple(scratch(op_table(program), device)))


def storages_with(program: Program, beside: Iterable[tuple[int, int, int]]) -> tuple[Storage, ...]:
    """The same with what ops take beside, as `scratch` says it: from which op to which, and how many bytes."""
    table = op_table(program)
    inputs, outputs, wrapped = without_wrappers(table, *extents(table))
    last, phases, names = table.last, table.phases, table.names
    births = _births(table, inputs, outputs)
    ends = _Ends(table, inputs)
    lives: dict[tuple[int, int], _Life] = {}
    for row, phase in enumerate(phases):
        taken, made = inputs[row], outputs[row]
        if not taken and not made:
            continue
        name_of_op, end, bit = names[row], last[row], 1 << phase
        collective, reduces = name_of_op.startswith(_COLLECTIVE_OPS), name_of_op == _BUCKET_OP
        for is_input, tensors in ((True, taken), (False, made)):
            for name, nbytes, fractions in tensors:
                rows = births.get(name)
                born = BEFORE if rows is None else _life_of(rows, row, taken=True) if is_input else _life_of(rows, end)
                life = lives.get((name, born))
                if life is None:
                    life = lives[name, born] = _Life(born, _PHASES[phases[born]] if born != BEFORE else Phase.OTHER)
                if nbytes > life.nbytes and (name, born) not in wrapped:
                    life.nbytes = nbytes
                life.dies = max(life.dies, ends.taken(name, born, row) if is_input else end)
                life.phases |= bit
                if fractions:
                    life.fractions = True
                if collective:
                    life.collective = True
                    life.reduced |= reduces
    known = set(program.meta.get(PARAMETER_STORAGES, np.array([])).tolist())
    if program.repetition is not None:
        lives = _with_twins(lives, program.repetition.twins)
    for (storage, _), life in lives.items():
        life.parameter = storage in known
        _outlast(life, table)
    _keep_in_formulas(lives.values(), ends.formulas, table)
    pooled = graphed(table) | _in_pool(lives, table)
    taken_beside = (Storage(nbytes, row, dies, MemoryKind.TEMPORARIES, row in pooled) for row, dies, nbytes in beside if nbytes)
    return (*(life.storage(len(phases), pooled=life.born in pooled) for life in lives.values()), *taken_beside)


def graphed(table: OpTable) -> frozenset[int]:
    """Rows of ops inside CUDA graphs."""
    frames = (row for row, name in enumerate(table.names) if frame_of(name) is Frame.GRAPH)
    return frozenset(chain.from_iterable(range(row, table.last[row] + 1) for row in frames))


def _in_pool(lives: Mapping[tuple[int, int], _Life], table: OpTable) -> set[int]:
    """What is copied for a graph is made by the copy; gives the rows of these."""
    found = {life: row for name, row in _copied_for_graphs(table).items() if (life := lives.get((name, BEFORE))) is not None}
    for life, row in found.items():
        life.born = row
    return set(found.values())


def _copied_for_graphs(table: OpTable) -> dict[int, int]:
    """Inputs that PyTorch copies before it replays a graph of its own -> where it does: their places are the graph's, which
    takes them from its pool and gives them back once they are read."""
    result: dict[int, int] = {}
    for row, name in enumerate(table.names):
        after, around = table.last[row] + 1, table.parents[row]
        if name != _COPY_OF_INPUTS or around < 0 or frame_of(table.names[around]) is None:
            continue
        while after < len(table) and table.names[after] == _SEED:
            after = table.last[after] + 1
        if after < len(table) and table.parents[after] == around and frame_of(table.names[after]) is Frame.GRAPH:
            places = table.signatures[row].inputs[0]
            assert isinstance(places, tuple)
            result |= {each.storage: row for each in places if isinstance(each, Tensor) and each.storage is not None}
    return result


def _with_twins(lives: dict[tuple[int, int], _Life], twins: Mapping[int, int]) -> dict[tuple[int, int], _Life]:
    """Of a sample: what it leaves out is treated as its twin, and is not there before the step where the twin is made in it."""
    made = {name for name, born in lives if born != BEFORE}
    result = {}
    for (name, born), life in lives.items():
        twin = twins.get(name) if born == BEFORE else None
        if twin is not None and twin in made:
            continue
        if twin is not None and (twin, BEFORE) in lives:
            life.phases |= lives[twin, BEFORE].phases
        result[name, born] = life
    return result


def _outlast(life: _Life, table: OpTable) -> None:
    """Memory that an op asks for and no op takes is for kernels that the op around launches itself, and goes when that ends."""
    if life.born == BEFORE or life.dies > table.last[life.born] or not table.kinds[life.born].allocates:
        return
    around = table.parents[life.born]
    life.dies = table.last[around] if around >= 0 else life.dies


class _Ends:
    """How long an op keeps what it takes."""

    def __init__(self, table: OpTable, inputs: Sequence[Sequence[Extent]]) -> None:
        self.formulas = _formulas(table)
        self._last, self._nodes, self._inputs = table.last, _nodes(table), inputs

    def taken(self, name: int, born: int, row: int) -> int:
        """The row after which a storage may be gone that this op takes and that was made at that row.

        A node lets go of what it saved when all is done that it takes part in. What a checkpoint computed again, inside the
        first node that asked for it, it is only lent: that goes with the formula.
        """
        around, formula = self._nodes[row], self.formulas[row]
        if born >= around:
            return self._last[row]
        again = born != BEFORE and self.formulas[born] != BEFORE and self.formulas[born] != formula
        if again and formula != BEFORE and all(each[0] != name for each in self._inputs[formula]):
            return self._last[formula]
        return self._last[around]


def _nodes(table: OpTable) -> list[int]:
    """Per op, the autograd node around it, or itself: a node keeps what it saved and what it is given until it is done.

    Those of compiled functions hand over what they saved and keep nothing: the wrapper drops each where it needs it last.
    """
    nodes = [name.startswith(_AUTOGRAD_NODE) for name in table.names]
    results = list(range(len(table)))
    for row, parent in enumerate(table.parents):
        compiled = frame_of(table.names[row]) is not None
        if parent >= 0 and not nodes[row] and not compiled and (results[parent] != parent or nodes[parent]):
            results[row] = results[parent]
    return results


def _keep_in_formulas(lives: Iterable[_Life], formulas: Sequence[int], table: OpTable) -> None:
    """What a derivative of PyTorch's own makes on the way to a result is dropped when that is made: C++ keeps what an
    expression makes to its end."""
    until: dict[
        int, int
    ] = {}  # the last row of an op within a formula -> when the last thing is dropped that it made on the way
    for life in sorted(lives, key=lambda life: -life.born):
        if life.born == BEFORE or formulas[life.born] == BEFORE:
            continue
        if life.dies < len(table) and formulas[life.dies] == formulas[life.born]:
            life.dies = max(life.dies, until.get(life.dies, BEFORE))
            made = table.last[life.born]
            until[made] = max(until.get(made, BEFORE), life.dies)


def _formulas(table: OpTable) -> list[int]:
    """Per op, the node of a derivative that it is inside of; -1 where it is in none."""
    results = [BEFORE] * len(table)
    for row, parent in enumerate(table.parents):
        if parent >= 0:
            results[row] = parent if _DERIVATIVE.search(table.names[parent]) else results[parent]
    return results


def _births(table: OpTable, inputs: Sequence[Sequence[Extent]], outputs: Sequence[Sequence[Extent]]) -> dict[int, list[int]]:
    """Per name, the rows of the ops that made a storage of it, ascending; of nested ops the innermost counts."""
    inside: dict[int, set[int]] = {}
    result: dict[int, list[int]] = defaultdict(list)
    parents, kinds, names = table.parents, table.kinds, table.names
    for row in range(len(table) - 1, -1, -1):
        below, parent = inside.pop(row, None), parents[row]
        # Parts of a sparse tensor have storages of their own, which a trace does not name.
        if outputs[row] and not kinds[row].sparse_part:
            given = {each[0] for each in inputs[row]}
            for name in given.intersection(below or ()) if names[row] == ADDS_TO_KEPT else ():
                result[name] = [at for at in result[name] if at > table.last[row]]
            new = {each[0] for each in outputs[row]}.difference(given, below or ())
            for name in new:
                result[name].append(row)
            below = new if below is None else below | new
        if below and parent >= 0:
            around = inside.get(parent)
            if around is None:
                inside[parent] = set(below)
            else:
                around |= below
    return {name: rows[::-1] for name, rows in result.items()}


def _life_of(births: Sequence[int], row: int, *, taken: bool = False) -> int:
    """The birth of the life that an op at that row sees. What is `taken` was there before the op made anything."""
    index = bisect_right(births, row) - 1
    if taken and index >= 0 and births[index] == row:
        index -= 1
    return births[index] if index >= 0 else BEFORE
