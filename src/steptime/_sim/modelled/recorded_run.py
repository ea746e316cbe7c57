"""A recorded run on a platform: its own calls, streams, waits and host times, with kernels and collectives from models.

A recording shows what ops alone do not: which kernels a call launched and on which stream, graphs of many kernels behind one
launch, who waited for what, and what the host did between ops. All of that is kept. A kernel takes its part, as recorded, of
what the device's models say of the op that launched it; kernels of which no model knows the op, and copies over the link to the
host, are carried from the device of the recording (`CarriedKernels`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from steptime._models.estimate import Estimate
from steptime._models.host.model import Speed
from steptime._models.power.model import KernelDraw
from steptime._models.lookups.contention import MemoryUse
from steptime._platforms.device import Device
from steptime._platforms.recorded_kernels import CarriedKernels, crosses_link
from steptime._program.program import Program, WorkKind
from steptime._sim.core.timing import Cohort
from steptime._sim.modelled.issue import DeviceWork, Issued, OpWork
from steptime.errors import UnsupportedError

Floats = npt.NDArray[np.float64]


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


def issued_as_recorded(
    cohort: Cohort, device: Device, answers: DeviceWork, wire: Sequence[Estimate], usual: Speed, *, strict: bool = False
) -> Issued:
    """The program of a recorded cohort as issued: host times as in its timing at the `usual` speed, works by these answers."""
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
        estimate[row] = known.add(carried.estimate(name, float(took_ns[row])), f"recorded {name[:40]}")
    collective = program.works.kind == WorkKind.COLLECTIVE
    estimate[collective] = len(known.estimates) + program.works.collective[collective]
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
    )


def _sum(estimates: Sequence[Estimate]) -> Estimate:
    """Of one op: they err together."""
    if len(estimates) == 1:
        return estimates[0]
    time_ns, low_ns, high_ns = (sum(values) for values in zip(*((e.time_ns, e.low_ns, e.high_ns) for e in estimates), strict=True))
    return Estimate(time_ns, low_ns, high_ns, estimates[0].source, inside=all(each.inside for each in estimates))


def _by_answer(program: Program, works: Sequence[OpWork]) -> tuple[list[tuple[list[OpWork], list[int]]], list[int]]:
    """The answers about an op with the rows of the kernels launched by it or within it; and the rows of all other kernels."""
    of_op: dict[int, list[OpWork]] = defaultdict(list)
    for work in works:
        of_op[work.op].append(work)
    parents, calls = program.ops.parent.tolist(), program.calls.op.tolist()
    by_answer: dict[int, list[int]] = defaultdict(list)
    unanswered = []
    kernels = np.flatnonzero((program.works.kind != WorkKind.COLLECTIVE) & (program.works.call >= 0))
    for row in kernels.tolist():
        at = calls[program.works.call[row]]
        if crosses_link(program.names[int(program.works.name[row])]):
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
    """What to say of kernels without a model: by the op that launched them, most time first."""
    times: Counter[str] = Counter()
    for row in unanswered:
        op = int(program.calls.op[program.works.call[row]])
        name = program.names[int(program.works.name[row])] if op < 0 else program.names[int(program.ops.name[op])]
        if not crosses_link(program.names[int(program.works.name[row])]):
            times[name] += int(program.works.end_ns[row] - program.works.start_ns[row])
    if not times:
        return []
    most = ", ".join(name[:60] for name, _ in times.most_common(3))
    where = f" on {program.device_name}" if program.device_name else ""
    if carried.same:
        return [f"kernels of ops without a model keep the time they were recorded with{where}: {most}"]
    return [
        f"kernels of ops without a model, recorded{where}, are carried to {device.limits.name} by the limits of both, a guess: {most}"
    ]
