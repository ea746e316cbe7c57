"""Compiled steps: step time, speed-up, kernels and memory, predicted from the script against what ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from steptime.errors import InputError
from steptime_lab.measurements.shipped import FOLDER
from steptime_lab.validate.compiled.answers import (
    AGAIN,
    EQUAL_VERSIONS,
    PREDICTED,
    SEALED,
    CaseAnswer,
    CompiledAnswers,
    StepAnswer,
)  # fmt: skip
from steptime_lab.validate.compiled.kinds import GENERATED, matched
from steptime_lab.validate.compiled.measured import MeasuredForm, MeasuredPair, measured_pairs
from steptime_lab.validate.engine import Compared, Group, MeasuredCase, Validation, grouped, repeat_errors

HOW_TO_MEASURE = (
    "no compiled step has been measured; on an H200: `steptime measure compiled -o DIR --share-gpu`, then "
    "`steptime measure merge DIR -o src/steptime_lab/data/measurements --only compiled`"
)
GRAPHS = "reduce-overhead"
_NAMES = {"default": "mode default", GRAPHS: "CUDA graphs"}
_BUSY = 0.9  # from here on, of the measured step, the device is what it waits for
_MEMORY_BAR = 0.07
# A step is small where the eager one waits for the host, which CUDA graphs take out of the way.
_SMALL = 0.5


@dataclass(frozen=True, slots=True)
class StepPair:
    """One case, both forms predicted and measured."""

    measured: MeasuredPair
    eager: StepAnswer
    compiled: StepAnswer
    equal: StepAnswer | None = None  # the compiled form, captured with the PyTorch that ran
    again: CaseAnswer | None = None  # both forms as predicted again after errors had been seen

    @property
    def speedup(self) -> MeasuredCase:
        """Eager over compiled."""
        measured = self.measured
        return MeasuredCase(measured.name, self.eager.step_ms / self.compiled.step_ms, measured.speedup)

    @property
    def small(self) -> bool:
        """Whether the eager step was the host's."""
        device_ms = self.measured.eager.device_ms
        return device_ms is not None and device_ms < _SMALL * self.measured.eager.step_ms

    @property
    def bound(self) -> str | None:
        """What the compiled step waited for."""
        device_ms = self.measured.compiled.device_ms
        if device_ms is None or self.measured.ranks > 1:
            return None
        return "compiled, GPU-bound" if device_ms >= _BUSY * self.measured.compiled.step_ms else "compiled, host-bound"

    @property
    def memory_error(self) -> float | None:
        """Of the most bytes allocated; None where nobody counted."""
        there = self.measured.compiled.allocated_bytes
        return self.compiled.allocated_bytes / there - 1 if there > 0 else None

    def kernels_matched(self, said: StepAnswer | None, *, generated: bool = False) -> float | None:
        """Share of launches whose kinds agree, of all or of generated ones."""
        there = self.measured.compiled.kinds
        if said is None or not there:
            return None
        return matched(_generated(said.kinds), _generated(there)) if generated else matched(said.kinds, there)


def _generated(kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in kinds.items() if kind.startswith(GENERATED)}


def compiled_pairs(folder: Path = FOLDER, predicted: Path = PREDICTED) -> list[StepPair]:
    """Cases that were measured and of which both forms were predicted."""
    there = measured_pairs(folder)
    if not there:
        raise InputError(HOW_TO_MEASURE)
    answers = CompiledAnswers.read(predicted).cases
    equal, again = (CompiledAnswers.read(file).cases if file.exists() else {} for file in (EQUAL_VERSIONS, AGAIN))
    result = []
    for name, pair in there.items():
        said = answers.get(name)
        if said is not None and said.eager is not None and said.compiled is not None:
            captured = equal[name].compiled if name in equal else None
            result.append(StepPair(pair, said.eager, said.compiled, captured, again.get(name)))
    return result


def validate_compiled(pairs: Sequence[StepPair] | None = None) -> Validation:
    """Compiled steps by mode, precision, ranks and what binds them, eager ones and the speed-up beside; both predictions."""
    pairs = compiled_pairs() if pairs is None else pairs
    if not pairs:
        raise InputError("no compiled step that was measured has been predicted; predict them again")
    again = [_again(pair) for pair in pairs if pair.again is not None and pair.again.eager and pair.again.compiled]
    unseen = [pair for pair in again if pair.measured.architecture in SEALED]
    steps = _steps(pairs)
    return Validation.of(
        "compiled",
        "compiled steps predicted from the script before measuring",
        steps,
        groups={**grouped(steps), **_beside(pairs), **_as("again", again), **_as("again, unseen", unseen)},
        facts={**_facts(pairs), **{f"again_{name}": fact for name, fact in (_facts(again) if again else {}).items()}},
        notes=tuple(_notes(pairs, again)),
    )


