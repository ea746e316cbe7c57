"""Power, clock and step time of large training steps, predicted before they were measured (`benchmarks/h200/large_steps.py`),
and the power of loops that had no part in the fit.

Steps whose weights nobody looked at in the end stand apart: weights that are not finite draw less power.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import steptime_lab
from steptime._platforms.device import Device
from steptime_lab.fit.power import loop_errors
from steptime_lab.validate.engine import Compared, MeasuredCase, Validation

COMMITTED = Path(steptime_lab.__file__).parent / "data" / "committed"
# What was committed and what was measured afterwards, each time with another card.
VISITS = tuple((f"large_predicted{which}.json", f"large_measured{which}.json") for which in ("", "_again", "_third"))
AT_CAP, BELOW, UNCHECKED = "at the cap", "below the cap", "weights not looked at"
# A card is at its cap where that held its clock for most of the time.
_MOSTLY = 0.5
_DEVICE = "h200"


def validate_power() -> Validation:
    """Step times, and as facts how far off clocks, powers and energies are (means of absolute errors)."""
    steps = list(_steps())
    compared = [each for each, _ in steps]
    checked = [facts for each, facts in steps if UNCHECKED not in each.groups]
    capped = [facts for facts in checked if facts["capped"]]
    free = [facts for facts in checked if not facts["capped"]]
    mixes = loop_errors(Path(steptime_lab.__file__).parent / "data" / "measurements", Device.load(_DEVICE))
    return Validation.of(
        "power",
        "large steps at and below the power cap, predicted before they were measured",
        compared,
        whole=[each for each in compared if UNCHECKED not in each.groups],
        facts={
            "clock_error_at_the_cap": _mean(capped, "clock"),
            "power_error_below_the_cap": _mean(free, "power"),
            "energy_error_below_the_cap": _mean(free, "energy"),
            "energy_error": _mean(checked, "energy"),
            "capped_or_not_right": float(np.mean([facts["right"] for facts in checked])),
            "power_error_of_mixes": float(np.mean(np.abs(list(mixes.values())))),
        },
        notes=("mixes: loops of several kernels that had no part in the fit of energies",),
    )


def _steps() -> Iterator[tuple[Compared, dict[str, Any]]]:
    for predicted_file, measured_file in VISITS:
        predicted = json.loads((COMMITTED / predicted_file).read_text(encoding="utf-8"))
        measured = json.loads((COMMITTED / measured_file).read_text(encoding="utf-8"))["cases"]
        for name, took in measured.items():
            if name in predicted and "step_ms" in took:
                yield _compared(name, predicted[name], took)


def _compared(name: str, predicted: dict[str, Any], took: dict[str, Any]) -> tuple[Compared, dict[str, Any]]:
    low, high = predicted["interval_ms"]
    case = MeasuredCase(name, predicted["step_ms"], took["step_ms"], interval=(low, high))
    capped = took["capped"] > _MOSTLY
    where = UNCHECKED if not took.get("finite") else AT_CAP if capped else BELOW
    energy = predicted["power_w"] * predicted["step_ms"] / (took["power_w"] * took["step_ms"]) - 1
    facts = {
        "capped": capped,
        "right": capped == predicted["capped"],
        "clock": predicted["clock_mhz"] / took["clock_mhz"] - 1,
        "power": predicted["power_w"] / took["power_w"] - 1,
        "energy": energy,
    }
    return Compared(case, (where,)), facts


def _mean(facts: list[dict[str, Any]], name: str) -> float:
    return float(np.mean([abs(each[name]) for each in facts])) if facts else 0.0
