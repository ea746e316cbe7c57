"""Kernels of somebody's trace against what a device says of them: the check of devices that nobody ran here.

Every distinct call of the trace is a case: the median time of its kernels, as Kineto recorded them, and what the
device answers from the call's shapes. What the trace does not hold cannot be asked: a trace without strides takes every tensor
for contiguous, and ops of other libraries have no model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from steptime._models.estimate import Source
from steptime._models.kernels.from_ops import questions_of
from steptime._models.kernels.question import Question
from steptime._platforms.device import Device, KernelEstimate
from steptime._program.program import Program
from steptime._program.workload import Workload
from steptime.errors import InputError
from steptime_lab.validate.engine import Group, MeasuredCase, Validation, summary

_SHORT_NS = 5_000.0


@dataclass(frozen=True)
class TracedCall:
    """A call as often as it was traced, and what a device says of it."""

    question: Question
    said: KernelEstimate
    times_ns: tuple[float, ...]

    @property
    def case(self) -> MeasuredCase:
        """Its median against the answer."""
        measured, estimate = float(np.median(self.times_ns)), self.said.estimate
        spread = float(np.quantile(self.times_ns, 0.9) - np.quantile(self.times_ns, 0.1)) / measured
        return MeasuredCase(_said(self.question), estimate.time_ns, measured, spread, (estimate.low_ns, estimate.high_ns))


def traced_calls(workload: Workload, device: Device) -> list[TracedCall]:
    """Every distinct call of all programs that launched something, those that took the most time first."""
    times: dict[Question, list[float]] = defaultdict(list)
    for program in workload.programs:
        for question, time_ns in _measured(program):
            times[question].append(time_ns)
    said = device.estimates(list(times))
    found = [TracedCall(question, one, tuple(times[question])) for question, one in zip(times, said, strict=True)]
    return sorted(found, key=lambda call: -sum(call.times_ns))


def _measured(program: Program) -> list[tuple[Question, float]]:
    """The questions of a program, each with the time of all device work that was launched inside its op."""
    works = [work for work in questions_of(program) if work.question is not None]
    place = {work.op: row for row, work in enumerate(works)}
    owner: list[int] = []
    for op, parent in enumerate(program.ops.parent.tolist()):
        owner.append(place.get(op, owner[parent] if parent >= 0 else -1))
    spent = np.zeros(len(works))
    took = (program.works.end_ns - program.works.start_ns).tolist()
    for call, time_ns in zip(program.works.call.tolist(), took, strict=True):
        op = int(program.calls.op[call]) if call >= 0 else -1
        if op >= 0 and owner[op] >= 0:
            spent[owner[op]] += time_ns
    return [(work.question, float(time)) for work, time in zip(works, spent, strict=True) if work.question and time > 0]


def validation_of(calls: Sequence[TracedCall], device: Device) -> Validation:
    """By family, long and short; fallbacks are counted and left out, for no device's models are in them."""
    asked = [call for call in calls if call.said.estimate.source is not Source.FALLBACK]
    if not asked:
        raise InputError(f"no kernel of the trace has a model on {device.limits.name}; was it recorded with record_shapes?")
    parts: Mapping[str, list[TracedCall]] = defaultdict(list)
    for call in asked:
        parts[call.said.family].append(call)
        parts["longer than 5 us" if call.case.measured > _SHORT_NS else "up to 5 us"].append(call)
    time_ns = sum(sum(call.times_ns) for call in calls)
    said_ns = sum(call.said.estimate.time_ns * len(call.times_ns) for call in asked)
    asked_ns = sum(sum(call.times_ns) for call in asked)
    return Validation(
        name="traced-kernels",
        title=f"kernels of a trace on {device.limits.name}",
        cases=[call.case for call in asked],
        whole=Group(summary([call.case for call in asked])),
        groups={name: Group(summary([call.case for call in some])) for name, some in sorted(parts.items())},
        facts={"of_the_time_answered": asked_ns / time_ns, "all_of_it_predicted_over_measured": said_ns / asked_ns},
        notes=("a case is a distinct call; ops without a model are left out",),
    )


def _said(question: Question) -> str:
    shapes = " ".join("x".join(map(str, tensor.shape)) for tensor in question.call.tensors())
    return f"{question.call.op} {question.call.dtype} {shapes}"
