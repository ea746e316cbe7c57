"""Intervals at home, on the H200 that the models were fitted on: calibrated and not, visits and architectures left out."""

from __future__ import annotations

from collections.abc import Iterator

from steptime._platforms.situation import KNOWN, KNOWN_CALIBRATED
from steptime_lab.validate.engine import Compared, Validation
from steptime_lab.validate.held_out import AGAIN, STEPS, UNCALIBRATED_NAME, committed_steps, visited
from steptime_lab.validate.intervals.intervals import range_of
from steptime_lab.validate.steps.predict import CaseOutcome
from steptime_lab.validate.steps.steps import by_visit, validate_steps

_VISIT = "visit left out"
_UNSEEN = {STEPS: "architecture not seen, predicted before it was measured", AGAIN: "the same, predicted again"}


def validate_home() -> Validation:
    """Every visit of the shipped steps, a visit that nothing was fitted to, and steps that nobody had seen."""
    compared = [each for outcome in validate_steps().outcomes for each in _shipped(outcome)]
    for each in visited():
        compared.append(Compared(each.case, (KNOWN_CALIBRATED, None, f"{_VISIT}, calibrated host")))
        compared.append(Compared(each.baselines[UNCALIBRATED_NAME], (KNOWN, None, f"{_VISIT}, host not calibrated")))
    for each in committed_steps():
        compared.append(Compared(each.case, (KNOWN, None, None, _UNSEEN[str(each.groups[-1])])))
    return Validation.of(
        "intervals",
        "training steps on an H200 and shares of it, by what is known of the machine",
        compared,
        notes=("half width: of the interval, relative to the prediction, in the middle of the cases",),
    )


def _shipped(outcome: CaseOutcome) -> Iterator[Compared]:
    for each in by_visit(outcome):
        yield Compared(each.case, (KNOWN_CALIBRATED, range_of(outcome.outside)))
