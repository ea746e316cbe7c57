"""The parts of a predicted step as a profile measured them: kernels, collectives free of waiting, and launches of the host.

A profile tells nothing about a part that waited: launches that the queue held back or that read a value keep their modelled
times. The profiler's inflation is taken out of host times as one share, which other cases tell.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._hardware.device import reference_device
from steptime._models.kernels.from_ops import questions_of, warm_within_bytes
from steptime._platforms.calibration import Calibration
from steptime._program.program import CallKind, Program
from steptime._program.queues import QUEUE_DEPTH
from steptime._sim.core.timing import Cohort
from steptime._sim.modelled.issue import Issued
from steptime._sim.modelled.step import ModelledStep
from steptime_lab.fit.attribution import launched_by
from steptime_lab.fit.waiting import ProfiledStep, collectives_of, waits_of
from steptime_lab.validate.steps.cases import StepCase

Floats = npt.NDArray[np.float64]
Row = Mapping[str, Any]  # of the set step_kernels

_COLLECTIVE_KERNELS = ("nccl", "void nccl")
# From this many outstanding launches on, a launch may have been held back.
_HELD_BACK = 0.9 * QUEUE_DEPTH
# Between two launches of profiled steps lie 0.5 ms at most, but for pauses of 5 to 60 ms in one step of several.
_PAUSE_NS, _PAUSE_TIMES = 1e6, 10.0


@dataclass(frozen=True)
class OpsSeen:
    """What a profile shows of the ops of one rank; nanoseconds."""

    compute_ns: Mapping[int, float]  # op -> its kernels, in the middle of the profiled steps
    compute_total_ns: float  # kernels that no op could be found for included
    launched: tuple[tuple[int, float], ...]  # (op, its first launch from the step's begin), in order
    held_back: frozenset[int]  # ops before whose first launch the queue was about full
    host_ns: float  # of the step whose launches these are
    quickest_ns: float  # the host's time in the quickest of the profiled steps


def ops_seen(program: Program, issued: Issued, row: Row, share: int) -> OpsSeen:
    """The profiled kernels of a rank, given to the ops of the program it runs."""
    works = questions_of(program, cached_bytes=warm_within_bytes(reference_device()) // share)
    launches = Counter(issued.program.calls.op[issued.program.works.call].tolist())
    expected = {index: launches[work.op] for index, work in enumerate(works) if work.op in launches}
    owners = launched_by(program, works, row["op"], expected)
    outstanding = _outstanding(row)
    compute: dict[int, float] = defaultdict(float)
    first: dict[int, float] = {}
    held_back, total = set(), 0.0
    for index, owner in enumerate(owners):
        op = works[owner].op if owner >= 0 else -1
        if not row["kernel"][index].startswith(_COLLECTIVE_KERNELS):
            time_ns = float(np.median(row["kernel_ns"][index])) if row["kernel_ns"][index] else 0.0
            total += time_ns
            compute[op] += time_ns
        if op >= 0 and op not in first:
            first[op] = float(row["launch_ns"][index])
            held_back |= {op} if outstanding[index] >= _HELD_BACK else set()
    compute.pop(-1, None)
    host = [float(each) for each in row["host_ns"]]
    return OpsSeen(dict(compute), total, tuple(first.items()), frozenset(held_back), host[-1], min(host))


def _outstanding(row: Row) -> npt.NDArray[np.int64]:
    """Per launch, how many before it have not begun to run; rows are in the order of launches."""
    started = np.sort(np.asarray(row["start_ns"], dtype=np.int64))
    return np.arange(len(started)) - np.searchsorted(started, np.asarray(row["launch_ns"], dtype=np.int64))


def with_measured_host(step: ModelledStep, case: StepCase) -> ModelledStep:
    """The step whose launches come as they did in the profile, without the profiler's inflation."""
    owners = {program.rank: program for program in step.workload.programs}
    programs = [
        _recorded(item, ops_seen(owners[item.program.rank], item, case.profile[item.program.rank], case.ranks), case)
        for item in step.programs
    ]
    return replace(step, programs=tuple(programs))


