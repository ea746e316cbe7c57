"""A recorded run on a platform: its own calls, streams, waits and host times, with kernels and collectives from models.

A recording shows what ops alone do not: which kernels a call launched and on which stream, graphs of many kernels behind one
launch, who waited for what, and what the host did between ops. All of that is kept. A kernel takes its part, as recorded, of
what the device's models say of the op that launched it; kernels of which no model knows the op, those that PyTorch's compiler
generated, and copies over the link to the host are carried from the device of the recording (`CarriedKernels`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from steptime._models.estimate import Estimate, Source
from steptime._models.host.columns import host_columns
from steptime._models.host.model import Speed
from steptime._models.lookups.contention import MemoryUse
from steptime._models.power.model import KernelDraw
from steptime._notices import Basis
from steptime._ops.families import WorkFamily, kernel_family
from steptime._ops.generated_calls import moved_by_op
from steptime._platforms.calibration import UNCALIBRATED
from steptime._platforms.device import Device
from steptime._platforms.platform import Platform
from steptime._platforms.recorded_kernels import CarriedKernels, crosses_link
from steptime._program.host_code import outside_ops
from steptime._program.one_step import OneStep, one_step
from steptime._program.program import Program, WorkKind
from steptime._program.workload import Workload
from steptime._sim.core.timing import Cohort
from steptime._sim.explain.critical_path import short_kernel_name
from steptime._sim.modelled.collective_work import collective_work
from steptime._sim.modelled.device_work import device_work
from steptime._sim.modelled.issue import DeviceWork, Issued, OpWork
from steptime._sim.modelled.step import ModelledStep, check_ranks, with_everybody
from steptime._sim.prediction import host_code_ms, single_step_ns
from steptime._sim.recorded.profiler import profiler_costs, unprofiled
from steptime._sim.recorded.replay import repeatable
from steptime._sim.recorded.timing import recorded
from steptime.errors import UnsupportedError

# What recorded host times may be off by as times of other steps of the run: standard deviation of the logarithm.
_RECORDED_HOST = 0.05
# Longer stretches outside ops are no part of calling them, and say nothing of how fast a host calls ops. Hosts differ by less.
_LONG_NS, _MOST_TIMES = 300_000, 4.0
# A share of a time from which on nothing is said of the rest.
_NEARLY = 0.98
# Carried kernels err together: one recording, one profiler, two devices.
_GROUP, _GENERATED = "recorded", "recorded generated"


@dataclass
class _Answers:
    """Estimates of a program's works, as they are collected."""

    estimates: list[Estimate] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    memory: list[MemoryUse | None] = field(default_factory=list)
    draws: list[KernelDraw | None] = field(default_factory=list)

    def add(self, estimate: Estimate, group: str, memory: MemoryUse | None = None, draw: KernelDraw | None = None) -> int:
        """The number of one more."""
        self.estimates.append(estimate)
        self.groups.append(group)
        self.memory.append(memory)
        self.draws.append(draw)
        return len(self.estimates) - 1


def modelled_run(
    workload: Workload, platform: Platform, *, profiled: bool = False, own_host: bool = True, strict: bool = False
) -> ModelledStep:
    """A recorded workload on a platform: as it was issued, with host times of the recording and kernels from models.

    `profiled`: with what the profiler cost. Not `own_host`: on the platform's host, not on that of the recording.
    """
    as_recorded = recorded(workload)
    inputs = repeatable(as_recorded if profiled else unprofiled(as_recorded))
    played = [cohort.program for cohort in inputs.cohorts]
    workload = with_everybody(replace(workload, programs=tuple(played)))
    check_ranks(workload, platform)
    wire = collective_work(workload, platform.fabric)
    answers = device_work([OneStep(program, whole=True) for program in played], platform.device, workload.lookups)
    usual = ModelledStep(workload, platform, ()).speed(UNCALIBRATED)
    programs = []
    for cohort, late_ns, answer in zip(inputs.cohorts, inputs.late_ns, answers, strict=True):
        of_rank = wire.estimates[cohort.program.rank]
        host = cohort if own_host else _on_host(cohort, platform, usual)
        issued = issued_as_recorded(host, late_ns, platform.device, answer, of_rank, usual, strict=strict)
        programs.append(replace(issued, program=issued.program.on_device(platform.device.limits.name)))
    workload = replace(workload, programs=tuple(each.program for each in programs))
    warnings = [*workload.warnings, *wire.warnings, *(text for each in programs for text in each.warnings)]
    return ModelledStep(
        workload,
        platform,
        tuple(programs),
        tuple(dict.fromkeys([*warnings, *_host_words(platform, profiled=profiled, own_host=own_host)])),
        host_error=(_RECORDED_HOST if profiled else profiler_costs().error) if own_host else None,
        single_ns=single_step_ns(as_recorded) if profiled else 0.0,
        host_code_ms=host_code_ms(inputs.cohorts),
    )


