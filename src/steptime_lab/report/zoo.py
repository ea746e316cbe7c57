"""Whose error it is: the steps of the zoo's architectures, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from steptime._report.json import Document
from steptime._report.layout import print_numbers, print_section
from steptime_lab.validate.zoo.zoo import ZooCase, explained

_HEADS = ("", "step", "device", "memory", "launches", "largest parts of the step's error")
_PARTS = 3  # that are named
_LEAST = 0.002  # of a step, that is worth naming


def zoo_document(cases: Sequence[ZooCase]) -> Document:
    """What `validate zoo --explain --json` adds."""
    by_name = {case.name: case for case in cases}
    return {
        name: {
            "group": by_name[name].answer.group,
            "step_error": by_name[name].step.error,
            "device_error": None if (device := by_name[name].device) is None else device.error,
            "memory_error": by_name[name].memory_error,
            "launches_error": by_name[name].launches_error,
            "parts": dict(parts),
        }
        for name, parts in explained(cases).items()
    }


def print_explained(console: Console, cases: Sequence[ZooCase]) -> None:
    """A line per architecture, the largest error first."""
    by_name = {case.name: case for case in cases}
    rows = []
    for name, parts in explained(cases).items():
        case = by_name[name]
        errors = (case.step.error, case.device.error if case.device else None, case.memory_error, case.launches_error)
        named = [f"{part} {_signed(value)}" for part, value in parts.items() if abs(value) >= _LEAST][:_PARTS]
        rows.append([name, *map(_signed, errors), ", ".join(named)])
    print_section(console, "Whose error", "signed; parts are of the measured step and sum to its error")
    print_numbers(console, _HEADS, rows)


def _signed(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"
