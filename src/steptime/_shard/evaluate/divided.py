"""`DividedEvaluator`: plans of one division of a task's tables, evaluated: slices as tables of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.plan import Division
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.evaluate.evaluator import Evaluation, Evaluator, Plans
from steptime._sim.composed import ComposedStep
from steptime.errors import InputError


@dataclass(frozen=True, eq=False)
class DividedEvaluator:
    """Evaluates plans of the shards of one division."""

    model: Dlrm  # its tables are the shards
    evaluator: Evaluator

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
        return cls(shards, evaluator)

    def evaluate(self, plans: Plans) -> Evaluation:
        """The plans, [plans, shards], without tables that every rank has a part of."""
        return self.evaluator.evaluate(np.atleast_2d(plans))


def check_shards(division: Division) -> None:
    """Refuses a division that leaves no shard to place: such a step is not modelled."""
    if not any(division.slices):
        raise InputError(
            "every table is row-wise or data-parallel: such a step is not evaluated; leave one table table_wise or column_wise"
        )
