"""Device time of whole steps from their ops alone: an execution trace in, the sum of its kernels out, against profiled steps.

Compared is compute: collectives wait for other ranks, and lookups have models of their own. A kernel counts with the median of
the profiled steps; on parts of a GPU the other parts run the same step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from steptime._hardware.device import reference_device
from steptime._models.kernels.fitted import Answered
from steptime._models.kernels.from_ops import COLLECTIVE, COMPUTE, LOOKUP, UNKNOWN, IssuedWork, questions_of, warm_within_bytes
from steptime._models.kernels.launches import short_name
from steptime._models.kernels.question import Question
from steptime._program.program import Program
from steptime_lab.fit.attribution import launched_by
from steptime_lab.measurements.shipped import CasePrograms, program_of
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation, grouped
from steptime_lab.validate.steps.cases import programs_of, rows_by_name

Ask = Callable[[Sequence[Question]], Sequence[Answered]]
Row = Mapping[str, Any]  # of the set step_kernels
Times = dict[str, float]

_COLUMNS = ("workload", "name", "rank", "share", "op", "kernel", "start_ns", "kernel_ns")
_WHOLE = "whole GPU"
_COLLECTIVE_KERNELS = ("nccl", "void nccl")
_SUMS = (
    "calls", "predicted_ns", "measured_ns", "unanswered_ns", "outside_ns", "clear_predicted_ns", "clear_measured_ns",
)  # fmt: skip


@dataclass
class OpTime:
    """All calls of one op in a case: what was said and what the profile shows."""

    calls: int = 0
    predicted_ns: float = 0.0
    measured_ns: float = 0.0
    unanswered_ns: float = 0.0  # measured, of calls that nothing answers
    outside_ns: float = 0.0  # measured, of calls outside the fitted range
    # Of answered calls none of whose kernels ran while a collective of their rank did: those hold SMs, and what runs beside
    # takes longer, by 2 % for long products and up to twice as long for short kernels on a quarter of a GPU.
    clear_predicted_ns: float = 0.0
    clear_measured_ns: float = 0.0
    predicted: Counter[str] = field(default_factory=Counter)  # launches by short kernel name, of answered calls
    measured: Counter[str] = field(default_factory=Counter)

    def add(self, other: OpTime) -> None:
        """Counts another lot of calls in."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.predicted += other.predicted
        self.measured += other.measured

    @property
    def answered_ns(self) -> float:
        """Measured, of calls that were answered."""
        return self.measured_ns - self.unanswered_ns


@dataclass(frozen=True)
class CaseTime:
    """The steps of all ranks of a case."""

    name: str
    workload: str
    share: int
    ops: Mapping[str, OpTime]
    apart_ns: Mapping[str, float]  # measured, of lookups, collectives, ops not known, and kernels of no op
    missing: Mapping[str, float]  # why something was not answered -> measured ns
    repeats_ns: tuple[float, ...]  # compute of each profiled step

    @property
    def predicted_ns(self) -> float:
        """Compute of all ranks, as far as it was answered."""
        return sum(op.predicted_ns for op in self.ops.values())

    @property
    def measured_ns(self) -> float:
        """Compute of all ranks, that of ops not known included."""
        return sum(op.measured_ns for op in self.ops.values()) + self.apart_ns.get(UNKNOWN, 0.0)

    @property
    def coverage(self) -> float:
        """Of the measured compute, what was answered."""
        return sum(op.answered_ns for op in self.ops.values()) / self.measured_ns


def device_times(ask: Ask, names: Iterable[str] | None = None) -> list[CaseTime]:
    """Every shipped step case, or those of some names."""
    profiled = rows_by_name("step_kernels", _COLUMNS, names)
    return [case_time(case, profiled[case.name], ask) for case in programs_of(profiled)]


