"""What was predicted of the zoo's architectures: a file of answers that stays as it was before anybody measured."""

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

PLATFORM = "1xh200"
DATA = Path(steptime_lab.__file__).parent / "data" / "committed"
PREDICTED, LEFT_OUT = DATA / "zoo_predicted.json", DATA / "zoo_left_out.json"
SECOND_PREDICTED = DATA / "zoo_second_predicted.json"
SCHEMA_VERSION = 1
_NUMBERS = ("step_ms", "low_ms", "high_ms", "device_ms", "fallback", "outside")
_COUNTS = ("launches", "allocated_bytes")


@dataclass(frozen=True, slots=True)
class ZooAnswer:
    """What was said of one architecture."""

    group: str
    step_ms: float
    low_ms: float  # of the interval
    high_ms: float
    device_ms: float
    launches: int
    allocated_bytes: int
    fallback: float  # share of the device time that has no model
    outside: float  # share of it that is beyond what the models were fitted on
    families: Mapping[str, float]  # family of ops -> device ms

    @classmethod
    def of(cls, group: str, step: PredictedStep) -> ZooAnswer:
        """What a prediction says."""
        works = sum(len(cohort.cohort.program.works) for cohort in step.timeline.cohorts)
        return cls(
            group=group,
            step_ms=round(step.step_time_ms, 4),
            low_ms=round(step.interval_ms[0], 4),
            high_ms=round(step.interval_ms[1], 4),
            device_ms=round(step.ranks[0].device_busy_ms, 4),
            launches=works,
            allocated_bytes=int(step.memory.get("allocated_bytes") or 0),
            fallback=round(step.coverage.get("fallback", 0.0), 5),
            outside=round(step.coverage.get("out_of_range", 0.0), 5),
            families={name: round(time_ms, 4) for name, time_ms in step.breakdown.items() if time_ms >= 5e-5},
        )


@dataclass(frozen=True)
class ZooAnswers:
    """All that were predicted with the same models, and why others were not."""

    cases: Mapping[str, ZooAnswer]
    refused: Mapping[str, str] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """One line per architecture."""
        lines = (f"{json.dumps(name)}: {json.dumps(asdict(case))}" for name, case in self.cases.items())
        head = f'"schema_version": {SCHEMA_VERSION}, "platform": "{PLATFORM}",\n"refused": {json.dumps(dict(self.refused))}'
        write_output(file, "{" + head + ',\n"cases": {\n' + ",\n".join(lines) + "\n}}\n")

    @classmethod
    def read(cls, file: Path) -> ZooAnswers:
        """What `write` wrote; one line where it is something else."""
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{file}: not a readable file of the zoo's answers ({error}); predict them again") from error
        if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
            raise InputError(f"{file}: no answers of version {SCHEMA_VERSION}, which this steptime reads; predict them again")
        cases, refused = document.get("cases"), document.get("refused", {})
        if not isinstance(cases, dict) or not isinstance(refused, dict):
            raise InputError(f"{file}: expected objects as cases and refused; predict them again")
        return cls(
            {name: _answer(f"{file}: {name!r}", case) for name, case in cases.items()},
            {name: str(why) for name, why in refused.items()},
        )


def _answer(where: str, case: Any) -> ZooAnswer:
    if not isinstance(case, dict) or set(case) != {each.name for each in fields(ZooAnswer)}:
        raise InputError(f"{where}: expected an object of {', '.join(each.name for each in fields(ZooAnswer))}")
    families = case["families"]
    wrong = [name for name in _NUMBERS if not _is_number(case[name])]
    wrong += [name for name in _COUNTS if not _is_number(case[name]) or int(case[name]) != case[name]]
    wrong += [] if isinstance(case["group"], str) else ["group"]
    wrong += [] if isinstance(families, dict) and all(map(_is_number, families.values())) else ["families"]
    wrong += ["step_ms"] if not wrong and not case["step_ms"] > 0 else []
    if wrong:
        raise InputError(f"{where}: {wrong[0]} is {str(case[wrong[0]])[:60]!r}; expected what `ZooAnswers.write` writes")
    return ZooAnswer(**case)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e18
