"""Which op encloses which, and which part of the step it belongs to, from times on one thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from steptime._program.program import IntColumn, KindColumn, Phase, SmallColumn

# Names of the ranges in which autograd runs a node of the graph, and an optimiser its step.
ENGINE = "autograd::engine::evaluate_function"
OPTIMIZER = ("Optimizer.step", "Optimizer.zero_grad")


def nest(thread: IntColumn, start: IntColumn, end: IntColumn) -> SmallColumn:
    """The innermost enclosing span of each span, or -1. Rows must be sorted by (start, -end).

    Spans that cross instead of nesting (seen where clocks of two sources differ by a few nanoseconds) become siblings.
    """
    parents = [-1] * len(start)
    stacks: dict[int, list[int]] = {}
    ends = end.tolist()
    for row, (lane, finish) in enumerate(zip(thread.tolist(), ends, strict=True)):
        stack = stacks.setdefault(lane, [])
        while stack and ends[stack[-1]] < finish:
            stack.pop()
        if stack:
            parents[row] = stack[-1]
        stack.append(row)
    return _drop_disjoint(np.array(parents, dtype=np.int32), start, end)


def _drop_disjoint(parents: SmallColumn, start: IntColumn, end: IntColumn) -> SmallColumn:
    """A span that begins when its would-be parent has ended is no child of it: look further out."""
    while True:
        wrong = np.flatnonzero((parents >= 0) & (end[parents] <= start) & (end > start))
        if not len(wrong):
            return parents
        parents[wrong] = parents[parents[wrong]]


def innermost(
    op_thread: npt.NDArray[np.integer], op_start: IntColumn, op_end: IntColumn, parent: SmallColumn,
    thread: IntColumn, start: IntColumn, end: IntColumn,
) -> SmallColumn:  # fmt: skip
    """For each given span, the innermost op around it on the same thread, or -1. Ops are sorted by start."""
    result = np.full(len(start), -1, dtype=np.int32)
    for lane in np.unique(thread):
        ops = np.flatnonzero(op_thread == lane)
        spans = np.flatnonzero(thread == lane)
        if not len(ops):
            continue
        at = np.searchsorted(op_start[ops], start[spans], side="right") - 1
        candidate = np.where(at >= 0, ops[np.maximum(at, 0)], -1).astype(np.int32)
        while True:
            outside = (candidate >= 0) & (op_end[candidate] < end[spans])
            if not outside.any():
                break
            candidate[outside] = parent[candidate[outside]]
        result[spans] = candidate
    return result


def phases(names: Sequence[str], name: SmallColumn, parent: SmallColumn, backward_thread: npt.NDArray[np.bool_]) -> KindColumn:
    """The phase of every op: backward on autograd's threads or under its engine, optimiser under its step, else forward."""
    by_name = np.full(len(names), -1, dtype=np.int8)
    for index, text in enumerate(names):
        if text.startswith(OPTIMIZER):
            by_name[index] = Phase.OPTIMIZER
        elif text.startswith(ENGINE):
            by_name[index] = Phase.BACKWARD
    result = np.where(backward_thread, np.int8(Phase.BACKWARD), by_name[name]).tolist()
    for row, above in enumerate(parent.tolist()):
        if result[row] < 0:
            result[row] = result[above] if above >= 0 else int(Phase.FORWARD)
    return np.array(result, dtype=np.int8)
