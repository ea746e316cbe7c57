"""What only recorded steps tell of a host: how long Python takes between ops, and what the first call of an op costs more.

Bursts of one call find everything in caches and have no model's Python between them. A profiled trace has both, under its
profiler and at an unknown speed. So only ratios within one trace are read from it: the first call of an op in a step over its
later ones, and the gaps between ops over the ops themselves, whose cost is known from bursts and from what the profiler adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from steptime._models.host.columns import host_columns
from steptime._models.host.model import HostModel, ProfilerCost
from steptime._program.program import Phase, Program

# Calls of an op in one thread of one step before its later ones say what it usually takes; the second is still 10 % slower.
_ENOUGH, _FIRST_LATER = 6, 2
# Half of what a profiler adds per op lies outside the op's own record: it opens before the first time stamp and closes after
# the second. Gaps longer than this are hand-overs to another thread.
_OUTSIDE, _LONGEST_GAP_NS = 0.5, 300_000


def first_call(programs: Iterable[Program]) -> float:
    """How many times as long the first call of an op takes in each thread of a step: the median over ops; 1 without any."""
    ratios = []
    for program in programs:
        ops = program.ops
        took: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        columns = (ops.step, ops.thread, ops.name, ops.end_ns - ops.start_ns)
        for step, thread, name, time_ns in zip(*(column.tolist() for column in columns), strict=True):
            took[step, thread, name].append(time_ns)
        for (step, _, _), times in took.items():
            usual = float(np.median(times[_FIRST_LATER:])) if len(times) >= _ENOUGH and step >= 0 else 0.0
            if usual > 0:
                ratios.append(times[0] / usual)
    return float(np.median(ratios)) if ratios else 1.0


def between_forward_ns(programs: Iterable[Program], model: HostModel, profiler: ProfilerCost) -> float | None:
    """Python between two ops of the forward pass at speed 1: the mean over all gaps; None where there are none."""
    results = [_between(program, model, profiler) for program in programs]
    gaps = sum(count for count, _ in results)
    return max(0.0, sum(time_ns for _, time_ns in results) / gaps) if gaps else None


def _between(program: Program, model: HostModel, profiler: ProfilerCost) -> tuple[int, float]:
    """How many gaps a program has, and what they sum up to at speed 1."""
    rows = _outermost(program)
    ops = program.ops
    begins, ends = ops.start_ns[rows], ops.end_ns[rows]
    gaps = begins[1:] - ends[:-1]
    kept = (gaps > 0) & (gaps < _LONGEST_GAP_NS) & (ops.step[rows[1:]] == ops.step[rows[:-1]])
    if not kept.any():
        return 0, 0.0
    columns = host_columns(program, model)
    forward = columns.phase == Phase.FORWARD
    inside = _inside(program, rows)
    # Of ops alone: the model has no cost of what lies between them.
    known = float((columns.cpu_ns + columns.launch_ns)[forward].sum())
    known += inside[0] * profiler.per_op_ns + inside[1] * profiler.per_launch_ns
    slow = float((ends - begins).sum()) / known
    count = int(kept.sum())
    return count, float(gaps[kept].sum()) / slow - count * _OUTSIDE * profiler.per_op_ns


def _outermost(program: Program) -> np.typing.NDArray[np.int64]:
    """Ops of the forward pass that Python calls: those outside every other op, labels and functions in Python apart."""
    ops = program.ops
    real = np.array(["::" in name for name in program.names], dtype=bool)
    covered = np.zeros(len(ops), dtype=bool)
    for row, parent in enumerate(ops.parent.tolist()):
        covered[row] = parent >= 0 and (covered[parent] or real[ops.name[parent]])
    chosen = real[ops.name] & ~covered & (ops.phase == Phase.FORWARD) & (ops.step >= 0)
    main = [thread.role == "main" for thread in program.threads]
    return np.flatnonzero(chosen & np.array(main, dtype=bool)[ops.thread])


def _inside(program: Program, rows: Sequence[int] | np.typing.NDArray[np.int64]) -> tuple[int, int]:
    """How many ops and how many calls the given ops hold, themselves included."""
    held = np.zeros(len(program.ops), dtype=bool)
    held[rows] = True
    for row, parent in enumerate(program.ops.parent.tolist()):
        held[row] |= parent >= 0 and bool(held[parent])
    calls = program.calls.op
    return int(held.sum()), int(held[calls[calls >= 0]].sum())