def _recorded(one: Issued, seen: OpsSeen, case: StepCase) -> Issued:
    """Between launches that the profile shows, host time is stretched to what it was there; else it stays as modelled."""
    speed = case.reference.speed
    gap = one.gap_cpu_ns * speed.cpu
    call = one.call_cpu_ns * speed.cpu + one.call_launch_ns * speed.launch
    blocking = one.program.calls.kind == CallKind.BLOCKING_COPY
    stretches = []  # (first call, last call, what it took in the profile, what is modelled)
    for (begin, begun_ns, _), (end, ended_ns, held) in pairwise(_anchors(one, seen)):
        between = slice(begin + 1, end)
        modelled_ns = float(call[begin] + gap[between].sum() + call[between].sum() + gap[end])
        if not held and not blocking[begin:end].any():
            stretches.append((begin, end, ended_ns - begun_ns, modelled_ns))
    paused_ns = sum(took_ns for *_, took_ns, modelled_ns in stretches if _is_pause(took_ns, modelled_ns))
    # Launches are known of the last profiled step alone; inflation is told by the quickest.
    slower = max(1.0, (seen.host_ns - paused_ns) / seen.quickest_ns)
    for begin, end, took_ns, modelled_ns in stretches:
        if not _is_pause(took_ns, modelled_ns):
            stretched = took_ns / (case.inflation * slower) / max(modelled_ns, 1.0)
            call[begin:end] *= stretched
            gap[begin + 1 : end + 1] *= stretched
    return replace(one, gap_cpu_ns=gap / speed.cpu, call_cpu_ns=call / speed.cpu, call_launch_ns=np.zeros(len(call)))


def _is_pause(took_ns: float, modelled_ns: float) -> bool:
    """Whether the host was stopped: one such pause is no part of a step that repeats."""
    return took_ns > _PAUSE_NS and took_ns > _PAUSE_TIMES * modelled_ns


def _anchors(one: Issued, seen: OpsSeen) -> list[tuple[int, float, bool]]:
    """(call, when it began in the profile, whether it may have been held back): begin, first launches of ops, and end."""
    calls = one.program.calls
    first: dict[int, int] = {}
    for call in one.program.works.call.tolist():
        first.setdefault(int(calls.op[call]), call)
    results = [(0, 0.0, False)]
    for op, launched_ns in seen.launched:
        call = first.get(op, -1)
        if call > results[-1][0] and launched_ns >= results[-1][1]:
            results.append((call, launched_ns, op in seen.held_back))
    last = len(calls) - 1
    return [*results, (last, max(seen.host_ns, results[-1][1]), False)] if last > results[-1][0] else results


def with_measured_device(step: ModelledStep, cohorts: Sequence[Cohort], case: StepCase) -> list[Cohort]:
    """The cohorts whose compute takes as long as it did in the profile, rank by rank."""
    results = []
    for program, item, cohort in zip(step.workload.programs, step.programs, cohorts, strict=True):
        played = cohort.program
        op = played.calls.op[played.works.call]
        compute = played.works.collective < 0
        duration = np.repeat(cohort.timing.duration_ns[:, :1, :1], len(cohort.ranks), axis=1).astype(np.float64)
        for index, rank in enumerate(cohort.ranks):
            seen = ops_seen(program, item, case.profile[rank], case.ranks)
            times = np.array([seen.compute_ns.get(int(each), 0.0) for each in op]) * item.share
            # Kernels of no op are shared out, so that the sum is that of the profile.
            times *= seen.compute_total_ns / max(float(times[compute].sum()), 1.0)
            duration[compute, index, 0] = times[compute]
        results.append(_lasting(cohort, duration))
    return results


def with_measured_wire(step: ModelledStep, cohorts: Sequence[Cohort], case: StepCase, calibration: Calibration) -> list[Cohort]:
    """The cohorts whose collectives take as long as in the profile, at the speed of the wire in a calibration."""
    programs = {program.rank: program for program in step.workload.programs}
    owners = step.workload.owners or step.workload.ranks
    profiled = ProfiledStep(case.name, case.workload, programs, owners, dict(enumerate(case.profile)))
    collectives = collectives_of(profiled)
    if not collectives:
        return list(cohorts)
    free = {id(each.collective): each.free_ns for each in waits_of(collectives, [0.0] * len(collectives))}
    times = np.array([free.get(id(each), float(each.ran_ns.min())) for each in collectives])
    kinds = [each.message.kind for each in collectives]
    times *= [calibration.wire_of(kind) / case.reference.wire_of(kind) for kind in kinds]
    results = []
    for cohort in cohorts:
        index = cohort.program.works.collective
        duration = cohort.timing.duration_ns.astype(np.float64)
        duration[index >= 0] = times[index[index >= 0]][:, None, None]
        results.append(_lasting(cohort, duration))
    return results


def with_host_of(cohorts: Sequence[Cohort], others: Sequence[Cohort]) -> list[Cohort]:
    """The cohorts with the host times of others."""
    return [
        replace(cohort, timing=replace(cohort.timing, gap_ns=other.timing.gap_ns, call_ns=other.timing.call_ns))
        for cohort, other in zip(cohorts, others, strict=True)
    ]


def _lasting(cohort: Cohort, duration: Floats) -> Cohort:
    return replace(cohort, timing=replace(cohort.timing, duration_ns=np.rint(duration).astype(np.int64)))
