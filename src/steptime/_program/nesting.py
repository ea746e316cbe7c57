"""Which op encloses which, and which part of the step it belongs to, from times on one thread."""

from __future__ import annotations

from bisect import bisect_right
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


def phases(
    names: Sequence[str],
    name: SmallColumn,
    parent: SmallColumn,
    backward_thread: npt.NDArray[np.bool_],
    sequence: npt.NDArray[np.integer],
) -> KindColumn:
    """The phase of every op: backward on autograd's threads or under its engine, optimiser under its step, else forward.

    Rows are in order of start. A closure that an optimiser calls (Lightning, L-BFGS) is no part of its step.
    """
    by_name = np.full(len(names), -1, dtype=np.int8)
    for index, text in enumerate(names):
        if text.startswith(OPTIMIZER):
            by_name[index] = Phase.OPTIMIZER
        elif text.startswith(ENGINE):
            by_name[index] = Phase.BACKWARD
    named = by_name[name]
    result = np.where(backward_thread, np.int8(Phase.BACKWARD), named).tolist()
    for row, above in enumerate(parent.tolist()):
        if result[row] < 0:
            result[row] = result[above] if above >= 0 else int(Phase.FORWARD)
    if Phase.OPTIMIZER in by_name and Phase.BACKWARD in by_name:
        _find_closures(result, named.tolist(), parent.tolist(), sequence.tolist())
    return np.array(result, dtype=np.int8)


def _find_closures(phase: list[int], named: list[int], parent: list[int], sequence: list[int]) -> None:
    """Gives forward passes within optimisers' steps their phase: from where gradients are cleared, or from the first op that
    autograd numbers, which it does where gradients are on, to the backward pass."""
    last = list(range(len(phase)))  # row inside each op
    for row in range(len(phase) - 1, 0, -1):
        if parent[row] >= 0:
            last[parent[row]] = max(last[parent[row]], last[row])
    engine = [row for row, each in enumerate(named) if each == Phase.BACKWARD]
    for step, each in enumerate(named):
        if each != Phase.OPTIMIZER:
            continue
        end = engine[bisect_right(engine, last[step]) - 1] if engine[0] <= last[step] else -1
        row, forward = step + 1, False
        while row < end:
            if named[row] == Phase.OPTIMIZER:
                row, forward = last[row], True
            elif phase[row] != Phase.OPTIMIZER:
                forward = False
            else:
                forward = forward or sequence[row] >= 0
                phase[row] = int(Phase.FORWARD if forward else Phase.OPTIMIZER)
            row += 1