def _again(pair: StepPair) -> StepPair:
    """With what was predicted again in place of the first answers."""
    assert pair.again is not None
    assert pair.again.eager is not None
    assert pair.again.compiled is not None
    return replace(pair, eager=pair.again.eager, compiled=pair.again.compiled)


def _as(name: str, pairs: Sequence[StepPair]) -> dict[str, Group]:
    """Groups of such predictions, all compiled steps of them first."""
    steps = _steps(pairs)
    every = [Compared(step.case, ("compiled",)) for step in steps]
    return {f"{name}: {group}": each for group, each in {**grouped(every), **grouped(steps), **_beside(pairs)}.items()}


def _steps(pairs: Sequence[StepPair]) -> list[Compared]:
    return [Compared(_step(pair.measured, pair.measured.compiled, pair.compiled), tuple(_groups(pair))) for pair in pairs]


def _groups(pair: StepPair) -> Iterator[str | None]:
    measured = pair.measured
    yield f"compiled, {_NAMES.get(measured.mode, measured.mode)}"
    yield "compiled, CUDA graphs, small steps" if measured.mode == GRAPHS and pair.small else None
    yield f"compiled, {measured.precision}"
    yield f"compiled, {measured.ranks} rank{'s' * (measured.ranks > 1)}"
    yield pair.bound


def _step(pair: MeasuredPair, measured: MeasuredForm, answer: StepAnswer) -> MeasuredCase:
    return MeasuredCase(
        pair.name, answer.step_ms, measured.step_ms, measured.spread, (answer.low_ms, answer.high_ms),
        repeat_errors(measured.times_ms),
    )  # fmt: skip


def _beside(pairs: Sequence[StepPair]) -> dict[str, Group]:
    """Eager steps, the speed-up by mode, and device time."""
    eager = [Compared(_step(pair.measured, pair.measured.eager, pair.eager), ("eager",)) for pair in pairs]
    faster = [
        Compared(pair.speedup, ("speed-up", f"speed-up, {_NAMES.get(pair.measured.mode, pair.measured.mode)}"))
        for pair in pairs
    ]
    device = [
        Compared(MeasuredCase(pair.measured.name, pair.compiled.device_ms, took_ms), ("compiled, device time",))
        for pair in pairs
        if (took_ms := pair.measured.compiled.device_ms) is not None and pair.measured.ranks == 1
    ]
    return {**grouped(faster), **grouped(eager), **grouped(device)}


def _facts(pairs: Sequence[StepPair]) -> dict[str, float]:
    memory = [pair.memory_error for pair in pairs if pair.memory_error is not None]
    counted = [(sum(pair.compiled.kinds.values()), sum(pair.measured.compiled.kinds.values())) for pair in pairs]
    numbers = [abs(said / there - 1) for said, there in counted if there]
    facts = {"guessed_share_of_device_time_at_most": max(pair.compiled.fallback for pair in pairs)}
    if memory:
        facts["memory_within_7_%"] = float(np.mean(np.abs(memory) <= _MEMORY_BAR))
        facts["memory_error_median"] = float(np.median(np.abs(memory)))
    if numbers:
        facts["number_of_kernels_off_by_median"] = float(np.median(numbers))
    for suffix, said in (("", "compiled"), ("_at_equal_versions", "equal")):
        for name, generated in (("kernels", False), ("generated_kernels", True)):
            shares = [pair.kernels_matched(getattr(pair, said), generated=generated) for pair in pairs]
            known = [share for share in shares if share is not None]
            if known:
                facts[f"{name}_of_the_right_kind{suffix}"] = float(np.mean(known))
    return facts


def _notes(pairs: Sequence[StepPair], again: Sequence[StepPair]) -> Iterator[str]:
    versions = ", ".join(sorted({pair.measured.torch for pair in pairs}))
    for file, said in ((PREDICTED, "captured"), (AGAIN, "again: captured")):
        if file.exists() and (made := CompiledAnswers.read(file).made_with):
            yield f"{said} with PyTorch {made.get('torch', '?')} at commit {made.get('commit', '?')}, measured with {versions}"
    if again:
        yield "again: after the errors of the first answers had been seen; unseen: but of these architectures"
