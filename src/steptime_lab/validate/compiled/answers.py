"""What was predicted of compiled steps: a file of answers that stays as it was before anybody measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import steptime_lab
from steptime._files import write_output
from steptime._sim.prediction import PredictedStep
from steptime.errors import InputError
from steptime_lab.validate.compiled.kinds import kinds_in

_DATA = Path(steptime_lab.__file__).parent / "data" / "committed"
PREDICTED = _DATA / "compiled_predicted.json"
# The same cases captured with the PyTorch that they were measured with; and predicted again after the errors of the first had
# been seen, but of `SEALED`.
EQUAL_VERSIONS, AGAIN = _DATA / "compiled_equal_versions.json", _DATA / "compiled_again.json"
SEALED = (
    *("low_rank", "masked_encoder", "skipping_net", "field_factors", "contrasted_towers", "dilated_waves", "latent_reader"),
    "patch_mixer",
)
"""Architectures whose measured rows nobody had looked at when they were predicted again."""
PLATFORMS = {1: "1xh200", 2: "2xh200-half-loopback", 4: "4xh200-quarter-loopback"}
FORMS = EAGER, COMPILED = ("eager", "compiled")
SCHEMA_VERSION = 1
_NUMBERS = ("step_ms", "low_ms", "high_ms", "device_ms", "fallback")


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What was said of one form of a case."""

    step_ms: float
    low_ms: float  # of the interval
    high_ms: float
    device_ms: float
    allocated_bytes: int
    fallback: float  # share of the device time that has no model
    kinds: Mapping[str, int]  # kind of kernel -> launches of rank 0

    @classmethod
    def of(cls, step: PredictedStep) -> StepAnswer:
        """What a prediction says."""
        return cls(
            step_ms=round(step.step_time_ms, 4),
            low_ms=round(step.interval_ms[0], 4),
            high_ms=round(step.interval_ms[1], 4),
            device_ms=round(step.ranks[0].device_busy_ms, 4),
            allocated_bytes=int(step.memory.get("steady_allocated_bytes") or 0),
            fallback=round(step.coverage.get("fallback", 0.0), 5),
            kinds=dict(sorted(kinds_in(step.timeline.cohorts[0].cohort.program).items())),
        )


@dataclass(frozen=True, slots=True)
class CaseAnswer:
    """Both forms; None where it was refused."""

    eager: StepAnswer | None = None
    compiled: StepAnswer | None = None

    @property
    def speedup(self) -> float | None:
        """How many times as fast the compiled step is."""
        return None if self.eager is None or self.compiled is None else self.eager.step_ms / self.compiled.step_ms


@dataclass(frozen=True)
class CompiledAnswers:
    """All that were predicted with the same models, by which commit and PyTorch, and why others were not."""

    cases: Mapping[str, CaseAnswer]
    made_with: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """One line per case."""
        lines = (f"{json.dumps(name)}: {json.dumps(asdict(case))}" for name, case in self.cases.items())
        head = f'"schema_version": {SCHEMA_VERSION}, "made_with": {json.dumps(dict(self.made_with))},\n'
        head += f'"refused": {json.dumps(dict(self.refused))}'
        write_output(file, "{" + head + ',\n"cases": {\n' + ",\n".join(lines) + "\n}}\n")

    @classmethod
    def read(cls, file: Path = PREDICTED) -> CompiledAnswers:
        """What `write` wrote; one line where it is something else."""
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{file}: not a readable file of predicted steps ({error}); predict them again") from error
        if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
            raise InputError(
                f"{file}: no predictions of version {SCHEMA_VERSION}, which this steptime reads; predict them again"
            )
        cases, made_with, refused = document.get("cases"), document.get("made_with"), document.get("refused")
        if not isinstance(cases, dict) or not isinstance(made_with, dict) or not isinstance(refused, dict):
            raise InputError(f"{file}: expected objects as cases, made_with and refused; predict them again")
        return cls(
            {name: _case(f"{file}: {name!r}", case) for name, case in cases.items()},
            {name: str(value) for name, value in made_with.items()},
            {name: str(why) for name, why in refused.items()},
        )


def _case(where: str, case: Any) -> CaseAnswer:
    if not isinstance(case, dict) or set(case) != set(FORMS):
        raise InputError(f"{where}: expected an object of {' and '.join(FORMS)}")
    return CaseAnswer(**{form: None if case[form] is None else _answer(f"{where}, {form}", case[form]) for form in FORMS})


def _answer(where: str, answer: Any) -> StepAnswer:
    if not isinstance(answer, dict) or set(answer) != {each.name for each in fields(StepAnswer)}:
        raise InputError(f"{where}: expected an object of {', '.join(each.name for each in fields(StepAnswer))}")
    wrong = [name for name in (*_NUMBERS, "allocated_bytes") if not _is_number(answer[name])]
    kinds = answer["kinds"]
    wrong += [] if isinstance(kinds, dict) and all(map(_is_number, kinds.values())) else ["kinds"]
    wrong += ["step_ms"] if not wrong and not answer["step_ms"] > 0 else []
    if wrong:
        raise InputError(f"{where}: {wrong[0]} is {str(answer[wrong[0]])[:60]!r}; expected what `CompiledAnswers.write` writes")
    return StepAnswer(**answer)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
