"""What the host did outside every op before a call: Python, data loading, logging, and whatever else no profiler names."""

from __future__ import annotations

import numpy as np

from steptime._program.program import IntColumn, Program

HOST_CODE = "Python and other host code"


def outside_ops_ns(program: Program) -> IntColumn:
    """Per call of a recorded program, the time outside all ops since its thread's last call, or since it was handed over."""
    if outside_ops_ns not in program.derived:
        program.derived[outside_ops_ns] = _outside(program)
    result: IntColumn = program.derived[outside_ops_ns]
    return result


def _outside(program: Program) -> IntColumn:
    calls, ops = program.calls, program.ops
    result = np.zeros(len(calls), dtype=np.int64)
    for thread in range(len(program.threads)):
        rows = np.flatnonzero(calls.thread == thread)
        if not len(rows):
            continue
        after = calls.after[rows]
        handed = np.where(after >= 0, calls.end_ns[np.maximum(after, 0)], -1)
        before = np.concatenate([[-1], calls.end_ns[rows[:-1]]])
        since = np.maximum(before, handed)
        since = np.where(since < 0, calls.start_ns[rows], np.minimum(since, calls.start_ns[rows]))
        mine = np.flatnonzero((ops.thread == thread) & (ops.parent < 0) & (ops.start_ns >= 0))
        inside = _covered(ops.start_ns[mine], ops.end_ns[mine], calls.start_ns[rows])
        inside -= _covered(ops.start_ns[mine], ops.end_ns[mine], since)
        result[rows] = np.maximum(calls.start_ns[rows] - since - inside, 0)
    return result


def _covered(starts: IntColumn, ends: IntColumn, until: IntColumn) -> IntColumn:
    """How much of the time until each moment ops took, which follow each other."""
    if not len(starts):
        return np.zeros(len(until), dtype=np.int64)
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    starts = np.maximum(starts, np.concatenate([[starts[0]], ends[:-1]]))
    total = np.concatenate([[0], np.cumsum(np.maximum(ends - starts, 0))])
    at = np.searchsorted(starts, until, side="right")
    last = np.maximum(at - 1, 0)
    partial = np.clip(until - starts[last], 0, np.maximum(ends[last] - starts[last], 0))
    return np.where(at > 0, total[last] + partial, 0)
