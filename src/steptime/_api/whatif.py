"""`whatif`: the changes that would save most of a step; and what changes save that are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from steptime._report.whatif import ChangedPrediction
from steptime._sim.prediction import PredictedStep
from steptime._whatif.savings import Scene

if TYPE_CHECKING:
    from steptime._whatif.grammar import Change


def changed(prediction: PredictedStep, changes: Sequence[Change]) -> ChangedPrediction:
    """A predicted step with changes."""
    return ChangedPrediction.after(Scene(prediction).what_if(changes))
