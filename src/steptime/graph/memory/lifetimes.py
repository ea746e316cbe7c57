"""When the storages of a step live, read from the arguments of its ops.

An execution trace names a storage by the address of its memory, which later storages take over: every op that returns a storage
it was not given starts a new life of that name. A life ends with the last op that takes the storage; what autograd saves is
taken by the backward op, so activations last until then. A storage that is taken before anything in the step returned it was
there before the step and stays: parameters, optimiser state, gradient buckets, inputs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from steptime.graph.program import Phase, Program, Tensor, Value

_BEFORE = -1
# They return parts of a sparse tensor, whose own storages a trace does not name.
_PARTS_OF_SPARSE = frozenset(("aten::_values", "aten::_indices", "aten::values", "aten::indices"))
_BUCKET_OPS = frozenset(("c10d::allreduce_",))
_ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_UNKNOWN_ITEM_BYTES = 4
# What a sort takes while it runs, of which no op tells: positions of 64 bits to sort along, and room for another copy of keys
# and positions, which a radix sort goes back and forth between (aten/src/ATen/native/cuda/Sort.cpp, cub::DeviceRadixSort).
_SORTS = frozenset(("aten::sort",))
_POSITION_BYTES = 8


class Role(IntEnum):
    """What a storage is to the step."""

    PASSING = 0  # made and dropped within the step: activations, temporaries, gradients that are dropped before the next step
    STATE = 1  # there before the step, and the optimiser takes it: parameters, optimiser state, tables
    BUCKET = 2  # there before the step, and reduced over ranks: what gradients are copied to
    INPUT = 3  # there before the step, and only forward or backward take it: inputs, masks, frozen weights, buffers


@dataclass(frozen=True, slots=True)
class Storage:
    """Memory that ops share; rows are those of `Program.ops`."""

    nbytes: int
    born: int  # the op that makes it; -1: before the step
    dies: int  # the last op that takes it; the number of ops: it is there when the step ends
    role: Role


@dataclass(slots=True)
class _Life:
    born: int
    dies: int = 0
    nbytes: int = 0
    phases: set[Phase] = field(default_factory=set)
    reduced: bool = False

    def storage(self, ops: int) -> Storage:
        if self.born == _BEFORE:
            role = Role.BUCKET if self.reduced else Role.STATE if Phase.OPTIMIZER in self.phases else Role.INPUT
            return Storage(self.nbytes, _BEFORE, ops, role)
        # A gradient is dropped where the next step begins, not where the optimiser has read it.
        gradient = {Phase.BACKWARD, Phase.OPTIMIZER} <= self.phases
        return Storage(self.nbytes, self.born, ops if gradient else self.dies, Role.PASSING)


def storages(program: Program) -> tuple[Storage, ...]:
    """Every storage on the device that the ops of a program of one step name, as they are seen; then what sorts take beside."""
    arguments = _Arguments(program)
    last = _last_rows(program.ops.parent.tolist())
    births = _births(program, arguments)
    phases = [Phase(phase) for phase in program.ops.phase.tolist()]
    buckets = {row for row, name in enumerate(program.names) if name in _BUCKET_OPS}
    names = program.ops.name.tolist()
    lives: dict[tuple[int, int], _Life] = {}
    for row, phase in enumerate(phases):
        for taken, tensors in ((True, arguments.inputs(row)), (False, arguments.outputs(row))):
            for tensor in tensors:
                born = _life_of(births.get(_name(tensor), ()), row if taken else last[row], before=row if taken else None)
                life = lives.setdefault((_name(tensor), born), _Life(born))
                life.nbytes = max(life.nbytes, extent_bytes(tensor))
                life.dies = max(life.dies, last[row])
                life.phases.add(phase)
                life.reduced |= names[row] in buckets
    return (*(life.storage(len(phases)) for life in lives.values()), *_sorting(program, arguments, last))


def _sorting(program: Program, arguments: _Arguments, last: Sequence[int]) -> Iterator[Storage]:
    """What sorts take for themselves."""
    sorts = {row for row, name in enumerate(program.names) if name in _SORTS}
    for row, name in enumerate(program.ops.name.tolist()):
        if name in sorts and arguments.inputs(row):
            keys = arguments.inputs(row)[0]
            positions = _POSITION_BYTES * keys.numel
            yield Storage(2 * positions + item_bytes(keys) * keys.numel, row, last[row], Role.PASSING)


def extent_bytes(tensor: Tensor) -> int:
    """From the begin of the storage to the end of the tensor."""
    if tensor.numel == 0:
        return 0
    elements = tensor.numel
    if tensor.strides is not None:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=False))
    return (tensor.offset + elements) * item_bytes(tensor)


def item_bytes(tensor: Tensor) -> int:
    """Of one element."""
    return _ITEM_BYTES.get(tensor.dtype, _UNKNOWN_ITEM_BYTES)


class _Arguments:
    """The tensors with memory on a device that each op takes and returns; ops called alike share the answer."""

    def __init__(self, program: Program) -> None:
        self._signature = program.ops.signature.tolist()
        self._inputs = [tuple(_tensors(each.inputs)) for each in program.signatures]
        self._outputs = [tuple(_tensors(each.outputs)) for each in program.signatures]

    def inputs(self, row: int) -> Sequence[Tensor]:
        return self._inputs[self._signature[row]] if self._signature[row] >= 0 else ()

    def outputs(self, row: int) -> Sequence[Tensor]:
        return self._outputs[self._signature[row]] if self._signature[row] >= 0 else ()


def _tensors(value: Value) -> Iterator[Tensor]:
    if isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Tensor) and value.storage is not None and value.numel and (value.device or "").startswith("cuda"):
        yield value


def _name(tensor: Tensor) -> int:
    assert tensor.storage is not None
    return tensor.storage


def _last_rows(parents: Sequence[int]) -> list[int]:
    """Per op, the last op inside it, or itself."""
    last = list(range(len(parents)))
    for row in range(len(parents) - 1, -1, -1):
        if parents[row] >= 0:
            last[parents[row]] = max(last[parents[row]], last[row])
    return last


def _births(program: Program, arguments: _Arguments) -> dict[int, list[int]]:
    """Per name, the rows of the ops that made a storage of it, ascending; of nested ops the innermost counts."""
    parents = program.ops.parent.tolist()
    views = {row for row, name in enumerate(program.names) if name in _PARTS_OF_SPARSE}
    inside: dict[int, set[int]] = defaultdict(set)
    found: dict[int, list[int]] = defaultdict(list)
    for row in range(len(parents) - 1, -1, -1):
        below = inside.pop(row, set())
        given = {_name(tensor) for tensor in arguments.inputs(row)}
        made = {_name(tensor) for tensor in arguments.outputs(row)} - given - below
        if program.ops.name[row] not in views:
            for name in made:
                found[name].append(row)
            below |= made
        if parents[row] >= 0:
            inside[parents[row]] |= below
    return {name: rows[::-1] for name, rows in found.items()}


def _life_of(births: Sequence[int], row: int, before: int | None) -> int:
    """The birth of the life that an op at that row sees. What an op takes was there `before` it made anything."""
    place = bisect_right(births, row) - 1
    if place >= 0 and births[place] == before:
        place -= 1
    return births[place] if place >= 0 else _BEFORE
