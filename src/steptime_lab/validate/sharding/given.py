"""Plans that were searched for, timed beside those of the rules in the same blocks: is the search worth it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steptime._platforms.platform import Platform
from steptime._shard.evaluator import Evaluator
from steptime._shard.rules import RULES
from steptime_lab.validate.sharding.measured import MeasuredTask, levels
from steptime_lab.validate.sharding.scores import ratio_interval

# A plan may be slower than the best rule's by so much, or by the noise where that is more.
ALLOWED = 0.02


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """One plan against the best of the rules' of its task, as measured: ratios below 1 are faster."""

    task: str
    further: bool  # the task
    name: str
    predicted_ns: float
    measured_ns: float
    best_rule: str  # by measured times, in hindsight
    best_rule_predicted_ns: float
    best_rule_ns: float
    ratio: float  # of the means over the same blocks
    low: float  # ends of the paired 95 % interval
    high: float

    @property
    def faster(self) -> bool:
        """By more than the noise."""
        return self.high < 1.0

    @property
    def slower(self) -> bool:
        """By more than is allowed and by more than the noise."""
        return self.ratio > 1.0 + ALLOWED and self.low > 1.0


def given_plans(tasks: Sequence[MeasuredTask], platform: Platform) -> list[GivenPlan]:
    """Of tasks with plans beside the rules'."""
    return [item for task in tasks for item in _of_task(task, platform)]


def _of_task(task: MeasuredTask, platform: Platform) -> list[GivenPlan]:
    own = {place for rule, place in task.rules.items() if rule in RULES}
    best = min(own, key=lambda place: float(levels(task.paired)[place]))
    rule = next(rule for rule, place in task.rules.items() if place == best and rule in RULES)
    result = Evaluator(task.model, platform, task.ranks, calibration=task.calibration).evaluate(task.rank_of, exact=True)
    rows = []
    for name, place in task.rules.items():
        if name not in RULES:
            ratio, low, high = ratio_interval(np.log(task.paired[place] / task.paired[best]))
            predicted, measured = result.step_ns.tolist(), task.measured_ns.tolist()
            rows.append(
                GivenPlan(
                    task.name,
                    task.further,
                    name,
                    predicted[place],
                    measured[place],
                    rule,
                    predicted[best],
                    measured[best],
                    ratio,
                    low,
                    high,
                )
            )
    return rows
