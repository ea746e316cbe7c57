"""What the observer wrote and what the dispatch mode noted become an `ExecutionTrace` as a GPU's would be.

Left out is what the modes themselves do. Tensors are put on `cuda:0`, storages are told apart by what was noted, backward gets
the thread that it has where there is a device, and sums that autograd writes over their first argument are written so: with a
mode active PyTorch makes a new tensor for them. Nodes, tensors and storages are numbered in order of appearance, since those of
the observer depend on where memory happens to lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from steptime._capture.recomputed import AFTER, AGAIN, KEPT
from steptime._capture.recomputed import parents as real_parents
from steptime._program.execution import ExecutionTrace, Node
from steptime._program.nesting import ENGINE
from steptime._program.program import DEFAULT_SWITCHES, Signature, Switches, Tensor, Value, tensors_in

LEAF = "steptime:leaf:"
"""Begins the name of the range in which an op below autograd is answered; its number follows."""

HOST = "steptime:host:"
"""Begins the name of the range in which an op that has nothing to do with the device is called again, below the mode."""

LOADING = "steptime_loading"
"""The range in which a data loader makes the next batch: what it does on the host is left out."""

MODE = "PythonDispatchMode"
"""PyTorch's own record of calling a dispatch mode; what is inside it is of the op around."""

# Gradients of index_select and gather, summed up in zeros (autograd/FunctionsManual.cpp; native/TensorAdvancedIndexing.cpp).
_INTO_ZEROS = frozenset(("aten::index_add", "aten::scatter_add"))
# The gradient of what selects values, as a maximum or `topk` do, written into zeros (native/ReduceOps.cpp).
_SELECTED = ("aten::scatter", "aten::value_selecting_reduction_backward")
# The gradient of indexing (FunctionsManual.cpp, index_backward).
_INDEX_BACKWARD, _INDEX_PUT, _PUT_INTO = "IndexBackward0", "aten::index_put", "aten::_index_put_impl_"
_COPY_FLAG = {"aten::copy_": 2, "aten::_to_copy": 5}  # place of `non_blocking`
_META, _DEVICE = "meta", "cuda:0"
_MAIN, _BACKWARD = 1, 2
_FIRST_NODE = 2  # 1 is the process


@dataclass(slots=True)
class Note:
    """One op below autograd: the storages of the tensors it takes and makes, in order."""

    name: str
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    over: bool = False  # nobody else holds its first argument, so that a sum of gradients can be written over it
    switches: Switches = DEFAULT_SWITCHES
    wraps: bool = False  # its tensors wrap those that other ops take
    reads: int = -1  # of a kernel that a compiler wrote: how many of its tensors are read, the rest are written
    pageable: bool = False  # a copy that the host waits for whatever it says: its memory is not pinned


@dataclass(frozen=True)
class Assembled:
    """A captured step."""

    trace: ExecutionTrace
    storages: Mapping[int, int]  # of the device, by address: their numbers in the trace


def assembled(trace: ExecutionTrace, notes: Sequence[Note]) -> Assembled:
    """The trace of a captured step, as one of a step on a GPU would be."""
    tree = _Tree(trace, notes)
    values = _Values(tree)
    nodes = tuple(_node(index, row, values.at(index)) for index, row in enumerate(tree.rows))
    # Parents that the reader did not find are those of `recomputed`.
    parents = tuple(row.parent for row in tree.rows)
    return Assembled(replace(trace, nodes=nodes, parents=parents, warnings=()), values.of_device())


@dataclass(slots=True)
class _Row:
    """A node that stays."""

    node: Node
    name: str
    parent: int
    backward: bool
    note: Note | None = None
    over: bool = False  # returns what it is given first
    more: tuple[Value, ...] = ()  # arguments besides those recorded
    blocking: int = 0  # place of the argument that says that a copy does not block, where it does so all the same


