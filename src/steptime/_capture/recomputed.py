"""Checkpoints that stop early: what they compute again ends in an error that they raise inside an op.

PyTorch's observer of traces writes no op that ends so, and takes what comes after it in its thread for being inside
(onFunctionExit in torch/csrc/profiler/standalone/execution_trace_observer.cpp). Ranges around what is recomputed, and right
after it, say how many ops it lost, and so what really is around each op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from steptime._program.execution import ExecutionTrace, Node

AGAIN = "steptime:recomputed"
"""The range around what a checkpoint computes again."""

KEPT = "steptime:kept"
"""The range in which a selective checkpoint answers an op: by what it kept, if no op is inside."""

AFTER = "steptime:resumed"
"""The one right after it."""


def parents(trace: ExecutionTrace) -> list[int]:
    """Per node, the row of the op that really is around it, or -1."""
    result = list(trace.parents)
    if not any(node.name == AFTER for node in trace.nodes):
        return result
    threads: dict[int, _Thread] = defaultdict(_Thread)
    # A number that no node has may be a tensor's: those of lost ops are named by what is inside them, or taken to be.
    lost = sorted({node.parent for node in trace.nodes} - {node.id for node in trace.nodes})
    thread: dict[int, int] = {}  # of a node; ranges of this package's own say none
    for row in sorted(range(len(result)), key=lambda row: trace.nodes[row].id):
        node = trace.nodes[row]
        thread[node.id] = thread.get(node.parent, node.tid)
        result[row] = threads[thread[node.id]].begin(row, node, lost)
    return result


@dataclass(slots=True)
class _Thread:
    """What is open in a thread: as the observer has it, by id, and really, by row."""

    seen: list[int] = field(default_factory=lambda: [-1])
    real: list[int] = field(default_factory=lambda: [-1])
    again: list[tuple[int, int, int]] = field(default_factory=list)  # id, and how much of both was open around it

    def begin(self, row: int, node: Node, lost: Sequence[int]) -> int:
        """Opens a node, and says which row is around it."""
        if node.name == AFTER and self.again:
            self._lose(node, lost)
        elif node.parent in self.seen:
            self._close(len(self.seen) - 1 - self.seen[::-1].index(node.parent))
        elif self.again and node.parent > self.again[-1][0]:  # inside an op that was lost: not known but for that
            self._close(self.again[-1][1])
        else:
            self._close(0)
        around = self.real[-1]
        if node.name == AGAIN:
            self.again.append((node.id, len(self.seen), len(self.real)))
        self.seen.append(node.id)
        self.real.append(row)
        return around

    def _close(self, to: int) -> None:
        """All above this place."""
        ended = len(self.seen) - 1 - to
        del self.seen[to + 1 :]
        del self.real[max(1, len(self.real) - ended) :]

    def _lose(self, node: Node, lost: Sequence[int]) -> None:
        """A recomputation has ended: the observer has closed one op of those it believes to be open, really all are closed."""
        begun, seen, real = self.again.pop()
        del self.seen[seen:], self.real[real:]
        self.seen += [number for number in (begun, *lost) if begun <= number <= node.parent]
