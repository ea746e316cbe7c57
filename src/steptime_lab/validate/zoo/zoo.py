"""Step and device time, memory and launches of architectures that no fit has seen, by groups of kin; and whose error it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steptime.errors import InputError
from steptime_lab.measurements.shipped import FOLDER
from steptime_lab.validate.engine import Compared, Group, MeasuredCase, Validation, grouped, repeat_errors
from steptime_lab.validate.zoo.answers import LEFT_OUT, PREDICTED, SECOND_PREDICTED, ZooAnswer, ZooAnswers
from steptime_lab.validate.zoo.left_out import seen_kin
from steptime_lab.validate.zoo.measured import ZooMeasured, measured_zoo

GPU_BOUND, HOST_BOUND, DEVICE_TIME = "GPU-bound", "host-bound", "device time"
# From here on, of the measured step, the device is what it waits for.
_BUSY = 0.9
_MEMORY_BAR, _LAUNCHES_BAR = 0.05, 0.02
HOW_TO_MEASURE = (
    "no architecture of the zoo has been measured; on an H200: `steptime measure zoo -o DIR`, then "
    "`steptime measure merge DIR -o src/steptime_lab/data/measurements --only zoo,zoo_kernels`"
)


@dataclass(frozen=True, slots=True)
class ZooCase:
    """One architecture, predicted and measured."""

    name: str
    answer: ZooAnswer
    measured: ZooMeasured

    @property
    def step(self) -> MeasuredCase:
        """Milliseconds of a step."""
        answer, measured = self.answer, self.measured
        interval = (answer.low_ms, answer.high_ms)
        errors = repeat_errors(measured.times_ms)
        return MeasuredCase(self.name, answer.step_ms, measured.step_ms, measured.spread, interval, errors)

    @property
    def device(self) -> MeasuredCase | None:
        """Milliseconds in which its kernels run; None where they were not profiled.

        Sums of kernels that run side by side (cuDNN's recurrent layers, convolutions one by one) are longer than that, and may
        be longer than the step.
        """
        kernels = self.measured.kernels
        if kernels is None:
            return None
        return MeasuredCase(self.name, self.answer.device_ms, min(kernels.device_ms, self.measured.step_ms))

    @property
    def bound(self) -> str | None:
        """What the measured step waited for."""
        kernels = self.measured.kernels
        if kernels is None:
            return None
        return GPU_BOUND if kernels.device_ms >= _BUSY * self.measured.step_ms else HOST_BOUND

    @property
    def memory_error(self) -> float | None:
        """Of the most bytes allocated; None where nobody counted."""
        there = self.measured.allocated_bytes
        return self.answer.allocated_bytes / there - 1 if there else None

    @property
    def launches_error(self) -> float | None:
        """Of the launches of a step; None where they were not profiled."""
        kernels = self.measured.kernels
        return self.answer.launches / kernels.launches - 1 if kernels is not None and kernels.launches else None

    def split(self) -> dict[str, float]:
        """The relative error of the step: each family's part, and what is no device time; these sum to it."""
        kernels = self.measured.kernels
        if kernels is None:
            return {}
        answer, step_ms = self.answer, self.measured.step_ms
        names = dict.fromkeys([*answer.families, *kernels.families])
        parts = {name: (answer.families.get(name, 0.0) - kernels.families.get(name, 0.0)) / step_ms for name in names}
        own = sum(answer.families.values()) - sum(kernels.families.values())
        parts["host"] = (answer.step_ms - self.measured.step_ms - own) / step_ms
        return dict(sorted(parts.items(), key=lambda item: -abs(item[1])))


def zoo_cases(
    answers: ZooAnswers | None = None, folder: Path = FOLDER, predicted: Path = PREDICTED, left_out: Path = LEFT_OUT
) -> list[ZooCase]:
    """Those that were measured and predicted: by stored answers of models without their group, else by those committed."""
    there = measured_zoo(folder)
    if not there:
        raise InputError(HOW_TO_MEASURE)
    if answers is None:
        answers = ZooAnswers.read(left_out if left_out.exists() else predicted)
    return [ZooCase(name, answers.cases[name], each) for name, each in there.items() if name in answers.cases]


def validate_zoo(cases: Sequence[ZooCase] | None = None, *, by_left_out: bool | None = None) -> Validation:
    """Steps whose weights stayed finite; errors by group of kin, of device time beside."""
    cases = zoo_cases() if cases is None else cases
    usable = [case for case in cases if case.measured.finite]
    if not usable:
        raise InputError("no architecture of the zoo that was measured has an answer; predict them again with --refit")
    without_kin = LEFT_OUT.exists() if by_left_out is None else by_left_out
    steps = [Compared(case.step, (case.answer.group, None, case.bound)) for case in usable]
    return Validation.of(
        "zoo",
        "steps of architectures by models fitted without their group" if without_kin else "steps predicted before measuring",
        steps,
        groups={**grouped(steps), **_device_groups(usable)},
        facts=_facts(usable),
        notes=() if without_kin else tuple(_seen(usable)),
        warnings=tuple(_warnings(cases)),
    )


def second_visit_cases(folder: Path = FOLDER, predicted: Path = SECOND_PREDICTED) -> list[ZooCase]:
    """Architectures that nobody had looked at, by the shipped models before they were measured; none until they are."""
    return zoo_cases(ZooAnswers.read(predicted), folder)


def _device_groups(cases: Sequence[ZooCase]) -> dict[str, Group]:
    """Device time of all, and of each group."""
    pairs = [(case, case.device) for case in cases]
    whole = [Compared(device, (DEVICE_TIME,)) for _, device in pairs if device is not None]
    by_kin = [Compared(device, (case.answer.group,)) for case, device in pairs if device is not None]
    return {**grouped(whole), **grouped(by_kin, f", {DEVICE_TIME}")}


def _facts(cases: Sequence[ZooCase]) -> dict[str, float]:
    memory = [case.memory_error for case in cases if case.memory_error is not None]
    launches = [case.launches_error for case in cases if case.launches_error is not None]
    facts = {"guessed_share_of_device_time_at_most": max(case.answer.fallback for case in cases)}
    if memory:
        facts["memory_within_5_%"] = float(np.mean(np.abs(memory) <= _MEMORY_BAR))
    if launches:
        facts["launches_within_2_%"] = float(np.mean(np.abs(launches) <= _LAUNCHES_BAR))
    return facts


def _seen(cases: Sequence[ZooCase]) -> Iterator[str]:
    kin = seen_kin()
    seen = [f"{group} ({kin[group]:,} rows)" for group in dict.fromkeys(case.answer.group for case in cases) if group in kin]
    if seen:
        yield f"the models have seen kin of {', '.join(seen)}; --refit predicts each group by models that have not"


def _warnings(cases: Sequence[ZooCase]) -> Iterator[str]:
    lost = [case.name for case in cases if not case.measured.finite]
    if lost:
        yield f"weights did not stay finite, left out: {', '.join(lost)}"


def explained(cases: Sequence[ZooCase]) -> dict[str, Mapping[str, float]]:
    """Per architecture the parts of its step's error, the largest error first."""
    usable = [case for case in cases if case.measured.finite and case.measured.kernels is not None]
    return {case.name: case.split() for case in sorted(usable, key=lambda case: -abs(case.step.error))}