class _Tree:
    """The nodes that stay, in order, each with the note that belongs to it."""

    def __init__(self, trace: ExecutionTrace, notes: Sequence[Note]) -> None:
        self.rows: list[_Row] = []
        self._trace, self._notes = trace, notes
        self._children: dict[int, list[int]] = {-1: []}
        above = real_parents(trace)
        for row, parent in enumerate(above):
            self._children.setdefault(parent, []).append(row)
        self._kept = frozenset(self._answered(above))
        for row in self._children[-1]:
            self._visit(row, -1)

    def _visit(self, at: int, parent: int) -> None:
        node = self._trace.nodes[at]
        if node.name.startswith(LEAF):
            self._attach(self._notes[int(node.name[len(LEAF) :])], parent)
            return
        inside = self._children.get(at, [])
        if node.name == LOADING:
            inside = [child for child in inside if any(True for _ in self._noted(child))]
        elif node.name.startswith(HOST):
            # The op again, as the mode called it: what it is made of belongs to the op.
            note = self._notes[int(node.name[len(HOST) :])]
            op = self._named(note.name, parent)
            if op >= 0:
                self.rows[op].note = note
            inside = [child for again in inside for child in self._children.get(again, ())]
        elif node.name not in (AGAIN, AFTER, KEPT) and at not in self._kept:
            backward = node.name.startswith(ENGINE) or (parent >= 0 and self.rows[parent].backward)
            self.rows.append(_Row(node, node.name, parent, backward))
            parent = len(self.rows) - 1
        if node.name == _INDEX_PUT and self._around(parent) == _INDEX_BACKWARD:
            self._put(at, parent)
            return
        for child in inside:
            self._visit(child, parent)

    def _answered(self, above: Sequence[int]) -> Iterator[int]:
        """Ops that a checkpoint does not compute again, and those that are made of one."""
        for at, node in enumerate(self._trace.nodes):
            if node.name == KEPT and not any(True for _ in self._noted(at)):
                row = above[at]
                while row >= 0 and "::" in self._trace.nodes[row].name:
                    yield row
                    row = above[row]

    def _around(self, at: int) -> str:
        above = self.rows[at].parent
        return self.rows[above].name if above >= 0 else ""

    def _put(self, at: int, parent: int) -> None:
        """The gradient of indexing: written into zeros on a device, into a copy of them where a mode is active."""
        inside = [self._notes[number] for number in self._noted(at)]
        row = self.rows[parent]
        row.name, row.over, row.more = _PUT_INTO, True, (True,)  # unsafe: indices are known to be within bounds
        zeros = next(note.inputs[1:2] for note in inside if note.name == "aten::copy_")
        row.note = Note(_PUT_INTO, zeros, inside[-1].outputs[:1])

    def _noted(self, at: int) -> Iterator[int]:
        for child in self._children.get(at, ()):
            name = self._trace.nodes[child].name
            if name.startswith(LEAF):
                yield int(name[len(LEAF) :])
            else:
                yield from self._noted(child)

    def _named(self, name: str, at: int) -> int:
        """The nearest op of a name around, or -1: a range of autograd may lie between."""
        while at >= 0 and self.rows[at].name != name:
            at = self.rows[at].parent
        return at

    def _attach(self, note: Note, at: int) -> None:
        """Gives a note to its op."""
        at = self._named(note.name, at)
        if at < 0:
            return
        row = self.rows[at]
        row.note = note
        if note.pageable:
            row.blocking = _COPY_FLAG[row.name]
            above = row.parent
            if above >= 0 and self.rows[above].name in _COPY_FLAG:
                self.rows[above].blocking = _COPY_FLAG[self.rows[above].name]
        around = self._around(at)
        summed = note.over and around.startswith(ENGINE)
        into_zeros = note.name in _INTO_ZEROS and row.backward and "backward" in around.lower()
        if summed or into_zeros or (note.name, around) == _SELECTED:
            row.name, row.over = f"{note.name}_", True


# The observer gives the number of a tensor again once that is gone and no op below autograd has taken it, as happens to sharded
# tensors, which wrap those that ops take.
_Key = tuple[int | None, tuple[int, ...], str]


def _key(tensor: Tensor) -> _Key:
    return tensor.id, tensor.shape, tensor.dtype


