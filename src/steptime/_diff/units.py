"""Programs in units that can be found again in another program: an op with all that it launches, in one step.

A unit is the outermost op of a library around some calls, a collective, or a call that no op is around. Its key says what it
is: name, arguments, phase. Units of two programs are matched by their keys, the first of a key with the first, the second with
the second, so that a change of order matters little; what is left over is matched by less and less of the key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from steptime._program.program import Program, Signature, Tensor, Value, WorkKind
from steptime._sim.core.graph import Order

Rows = npt.NDArray[np.int64]

# Frames around ops, of which each begins with one of these, are no ops that can be matched: they hold many.
_FRAMES = ("autograd::", "torch::autograd::", "Optimizer.", "FSDP::", "DistributedDataParallel", "torch.distributed.ddp")


@dataclass(frozen=True)
class Unit:
    """What is found again. Keys go from all that is known to the name alone."""

    name: str
    keys: tuple[Hashable, ...]
    step: int  # number of the step within the program, from 0
    count: int = 1  # how often a step runs it


class Units:
    """The units of a program, in the order in which the host issues them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        calls = program.calls
        tops, self._counts = self._tops(), program.op_counts
        steps = {step: at for at, step in enumerate(program.steps)}
        collective = np.full(len(calls) + 1, -1, dtype=np.int64)
        communicating = np.flatnonzero(program.works.kind == WorkKind.COLLECTIVE)
        collective[program.works.call[communicating]] = program.works.collective[communicating]
        self.units: list[Unit] = []
        self.of_call: Rows = np.full(len(calls), -1, dtype=np.int64)
        known: dict[Hashable, int] = {}
        for call in np.argsort(Order.of(program).call, kind="stable").tolist():
            top = int(tops[calls.op[call]]) if calls.op[call] >= 0 else -1
            key: Hashable = ("op", top) if top >= 0 else ("call", call)
            if collective[call] >= 0:
                key = ("collective", call)
            if key not in known:
                known[key] = len(self.units)
                self.units.append(self._unit(call, top, int(collective[call]), steps.get(int(calls.step[call]), 0)))
            self.of_call[call] = known[key]

    def _tops(self) -> Rows:
        """Per op, the outermost op of a library around it, or itself."""
        names = self.program.names
        op = np.array(["::" in name and not name.startswith(_FRAMES) for name in names], dtype=bool)[self.program.ops.name]
        result = np.arange(len(op))
        for row, parent in enumerate(self.program.ops.parent.tolist()):
            if parent >= 0 and op[result[parent]]:
                result[row] = result[parent]
        return result

    def _unit(self, call: int, top: int, collective: int, step: int) -> Unit:
        program = self.program
        if collective >= 0:
            called = program.collectives[collective]
            return Unit(called.kind, ((called.kind, called.bytes_in), (called.kind,)), step)
        if top < 0:
            name = program.names[int(program.calls.api[call])]
            kind = int(program.calls.kind[call])
            return Unit(name, ((name, kind), (kind,)), step)
        name, phase = program.names[int(program.ops.name[top])], int(program.ops.phase[top])
        at = int(program.ops.signature[top])
        shapes, types = _written(program.signatures[at]) if at >= 0 else ((), ())
        keys = ((name, phase, shapes, types), (name, phase, shapes), (name, phase), (name,))
        return Unit(name, keys, step, int(self._counts[top]))

    @cached_property
    def of_work(self) -> Rows:
        """Per work its unit, or -1."""
        return np.append(self.of_call, -1)[self.program.works.call]

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return max(1, len(self.program.steps))

    def in_step(self, step: int) -> list[int]:
        """The units of one step, in order."""
        return [at for at, unit in enumerate(self.units) if unit.step == step]


def _written(signature: Signature) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Shapes and types of an op's tensors."""
    known: tuple[tuple[object, ...], tuple[object, ...]] | None = signature.derived.get(Units)
    if known is None:
        known = tuple(map(_shape, signature.inputs)), tuple(map(_type, signature.inputs))
        signature.derived[Units] = known
    return known


def _shape(value: Value) -> object:
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(_shape, value)) if isinstance(value, tuple) else None


def _type(value: Value) -> object:
    if isinstance(value, Tensor):
        return value.dtype
    return tuple(map(_type, value)) if isinstance(value, tuple) else None


def matched(one: Units, other: Units) -> Rows:
    """Per unit of one program the unit of the other that it is, or -1; step by step, which repeat where there are fewer."""
    result = np.full(len(one.units), -1, dtype=np.int64)
    there = [other.in_step(step) for step in range(other.steps)]
    for step in range(one.steps):
        _match(one, other, one.in_step(step), there[step % other.steps], result)
    return result


def _match(one: Units, other: Units, here: Sequence[int], there: Sequence[int], result: Rows) -> None:
    left, free = list(here), list(there)
    for level in range(4):
        places: dict[Hashable, list[int]] = defaultdict(list)
        for at in reversed(free):
            places[_key(other.units[at], level)].append(at)
        for at in left:
            found = places.get(_key(one.units[at], level))
            if found:
                result[at] = found.pop()
        taken = set(result[left].tolist())
        left = [at for at in left if result[at] < 0]
        free = [at for at in free if at not in taken]


def _key(unit: Unit, level: int) -> Hashable:
    return unit.keys[min(level, len(unit.keys) - 1)]
