"""One table of a program's ops, made in one walk: what each op is and which tensors it takes and returns.

Device work, host costs, waits and memory read it instead of going through the program themselves. What depends on the name
alone is the catalogue's (`OpKind`), what depends on the arguments alone is kept with the signature (`Arguments`), so that ops
called alike, of one rank or of many, are looked at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from steptime._ops.catalogue import OpKind, Role, op_kind
from steptime._program.program import Program, Signature, Tensor, Value, WorkKind, tensors_in
from steptime._units import dtype_bytes

# (storage, bytes of memory) of a tensor; without a storage where none is recorded.
Touch = tuple[int | None, int]
NO_SIGNATURE = Signature()  # of an op whose arguments are not recorded


class Touches(NamedTuple):
    """What the arguments of an op lie in: per input, those that are read on the device, and those that come out."""

    by_input: tuple[tuple[Touch, ...], ...]
    read: tuple[Touch, ...]
    written: tuple[Touch, ...]


class Arguments:
    """The tensors among the arguments of an op, those in lists included."""

    __slots__ = ("by_input", "inputs", "longest_list", "on_cpu", "on_device", "outputs", "sparse", "touched")

    def __init__(self, signature: Signature) -> None:
        self.by_input: tuple[Sequence[Tensor], ...] = tuple(map(_tensors, signature.inputs))
        self.inputs: tuple[Tensor, ...] = tuple(chain.from_iterable(self.by_input))
        self.outputs: tuple[Tensor, ...] = tuple(chain.from_iterable(map(_tensors, signature.outputs)))
        self.sparse = self.on_device = False
        for tensor in self.inputs + self.outputs:
            if is_sparse(tensor):
                self.sparse = True
            elif tensor.device != "cpu":
                self.on_device = True
        self.longest_list, self.on_cpu, alone = 1, True, False
        for value in signature.inputs:
            if value.__class__ is Tensor:
                alone = True
                self.on_cpu &= value.device == "cpu"
            elif value.__class__ is tuple and len(value) > self.longest_list:
                self.longest_list = len(value)
        self.on_cpu &= alone  # whether tensors that stand alone are all of the CPU
        self.touched: Touches | None = None

    def touch(self) -> None:
        """Finds what is read on the device and what is written, for ops of which that matters."""
        if self.touched is None:
            by_input = tuple(tuple((each.storage, memory_bytes(each)) for each in tensors) for tensors in self.by_input)
            read = tuple((each.storage, memory_bytes(each)) for each in self.inputs if on_device(each))
            self.touched = Touches(by_input, read, tuple((each.storage, memory_bytes(each)) for each in self.outputs))

    def makes_something(self) -> bool:
        """Whether something on the device comes out that did not go in."""
        before = {tensor.storage for tensor in self.inputs}
        return any(on_device(tensor) and tensor.storage not in before for tensor in self.outputs)


class OpTable:
    """The ops of a program, row by row."""

    def __init__(self, program: Program) -> None:
        ops = program.ops
        self.program = program
        numbers, signatures = ops.name.tolist(), ops.signature.tolist()
        by_number = {number: op_kind(program.names[number]) for number in set(numbers)}
        self.kinds: list[OpKind] = [by_number[number] for number in numbers]
        self.names = [kind.name for kind in self.kinds]
        self.parents: list[int] = ops.parent.tolist()
        self.phases: list[int] = ops.phase.tolist()
        self.steps: list[int] = ops.step.tolist()
        self.signatures = [program.signatures[number] if number >= 0 else NO_SIGNATURE for number in signatures]
        of_signature = [arguments_of(signature) for signature in program.signatures]
        of_signature.append(arguments_of(NO_SIGNATURE))  # of the number -1
        self.arguments: list[Arguments] = [of_signature[number] for number in signatures]
        for kind, arguments in zip(self.kinds, self.arguments, strict=True):
            if kind.role not in (Role.NOTHING, Role.COMPOSITE):
                arguments.touch()
        self.children: list[Sequence[int]] = _children(self.parents)
        self.last = _last_inside(self.parents)
        # Ops around one of their own name: autocast shows an op twice.
        self.same_inside: dict[int, list[int]] = {}
        repeated = (ops.parent >= 0) & (ops.name[np.maximum(ops.parent, 0)] == ops.name)
        for row in np.flatnonzero(repeated).tolist():
            self.same_inside.setdefault(self.parents[row], []).append(row)

    def __len__(self) -> int:
        return len(self.parents)

    def outermost(self) -> list[int]:
        """Rows of ops that no op is around."""
        return [row for row, parent in enumerate(self.parents) if parent < 0]

    def launching_collectives(self) -> list[tuple[int, int]]:
        """(row of the op that launches it, row of the work) of every collective, in order of the ops."""
        calls, works = self.program.calls, self.program.works
        launched = np.flatnonzero((works.kind == WorkKind.COLLECTIVE) & (works.call >= 0))
        rows = calls.op[works.call[launched]] if len(calls) else launched
        pairs = sorted(zip(rows.tolist(), launched.tolist(), strict=True), key=lambda pair: pair[0])
        return [pair for pair in pairs if pair[0] >= 0]


def op_table(program: Program) -> OpTable:
    """The table of a program, made when it is first asked for and kept with the program."""
    kept = program.derived
    if OpTable not in kept:
        kept[OpTable] = OpTable(program)
    table: OpTable = kept[OpTable]
    return table


def arguments_of(signature: Signature) -> Arguments:
    """What a signature says about tensors, kept with it."""
    known: Arguments | None = signature.derived.get(Arguments)
    if known is None:
        known = signature.derived[Arguments] = Arguments(signature)
    return known


def _tensors(value: Value) -> Sequence[Tensor]:
    """Of one argument: most are a tensor, a number or a list of numbers."""
    if value.__class__ is Tensor:
        return (value,)
    if value.__class__ is tuple and any(each.__class__ is Tensor or each.__class__ is tuple for each in value):
        return tensors_in(value)
    return ()


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor lies in the memory of a device. A sparse tensor is recorded with an id and no memory at all."""
    return tensor.device != "cpu" and not is_sparse(tensor)


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor was recorded as sparse ones are. Where a source knows nothing of memory, it has no ids either."""
    return tensor.device is None and tensor.storage is None and tensor.id is not None


def memory_bytes(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor: what strides repeat counts once."""
    elements = math.prod(tensor.shape)
    if tensor.strides is not None and 0 in tensor.strides and elements:
        for size, stride in zip(tensor.shape, tensor.strides, strict=False):
            elements = elements // size if stride == 0 else elements
    return elements * dtype_bytes(tensor.dtype)


def _children(parents: Sequence[int]) -> list[Sequence[int]]:
    result: list[Sequence[int]] = [()] * len(parents)
    for row, parent in enumerate(parents):
        if parent >= 0:
            below = result[parent]
            if isinstance(below, list):
                below.append(row)
            else:
                result[parent] = [row]
    return result


def _last_inside(parents: Sequence[int]) -> list[int]:
    """Per op, the last op inside it, or itself."""
    last = list(range(len(parents)))
    for row in range(len(parents) - 1, -1, -1):
        parent = parents[row]
        if parent >= 0 and last[row] > last[parent]:
            last[parent] = last[row]
    return last
