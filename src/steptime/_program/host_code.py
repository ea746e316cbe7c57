"""What the host does outside every op before a call: Python, data loading, logging, and whatever else no profiler names."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime._program.program import IntColumn, Program

Floats = npt.NDArray[np.float64]

HOST_CODE = "Python and other host code"
# Shorter stretches outside ops are what calling them from Python takes.
CALLING_NS = 50_000
# Frames of libraries around Python, not ops.
_FRAMES = ("FSDP::",)


def outside_ops(program: Program) -> Floats:
    """Per call, how much of the host work before it is in no op: Python, data loading, logging. None where nothing was timed.

    Labels that a user or a class gives are no ops: what is in them and in no op of a library is Python too.
    """
    return _kept(program)[0]


def long_outside_ops(program: Program) -> Floats:
    """The same where it is more than what calling an op from Python takes: code that a script has beside its ops."""
    share, spent_ns = _kept(program)
    return np.where(spent_ns > CALLING_NS, share, 0.0)


def _kept(program: Program) -> tuple[Floats, Floats]:
    if outside_ops not in program.derived:
        program.derived[outside_ops] = _outside(program)
    result: tuple[Floats, Floats] = program.derived[outside_ops]
    return result


def _outside(program: Program) -> tuple[Floats, Floats]:
    """Per call how much of the host work before it is in no op, as a share and in nanoseconds."""
    calls, ops = program.calls, program.ops
    result, spent_ns = np.zeros(len(calls)), np.zeros(len(calls))
    library = np.array(["::" in name and not name.startswith(_FRAMES) for name in program.names], dtype=bool)
    for thread in range(len(program.threads)):
        rows = np.flatnonzero((calls.thread == thread) & (calls.start_ns >= 0))
        spans = np.flatnonzero((ops.thread == thread) & library[ops.name] & (ops.start_ns >= 0))
        if len(rows) < 2:
            continue
        since = np.maximum(
            calls.end_ns[rows[:-1]], np.where(calls.after[rows[1:]] >= 0, calls.end_ns[calls.after[rows[1:]]], 0)
        )
        until = np.maximum(calls.start_ns[rows[1:]], since)
        inside = _covered(ops.start_ns[spans], ops.end_ns[spans], until) - _covered(
            ops.start_ns[spans], ops.end_ns[spans], since
        )
        result[rows[1:]] = 1.0 - inside / np.maximum(until - since, 1)
        spent_ns[rows[1:]] = until - since - inside
    return np.where(result > 0, result, 0.0), spent_ns


def _covered(start_ns: IntColumn, end_ns: IntColumn, at_ns: IntColumn) -> IntColumn:
    """How much of the time up to some moments is within one of the spans or more; spans come in order of their starts."""
    if not len(start_ns):
        return np.zeros(len(at_ns), dtype=np.int64)
    reach = np.maximum.accumulate(end_ns)
    first = np.flatnonzero(np.append(True, start_ns[1:] > reach[:-1]))
    begin, end = start_ns[first], np.maximum.reduceat(end_ns, first)
    total, index = np.cumsum(end - begin), np.searchsorted(begin, at_ns, side="right") - 1
    return np.asarray(np.where(index < 0, 0, total[index] - np.maximum(end[index] - at_ns, 0)), dtype=np.int64)