def _host_words(platform: Platform, *, profiled: bool, own_host: bool) -> list[str]:
    if not own_host:
        return [Basis(f"host times of the recording, without its profiler, scaled to the host {platform.parts.host}")]
    return [Basis(f"host times of the recording, {'with' if profiled else 'without'} what its profiler cost")]


def _on_host(cohort: Cohort, platform: Platform, usual: Speed) -> Cohort:
    """The cohort on the host of a platform: all host times go with how long its ops would take there."""
    alone = one_step(cohort.program).program
    model = host_columns(alone, platform.host)
    there_ns = float(model.time_ns(usual).sum()) * max(1, len(cohort.program.steps))
    timing = cohort.timing
    outside = outside_ops(cohort.program) * timing.gap_ns[:, 0, 0]
    here_ns = float(timing.gap_ns.sum() + timing.call_ns.sum()) - float(outside[outside > _LONG_NS].sum())
    times = min(max(there_ns / max(here_ns, 1.0), 1.0 / _MOST_TIMES), _MOST_TIMES)
    scaled = {name: np.rint(getattr(timing, name) * times).astype(np.int64) for name in ("gap_ns", "call_ns")}
    return replace(cohort, timing=replace(timing, **scaled))


def issued_as_recorded(
    cohort: Cohort,
    late_ns: npt.NDArray[np.int64],
    device: Device,
    answers: DeviceWork,
    wire: Sequence[Estimate],
    usual: Speed,
    *,
    strict: bool = False,
) -> Issued:
    """The program of a recorded cohort as issued: host times as in its timing at the `usual` speed, works by these answers.

    `late_ns`: per work, how late ranks without a trace come to it.
    """
    program, timing = cohort.program, cohort.timing
    known = _Answers()
    by_answer, unanswered = _by_answer(program, answers.works)
    estimate = np.zeros(len(program.works), dtype=np.int64)
    share = np.ones(len(program.works))
    took_ns = np.maximum((program.works.end_ns - program.works.start_ns).astype(np.float64), 1.0)
    for works, rows in by_answer:
        draw = works[0].draw if len(works) == 1 else None
        estimate[rows] = known.add(_sum([work.estimate for work in works]), works[0].group, works[0].memory, draw)
        share[rows] = took_ns[rows] / took_ns[rows].sum()
    if strict and any(not crosses_link(name) for name in _names(program, unanswered)):
        name = next(name for name in _names(program, unanswered) if not crosses_link(name))
        raise UnsupportedError(
            f"{name} has no model on {device.limits.name} (rank {program.rank}); drop --strict to carry it from the recording"
        )
    carried = CarriedKernels.of(program.device_name, device.limits)
    for row in unanswered:
        name = program.names[int(program.works.name[row])]
        generated = kernel_family(name) is WorkFamily.GENERATED
        moved = moved_by_op(program, int(program.calls.op[program.works.call[row]])) if generated else ()
        estimate[row] = known.add(carried.estimate(name, float(took_ns[row]), moved), _GENERATED if generated else _GROUP)
    collective = program.works.kind == WorkKind.COLLECTIVE
    estimate[collective] = len(known.estimates) + program.works.collective[collective]
    wire_ns = np.array([each.time_ns for each in wire])[program.works.collective[collective]]
    share[collective] = 1.0 + late_ns[collective] / np.maximum(wire_ns, 1.0)
    return Issued(
        program=program,
        gap_cpu_ns=timing.gap_ns[:, 0, 0] / usual.cpu,
        call_cpu_ns=np.zeros(len(program.calls)),
        call_launch_ns=timing.call_ns[:, 0, 0] / usual.launch,
        estimate=tuple(estimate.tolist()),
        share=share,
        estimates=(*known.estimates, *wire),
        groups=(*known.groups, *(f"collective {each.kind}" for each in program.collectives)),
        memory=(*known.memory, *[None] * len(wire)),
        draws=tuple(known.draws),
        warnings=(*answers.warnings, *_says(program, unanswered, carried, device)),
        recorded=timing if carried.same else None,
    )


