"""`DividedEvaluator`: plans of one division of a task's tables, evaluated: slices as tables of their own, the rest added."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import EVERYWHERE, Division
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluate.evaluator import Evaluation, Evaluator, Plans
from steptime._shard.evaluate.kinds_analytic import everywhere_ns
from steptime._sim.composed import ComposedStep
from steptime.errors import InputError


@dataclass(frozen=True, eq=False)
class DividedEvaluator:
    """Evaluates plans of the shards of one division."""

    model: Dlrm  # its tables are the shards
    evaluator: Evaluator
    added_ns: float  # to every step, analytic: tables that every rank has a part of

    @classmethod
    def of(
        cls,
        model: Dlrm,
        division: Division,
        platform: Platform,
        ranks: int,
        calibration: Calibration = UNCALIBRATED,
        *,
        exact: bool = False,
        step: ComposedStep | None = None,
    ) -> DividedEvaluator:
        """Of a model whose tables are divided so; `exact` and `step` as `Evaluator` has them."""
        check_shards(division)
        shards = replace(model, tables=division.shard_tables(model.tables))
        evaluator = Evaluator.of(shards, platform, ranks, calibration=calibration, exact=exact, step=step)
        return cls(shards, evaluator, analytic_ns(model, division, platform, ranks))

    def evaluate(self, plans: Plans) -> Evaluation:
        """The plans, [plans, shards], with what is added."""
        result = self.evaluator.evaluate(np.atleast_2d(plans))
        return replace(result, step_ns=result.step_ns + self.added_ns)


def check_shards(division: Division) -> None:
    """Refuses a division that leaves no shard to place: such a step is not modelled."""
    if not any(division.slices):
        raise InputError(
            "every table is row-wise or data-parallel: such a step is not evaluated; leave one table table_wise or column_wise"
        )


def analytic_ns(model: Dlrm, division: Division, platform: Platform, ranks: int) -> float:
    """What tables cost that every rank has a part of."""
    every = division.everywhere()
    return sum(
        everywhere_ns(model, [model.tables[index] for index, item in every.items() if item == kind], kind, platform, ranks)
        for kind in EVERYWHERE
    )