def case_time(case: CasePrograms, rows: Iterable[Row], ask: Ask) -> CaseTime:
    """One case: the profiled steps of its ranks beside what its programs ask."""
    programs: dict[int, tuple[Program, list[IssuedWork]]] = {}
    ops: dict[str, OpTime] = defaultdict(OpTime)
    apart: Times = defaultdict(float)
    missing: Times = defaultdict(float)
    repeats: list[Any] = []
    workload, share = "", 1
    for row in rows:
        workload, share = row["workload"], row["share"]
        owner = case.owners[row["rank"]]
        if owner not in programs:
            program = program_of(case, owner)
            programs[owner] = (program, questions_of(program, cached_bytes=warm_within_bytes(reference_device()) // share))
        program, works = programs[owner]
        answers = _answers(works, share, ask)
        expected = {work: len(item.answer.launches) for work, item in answers.items() if item.answer is not None}
        owners = launched_by(program, works, row["op"], expected)
        repeats.append(_compute_repeats(row, owners, works))
        _count(row, owners, works, answers, ops, apart, missing)
    shortest = min((len(each) for each in repeats), default=0)
    total = tuple(float(sum(each[step] for each in repeats)) for step in range(shortest))
    return CaseTime(case.name, workload, share, dict(ops), dict(apart), dict(missing), total)


def _answers(works: Sequence[IssuedWork], share: int, ask: Ask) -> dict[int, Answered]:
    """Per work with a question, what was said; each distinct question is asked once."""
    questions: dict[int, Question] = {}
    for work in works:
        if work.question is not None:
            questions.setdefault(id(work.question), work.question)
    others = "none" if share == 1 else "same"
    text = ask([replace(question, share=share, others=others) for question in questions.values()])
    result = dict(zip(questions, text, strict=True))
    return {row: result[id(work.question)] for row, work in enumerate(works) if work.question is not None}


def _compute_repeats(row: Row, owners: Sequence[int], works: Sequence[IssuedWork]) -> list[float]:
    chosen = [
        times for times, owner in zip(row["kernel_ns"], owners, strict=True) if owner >= 0 and works[owner].kind == COMPUTE
    ]
    shortest = min((len(times) for times in chosen), default=0)
    return [float(sum(times[step] for times in chosen)) for step in range(shortest)]


def _count(
    row: Row, owners: Sequence[int], works: Sequence[IssuedWork], answers: Mapping[int, Answered], ops: dict[str, OpTime],
    apart: Times, missing: Times,
) -> None:  # fmt: skip
    each: dict[int, OpTime] = {index: OpTime(calls=1) for index in range(len(works))}
    crowded: set[int] = set()
    for owner, kernel, times, crowd in zip(owners, row["kernel"], row["kernel_ns"], _beside(row), strict=True):
        crowded |= {owner} if crowd else set()
        time_ns = float(np.median(times)) if len(times) else 0.0
        if owner < 0:
            apart["no op"] += time_ns
            continue
        each[owner].measured_ns += time_ns
        each[owner].measured[short_name(kernel)] += 1
    for index, work in enumerate(works):
        if work.question is None:
            apart[work.kind] += each[index].measured_ns
            continue
        _fill(each[index], answers[index], work.moved, missing)
        if index not in crowded:
            each[index].clear_predicted_ns, each[index].clear_measured_ns = each[index].predicted_ns, each[index].answered_ns
        ops[work.question.call.op].add(each[index])


def _beside(row: Row) -> list[bool]:
    """Per kernel, whether a collective of the same rank ran at the same time."""
    start = np.asarray(row["start_ns"], dtype=np.int64)
    # Starts are those of the last profiled step.
    end = start + np.array([times[-1] if len(times) else 0 for times in row["kernel_ns"]], dtype=np.int64)
    collective = np.array([kernel.startswith(_COLLECTIVE_KERNELS) for kernel in row["kernel"]], dtype=bool)
    overlaps = (start[:, None] < end[collective]) & (end[:, None] > start[collective])
    result: list[bool] = overlaps.any(axis=1).tolist()
    return result


def _fill(call: OpTime, answered: Answered, moved: float, missing: Times) -> None:
    if answered.answer is None:
        call.unanswered_ns = call.measured_ns
        missing[answered.why] += call.measured_ns
        return
    call.predicted_ns = answered.answer.time_ns * moved
    call.predicted.update(launch.kernel for launch in answered.answer.launches)
    if not answered.answer.inside:
        call.outside_ns = call.measured_ns


def op_times(cases: Iterable[CaseTime]) -> dict[str, OpTime]:
    """Every op over all cases, those that take the most time first."""
    total: dict[str, OpTime] = defaultdict(OpTime)
    for case in cases:
        for name, op in case.ops.items():
            total[name].add(op)
    return dict(sorted(total.items(), key=lambda item: -item[1].measured_ns))


def validation_of(cases: Sequence[CaseTime]) -> Validation:
    """The sums of all cases, per workload and part of the GPU, and how much of the time was answered."""
    compared = [Compared(_case(case), _groups(case)) for case in cases]
    clear = [Compared(_clear(case), _groups(case)) for case in cases if case.share > 1]
    clear = [each for each in clear if each.case.measured]
    result = grouped(compared, order=_whole_first) | grouped(clear, ", beside no collective", order=_whole_first)
    measured = sum(case.measured_ns for case in cases)
    missing: Times = defaultdict(float)
    for case in cases:
        for why, time_ns in case.missing.items():
            missing[why] += time_ns
    largest = sorted(missing.items(), key=lambda item: -item[1])
    return Validation.of(
        "device-time",
        "compute kernels of whole steps, from execution traces",
        compared,
        groups=result,
        facts=_facts(cases, measured),
        notes=("collectives and lookups are left out; what nothing answers counts as zero",),
        warnings=tuple(f"{why}: {time_ns / measured:.3%} of the measured compute" for why, time_ns in largest),
    )


def _case(case: CaseTime) -> MeasuredCase:
    spread = (max(case.repeats_ns) - min(case.repeats_ns)) / case.measured_ns if case.repeats_ns else None
    return MeasuredCase(case.name, case.predicted_ns, case.measured_ns, spread)


def _clear(case: CaseTime) -> MeasuredCase:
    predicted = sum(op.clear_predicted_ns for op in case.ops.values())
    return MeasuredCase(case.name, predicted, sum(op.clear_measured_ns for op in case.ops.values()))


def _groups(case: CaseTime) -> tuple[str, str]:
    return case.workload, f"{case.workload}, 1/{case.share} of the GPU" if case.share > 1 else f"{case.workload}, {_WHOLE}"


def _whole_first(name: str) -> tuple[bool, str, bool, str]:
    """Workloads, then each on a whole GPU and on parts of it."""
    workload, _, share = name.partition(", ")
    return bool(share), workload, share != _WHOLE, share


def _facts(cases: Sequence[CaseTime], measured_ns: float) -> dict[str, float]:
    ops = op_times(cases)
    launches = sum((op.measured for op in ops.values()), Counter())
    text = sum((op.predicted for op in ops.values()), Counter())
    same = sum(sum((op.measured & op.predicted).values()) for op in ops.values())
    apart: Times = defaultdict(float)
    for case in cases:
        for kind, time_ns in case.apart_ns.items():
            apart[kind] += time_ns
    every = measured_ns + apart[LOOKUP] + apart[COLLECTIVE] + apart["no op"]
    return {
        "coverage": sum(op.answered_ns for op in ops.values()) / measured_ns,
        "outside_fitted_range": sum(op.outside_ns for op in ops.values()) / measured_ns,
        "launches_predicted": sum(text.values()) / max(1, launches.total()),
        "launches_with_the_right_kernel": same / max(1, launches.total()),
        "compute": measured_ns / every,
        "lookups": apart[LOOKUP] / every,
        "collectives": apart[COLLECTIVE] / every,
        "of_no_op": apart["no op"] / every,
    }