def _sum(estimates: Sequence[Estimate]) -> Estimate:
    """Of one op: they err together."""
    if len(estimates) == 1:
        return estimates[0]
    time_ns, low_ns, high_ns = (
        sum(values) for values in zip(*((e.time_ns, e.low_ns, e.high_ns) for e in estimates), strict=True)
    )
    return Estimate(time_ns, low_ns, high_ns, estimates[0].source, inside=all(each.inside for each in estimates))


def _by_answer(program: Program, works: Sequence[OpWork]) -> tuple[list[tuple[list[OpWork], list[int]]], list[int]]:
    """The answers about an op with the rows of the kernels launched by it or within it; and the rows of all other kernels."""
    of_op: dict[int, list[OpWork]] = defaultdict(list)
    for work in works:
        if work.estimate.source is not Source.FALLBACK:  # what was recorded is more than a guess
            of_op[work.op].append(work)
    parents, calls = program.ops.parent.tolist(), program.calls.op.tolist()
    by_answer: dict[int, list[int]] = defaultdict(list)
    unanswered = []
    kernels = np.flatnonzero((program.works.kind != WorkKind.COLLECTIVE) & (program.works.call >= 0))
    for row in kernels.tolist():
        at = calls[program.works.call[row]]
        name = program.names[int(program.works.name[row])]
        # Of a generated kernel the recording's time is more than a model of what the recording shows of it.
        if crosses_link(name) or kernel_family(name) is WorkFamily.GENERATED:
            at = -1
        while at >= 0 and at not in of_op:
            at = parents[at]
        if at >= 0:
            by_answer[at].append(row)
        else:
            unanswered.append(row)
    return [(of_op[op], rows) for op, rows in by_answer.items()], unanswered


def _names(program: Program, rows: Sequence[int]) -> list[str]:
    return [program.names[int(program.works.name[row])] for row in rows]


def _says(program: Program, unanswered: Sequence[int], carried: CarriedKernels, device: Device) -> list[str]:
    """What to say of kernels without a model: by the op that launched them, most time first; and of generated ones."""
    times: Counter[str] = Counter()
    generated: Counter[bool] = Counter()  # by whether it is known what they move
    for row in unanswered:
        op = int(program.calls.op[program.works.call[row]])
        kernel = program.names[int(program.works.name[row])]
        took_ns = int(program.works.end_ns[row] - program.works.start_ns[row])
        if kernel_family(kernel) is WorkFamily.GENERATED:
            generated[bool(moved_by_op(program, op))] += took_ns
        elif not crosses_link(kernel):
            times[short_kernel_name(kernel) if op < 0 else program.names[int(program.ops.name[op])]] += took_ns
    where = f" on {program.device_name}" if program.device_name else ""
    name, says = device.limits.name, list[str]()
    if times:
        most = ", ".join(each[:60] for each, _ in times.most_common(3))
        how = f"by the time they were recorded with{where}"
        if not carried.same:
            how = f"recorded{where}, carried to {name} by the limits of both"
        says.append(Basis(f"kernels of ops without a model, {how}: {most}"))
    if generated and not carried.same:
        says.append(_says_generated(generated, where, name))
    return says


def _says_generated(generated: Counter[bool], where: str, name: str) -> str:
    known = generated[True] / max(sum(generated.values()), 1)
    how = "what each reads and writes" if known > _NEARLY else "their times, as bound by memory (shapes are not recorded)"
    if 1 - _NEARLY <= known <= _NEARLY:
        how = f"what each reads and writes, {100 * (1 - known):.0f} % of their time without shapes as bound by memory"
    return Basis(f"kernels generated by torch.compile, recorded{where}, carried to {name} by {how}")
