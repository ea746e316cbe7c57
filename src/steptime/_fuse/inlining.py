"""Which values are written to memory, and loops without the others, whose computation goes into every reader.

Inductor writes what a call reads, what leaves the graph, results of reductions, and what would otherwise be read from too many
places (`realize_reads_threshold` and `realize_acc_reads_threshold` of torch/_inductor/config.py). Between forward and backward
the partitioner computes again what costs no memory to keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from steptime._fuse.nodes import LoopKind, LoopNode, Read, Value

_READS, _READS_OF_ONE = 4, 8  # of a value with several readers, and with one
_SMALL = 8  # a read of so many times fewer elements costs nothing


@dataclass(frozen=True, slots=True)
class _Expression:
    """What a value that is not written is computed from, and by which functions."""

    reads: tuple[Read, ...]
    functions: Counter[str]
    ops: frozenset[tuple[int, str]]  # row and name of each


class Inlining:
    """Goes through nodes in order and decides about every value."""

    def __init__(self, nodes: Sequence[LoopNode], values: Sequence[Value]) -> None:
        self._nodes, self._values = nodes, values
        self._inside: dict[int, _Expression] = {}
        self.ops: dict[int, frozenset[tuple[int, str]]] = {}  # by node: rows and names of ops that went into it
        self._wanted = self._reachable()
        # Values that are there in backward: what it reads, as eager autograd has it.
        self._lasting = {
            number
            for number, value in enumerate(values)
            if any(nodes[reader].backward for reader in value.read_by if reader in self._wanted)
        }

    def _reachable(self) -> set[int]:
        """Nodes whose results somebody reads in the end, or that change what was there before."""
        wanted: set[int] = set()
        for number in range(len(self._nodes) - 1, -1, -1):
            node = self._nodes[number]
            leaves = node.kind is LoopKind.CALL or any(self._leaves(each) for each in node.writes)
            if leaves or any(reader in wanted for each in node.writes for reader in self._values[each].read_by):
                wanted.add(number)
        return wanted

    def _leaves(self, value: int) -> bool:
        """Whether a value is a result of the step: read by what is not compiled, or a single number that nothing reads."""
        known = self._values[value]
        return known.kept or (not known.read_by and known.tensor.numel == 1)

    def run(self) -> dict[int, LoopNode]:
        """Nodes that are left, by number, with reads of written values alone."""
        result: dict[int, LoopNode] = {}
        for number, node in enumerate(self._nodes):
            if number not in self._wanted:
                continue
            if node.kind is LoopKind.CALL:
                result[number] = node
                continue
            reads, functions, ops = self._expanded(node)
            if node.kind is LoopKind.POINTWISE and not any(self._written(each, node, reads) for each in node.writes):
                expression = _Expression(tuple(reads), functions, ops)
                self._inside.update(dict.fromkeys(node.writes, expression))
                continue
            self._lasting.update(each for each in node.writes if self._read_later(each, node))
            self.ops[number] = ops
            result[number] = replace(node, reads=reads, loop=replace(node.loop, functions=functions))
        return result

    def _expanded(self, node: LoopNode) -> tuple[list[Read], Counter[str], frozenset[tuple[int, str]]]:
        reads: dict[Read, None] = {}
        functions, ops = Counter(node.loop.functions), {(node.row, node.label)}
        for read in node.reads:
            inside = self._inside.get(read.value)
            if inside is None:
                reads[read] = None
                continue
            reads.update(dict.fromkeys(self._seen(each, read) for each in inside.reads))
            functions += inside.functions
            ops |= inside.ops
        return list(reads), functions, frozenset(ops)

    def _seen(self, leaf: Read, through: Read) -> Read:
        """A leaf as the reader of a value sees it: turned and cut as that is."""
        made, view = self._values[through.value].tensor, through.tensor
        if view is made or leaf.indirect:
            return leaf
        if leaf.tensor.shape == made.shape and leaf.tensor.strides == made.strides:
            return replace(leaf, tensor=replace(leaf.tensor, shape=view.shape, strides=view.strides))
        if view.numel < made.numel == leaf.tensor.numel:
            return replace(leaf, tensor=replace(leaf.tensor, shape=view.shape, strides=None))
        return leaf

    def _read_later(self, value: int, node: LoopNode) -> bool:
        return not node.backward and any(
            self._nodes[reader].backward for reader in self._values[value].read_by if reader in self._wanted
        )

    def _written(self, value: int, node: LoopNode, reads: Sequence[Read]) -> bool:
        """Whether the result of a loop goes to memory."""
        known = self._values[value]
        readers = [reader for reader in known.read_by if reader in self._wanted]
        if node.loop.atomic or node.after or self._leaves(value):
            return True
        for reader in readers:
            other = self._nodes[reader]
            if other.kind is LoopKind.CALL or value in other.after:
                return True
            if other.segment != node.segment and other.backward == node.backward:
                return True
        if len(reads) > _READS_OF_ONE or (len(readers) > 1 and len(reads) > _READS):
            return True
        return self._read_later(value, node) and not self._recomputed(value, node, reads)

    def _recomputed(self, value: int, node: LoopNode, reads: Sequence[Read]) -> bool:
        """Whether backward computes a value again: from what it reads anyway, or from one tensor that is smaller."""
        if node.loop.random or any(self._values[each.value].overwritten for each in reads):
            return False
        known = self._values[value]
        fresh = {each.value for each in reads if self._values[each.value].made_by >= 0} - self._lasting
        large = {each.value for each in reads if each.numel * _SMALL > known.tensor.numel}
        smaller = sum(self._values[each].nbytes for each in fresh) < known.nbytes
        if fresh and not (smaller and len(large) == 1):
            return False
        self._lasting |= fresh
        return True