class _Values:
    """Arguments with devices and storages as on a GPU."""

    def __init__(self, tree: _Tree) -> None:
        self._storage: dict[_Key, list[tuple[int, int]]] = {}  # of a tensor: rows from which on it has which
        self._row = self._last = 0
        self._wraps = any(row.note is not None and row.note.wraps for row in tree.rows)
        self._ends = list(range(len(tree.rows)))  # per row, the last one inside it
        for index in range(len(tree.rows) - 1, 0, -1):
            above = tree.rows[index].parent
            if above >= 0:
                self._ends[above] = max(self._ends[above], self._ends[index])
        self._same: dict[int, int] = {}  # a storage that another one stands for
        self._numbers: dict[tuple[str, int], int] = {}  # of storages
        self._tensors: dict[int, int] = {}
        self._forward: dict[int, int] = {}  # calls that autograd has nodes for
        for index, row in enumerate(tree.rows):
            if row.note is not None:
                self._learn(index, row.node.signature, row.note, over=row.over)

    def _learn(self, row: int, signature: Signature, note: Note, *, over: bool) -> None:
        if over:
            self._same[note.outputs[0]] = note.inputs[0]
        for values, storages in ((signature.inputs, note.inputs), (signature.outputs, note.outputs)):
            for tensor, storage in zip(tensors_in(values), storages, strict=False):
                if tensor.id is not None:
                    known = self._storage.setdefault(_key(tensor), [])
                    if not known or known[-1][1] != storage:  # other data is put in its place (`tensor.data = ...`)
                        known.append((row, storage))

    def at(self, row: int) -> _Values:
        """The same as the op of this row sees it."""
        self._row, self._last = row, self._ends[row]
        return self

    def _storage_of(self, tensor: Tensor, *, later: bool) -> int | None:
        """The storage of a tensor, also where a `later` op is the first to say it."""
        known = self._storage.get(_key(tensor))
        if not known:
            return None
        # Ops made of others are seen before those inside them.
        inside = next((storage for row, storage in known if self._row < row <= self._last), None)
        if inside is not None:
            return inside
        first = known[0][1] if later else None
        return next((storage for row, storage in reversed(known) if row <= self._row), first)

    def of(self, value: Value) -> Value:
        """The argument as a GPU would show it."""
        if isinstance(value, tuple):
            return tuple(map(self.of, value))
        if not isinstance(value, Tensor):
            return _DEVICE if value == _META else value
        number: int | None
        of_host = value.device != _META
        storage = self._storage_of(value, later=not of_host)
        while storage in self._same:
            storage = self._same[storage]
        sparse = value.storage is None  # its memory is that of its parts
        if of_host and not sparse and storage is None:  # made on the way within an op; the next one takes its memory
            return replace(value, id=None, storage=None)
        tensor = None if value.id is None else _numbered(self._tensors, value.id)
        if of_host:
            return replace(value, id=tensor, storage=None if sparse or storage is None else self._number("cpu", storage))
        if storage is not None:
            number = self._number(_DEVICE, storage)
        else:
            # What no op below autograd takes or makes: a tensor that wraps one has no memory of its own; an argument of a
            # function written in Python is known by its own number alone.
            number = None if self._wraps else self._number("tensor", value.id or 0)
        return Tensor(value.shape, value.dtype, value.strides, tensor, number, value.offset, _DEVICE)

    def sequence(self, number: int) -> int:
        """Autograd's number of a call, which counts from the beginning of the process; -1: it has none."""
        return number if number < 0 else _numbered(self._forward, number)

    def of_device(self) -> dict[int, int]:
        """Numbers of storages, by address."""
        return {storage: number for (where, storage), number in self._numbers.items() if where == _DEVICE}

    def _number(self, where: str, storage: int) -> int:
        return _numbered(self._numbers, (where, storage))


def _numbered(numbers: dict[Any, int], name: object) -> int:
    """The number of a name, in order of appearance."""
    return numbers.setdefault(name, len(numbers))


def _node(index: int, row: _Row, values: _Values) -> Node:
    inputs = (*map(values.of, row.node.signature.inputs), *row.more)
    if row.blocking:
        inputs = (*inputs[: row.blocking], False, *inputs[row.blocking + 1 :])
    if row.note is not None and row.note.reads >= 0:
        inputs = (inputs[: row.note.reads], inputs[row.note.reads : -1], inputs[-1])
    outputs = inputs[:1] if row.over else tuple(map(values.of, row.node.signature.outputs))
    tid, forward = (_BACKWARD, _MAIN) if row.backward else (_MAIN, 0)
    switches = DEFAULT_SWITCHES if row.note is None else row.note.switches
    node = row.node
    signature = Signature(inputs, outputs, switches)
    number, sequence = _FIRST_NODE + index, values.sequence(node.seq_id)
    return Node(number, row.name, _FIRST_NODE + row.parent, number, sequence, tid, forward, signature, node.comm)
