"""A timeline as a workload that can be read again: its programs with the times at which everything happened."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from steptime._program.program import NEVER, IntColumn, Ops, Program
from steptime._program.workload import Workload
from steptime._sim.core.timing import CohortTimeline, Timeline


def played_workload(workload: Workload, timeline: Timeline, origin_ns: int, *, profiled: bool) -> Workload:
    """What was played, from `origin_ns` on, as if it had been recorded; ranks that did the same share a program."""
    programs = sorted((_played(each, origin_ns, profiled=profiled) for each in timeline.cohorts), key=lambda each: each.rank)
    owners = {rank: each.cohort.program.rank for each in timeline.cohorts for rank in each.cohort.ranks}
    shared = len(owners) == workload.world_size > len(programs)
    return replace(
        workload,
        programs=tuple(programs),
        owners=tuple(owners[rank] for rank in range(workload.world_size)) if shared else workload.owners,
        meta={},
        lookups=None,
        rebuild=None,
        warnings=(),
    )


def _played(played: CohortTimeline, origin_ns: int, *, profiled: bool) -> Program:
    program = played.cohort.program

    def times(name: str) -> IntColumn:
        return np.asarray(getattr(played, name)[:, 0, 0] - origin_ns, dtype=np.int64)

    calls = program.calls.replace(start_ns=times("call_start_ns"), end_ns=times("call_end_ns"))
    kept = np.flatnonzero(program.works.call >= 0)
    works = program.works.replace(start_ns=times("work_start_ns"), end_ns=times("work_end_ns"))
    moved = np.append(np.full(len(works), -1), -1)
    moved[kept] = np.arange(len(kept))
    calls = calls.replace(awaits=moved[calls.awaits])
    result = replace(program, calls=calls, works=works.take(kept), origin_ns=0, warnings=(), orders=())
    return replace(result, ops=_around(result), meta={"profiled": profiled})


def _around(program: Program) -> Ops:
    """Ops as long as what they call; those that call nothing were never timed."""
    ops, calls = program.ops, program.calls
    start, end = np.full(len(ops), np.iinfo(np.int64).max), np.full(len(ops), NEVER)
    inside = calls.op >= 0
    np.minimum.at(start, calls.op[inside], calls.start_ns[inside])
    np.maximum.at(end, calls.op[inside], calls.end_ns[inside])
    for row in range(len(ops) - 1, -1, -1):  # parents come before what they enclose
        parent = ops.parent[row]
        if parent >= 0 and end[row] >= 0:
            start[parent], end[parent] = min(start[parent], start[row]), max(end[parent], end[row])
    timed = end >= 0
    return ops.replace(start_ns=np.where(timed, start, NEVER), end_ns=np.where(timed, end, NEVER))
