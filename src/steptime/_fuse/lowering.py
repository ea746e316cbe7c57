"""`Lowering`: ops to nodes, as Inductor lowers and decomposes them.

An op that is not known here stays as it is: a call of PyTorch's own kernel, which the compiler falls back to as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from steptime._fuse.nodes import Loop, LoopKind, LoopNode, Read, Value
from steptime._ops.table import on_device, op_table
from steptime._program.program import Program, Signature, Tensor, tensors_in
from steptime._program.program import Value as Argument

_IMAGE = 4  # dimensions


class Op:
    """One op that launches: its row, arguments and results."""

    def __init__(self, row: int, signature: Signature, *, channels_last: bool) -> None:
        self.row, self.signature, self.args = row, signature, signature.inputs
        self.inputs, self.outputs = _there(signature.inputs), _there(signature.outputs)
        if channels_last:
            self.inputs, self.outputs = (list(map(as_channels_last, each)) for each in (self.inputs, self.outputs))

    def argument(self, place: int) -> Argument:
        """What stands at a place, or None."""
        return self.args[place] if place < len(self.args) else None

    def tensor(self, place: int) -> Tensor | None:
        """The tensor at a place, if there is one."""
        value = self.argument(place)
        return value if isinstance(value, Tensor) else None


class Lowering:
    """Nodes and values of a program's ops; `add` takes ops in order."""

    def __init__(self, program: Program, handler: Callable[[str], Handler | None], *, channels_last: bool = False) -> None:
        """`channels_last`: images lie so, whatever layout the eager ops had."""
        self._table = op_table(program)
        self._handler, self.channels_last = handler, channels_last
        self.nodes: list[LoopNode] = []
        self.values: list[Value] = []
        self._current: dict[int, int] = {}  # storage -> the value that is there
        self._segment, self._backward, self._temporaries = 0, False, 0

    def add(self, row: int, segment: int, *, backward: bool, known: bool = True) -> None:
        """Lowers one op; one that no model knows stays as it is."""
        self._segment, self._backward = segment, backward
        kind, signature = self._table.kinds[row], self._table.signatures[row]
        op = Op(row, signature, channels_last=self.channels_last)
        handler = self._handler(kind.plain) if known and kind.aten else None
        if handler is None or not op.outputs or any(tensor.device == "cpu" and tensor.shape for tensor in tensors_in(op.args)):
            self.call(op, kind.plain)
        else:
            handler(self, kind.plain, op)

    def touch(self, row: int) -> None:
        """An op that is not compiled: what it reads is kept, and what it writes is made by nobody here."""
        arguments = self._table.arguments[row]
        for tensor in arguments.inputs:
            if on_device(tensor):
                self.values[self.value(tensor)].kept = True
        for tensor in arguments.outputs:
            if on_device(tensor) and tensor not in arguments.inputs:
                self._new(tensor, -1)

    # Values

    def value(self, tensor: Tensor) -> int:
        """The value that is in a tensor's memory."""
        key = key_of(tensor)
        if key not in self._current:
            self._current[key] = self._new(tensor, -1)
        return self._current[key]

    def _new(self, tensor: Tensor, node: int) -> int:
        self.values.append(Value(tensor, node))
        before = self._current.get(key_of(tensor))
        if before is not None:
            self.values[before].overwritten = True
        self._current[key_of(tensor)] = len(self.values) - 1
        return len(self.values) - 1

    def read(self, tensor: Tensor, *, indirect: bool = False) -> Read:
        """That a tensor is read."""
        return Read(self.value(tensor), tensor, indirect)

    # Nodes

    def node(self, kind: LoopKind, op: Op, label: str, reads: Sequence[Read], writes: Sequence[Tensor], loop: Loop) -> LoopNode:
        """Adds a node; what it writes are new values, which follow what was in their memory if they fill a part of it."""
        number = len(self.nodes)
        read = {each.value for each in reads}
        after = []
        for tensor in writes:
            before = self._current.get(key_of(tensor))
            if before is None or before in read:
                continue
            if loop.atomic or tensor.numel < self.values[before].tensor.numel:
                after.append(before)
        for each in {*read, *after}:
            self.values[each].read_by.append(number)
        made = [self._new(each, number) for each in writes]
        node = LoopNode(kind, op.row, label, self._segment, self._backward, list(reads), made, loop, tuple(after))
        self.nodes.append(node)
        return node

    def call(self, op: Op, label: str, signature: Signature | None = None) -> None:
        """A call that stays, with its own arguments or others. What it writes in place is a new value."""
        taken, given = (op.inputs, op.outputs) if signature is None else (_there(signature.inputs), _there(signature.outputs))
        node = self.node(LoopKind.CALL, op, label, [self.read(each) for each in taken], given, Loop())
        node.signature = signature

    def made_here(self, tensor: Tensor) -> bool:
        """Whether a node makes what is in a tensor's memory."""
        return self.values[self.value(tensor)].made_by >= 0

    def loop(self, op: Op, label: str, inputs: Sequence[Tensor], output: Tensor, functions: Counter[str]) -> None:
        """One loop over the elements of a result."""
        reads = list(dict.fromkeys(map(self.read, inputs)))
        self.node(LoopKind.POINTWISE, op, label, reads, [output], Loop(output.numel, functions=functions))

    def temporary(self, like: Tensor, shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
        """A tensor between two nodes of one op. Its memory has a number of its own, below those of storages."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        self._temporaries += 1
        number = -(1 << 40) - self._temporaries
        return Tensor(shape, dtype, tuple(reversed(strides)), number, number, 0, like.device)

    def reduce(self, op: Op, label: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], loop: Loop) -> None:
        """One reduction, or several of the same data."""
        reads = list(dict.fromkeys(map(self.read, inputs)))
        cost = loop.functions or Counter(plain=1)
        self.node(LoopKind.REDUCTION, op, label, reads, outputs, replace(loop, functions=cost, reductions=len(outputs)))


def _there(values: Sequence[Argument]) -> list[Tensor]:
    return [each for each in tensors_in(tuple(values)) if on_device(each)]


def as_channels_last(tensor: Tensor) -> Tensor:
    """An image whose channels lie side by side; anything else as it is."""
    if len(tensor.shape) != _IMAGE:
        return tensor
    _, channels, height, width = tensor.shape
    return replace(tensor, strides=(height * width * channels, 1, width * channels, channels))


def key_of(tensor: Tensor) -> int:
    """The memory of a tensor: its storage, or itself where none is recorded."""
    return tensor.storage if tensor.storage else -1 - (tensor.id or 0)


Handler = Callable[[Lowering, str, Op], None]
