"""`whatif`: the changes that would save most of a step; and what changes save that are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from steptime._report.whatif import ChangedPrediction
from steptime._sim.prediction import PredictedStep
from steptime._whatif.named import Changer
from steptime._whatif.savings import Scene

if TYPE_CHECKING:
    from steptime._platforms.platform import Platform
    from steptime._whatif.grammar import Change


def changed(prediction: PredictedStep, changes: Sequence[Change], platform: Platform | None = None) -> ChangedPrediction:
    """A predicted step with changes; models are those of the platform, or of the device that a recording names."""
    return ChangedPrediction.after(Scene(prediction, Changer(platform, prediction.workload.description.batch)).what_if(changes))
