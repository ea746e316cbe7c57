"""How sure a gain over the usual rules is.

An error that all lookups share changes two plans alike; one of a single table changes their order. So loads of tables are drawn
anew, each by the errors of the lookup model about it alone, and both plans are put together from the same draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.table_lookups import table_lookups
from steptime._models.lookups.question import BACKWARD, FORWARD, Lookup
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.platform import Platform
from steptime._shard.explain.plan import Evaluated
from steptime._shard.search.search import Option, Searched
from steptime._shard.task.task import Task

Floats = npt.NDArray[np.float64]

_DRAWS = 400
_LEVELS = (0.05, 0.95)
_NINE_OF_TEN = 1.645  # standard deviations of a normal to either side
# Steps that differ by less are not told apart, whatever the lookups are: plans evaluated together and played differ by 0.3 % at
# most (benchmarks/sharding_plans.py).
_TOLD_APART = 0.003


@dataclass(frozen=True, slots=True)
class Gain:
    """How much longer the best usual rule's step is than the best plan's, as a share, and nine of ten draws of it."""

    rule: str
    share: float
    interval: tuple[float, float]

    @property
    def sure(self) -> bool:
        """Whether the gain is larger than its uncertainty."""
        return self.interval[0] > _TOLD_APART


def gain(found: Searched, best: Evaluated, calibration: Calibration = UNCALIBRATED) -> Gain | None:
    """Over the best usual rule; None where no rule's plan fits."""
    rule = found.best_rule
    if rule is None:
        return None
    name, option = rule
    share = option.step_ns / found.best.step_ns - 1
    other = Evaluated(found.task, best.platform, option.plan, calibration, found.step)
    draws = _table_errors(found.task, best.platform)
    samples = _drawn_ns(other, draws, option) / _drawn_ns(best, draws, found.best) - 1
    low, high = np.quantile(samples, _LEVELS)
    return Gain(name, share, (min(float(low), share), max(float(high), share)))


def _table_errors(task: Task, platform: Platform) -> Floats:
    """Factors of every table's lookups, [draws, tables]: each errs for itself, by what the lookup model errs about it alone."""
    asked = []
    for table in task.tables:
        counted = table_lookups(table, task.model.batch)
        for direction in (FORWARD, BACKWARD):
            optimizer = task.model.optimizer if direction == BACKWARD else "none"
            asked.append(Lookup(task.model.lookup, direction, (counted,), optimizer))
    answers = platform.device.lookup_estimates(asked)
    sigmas = [
        np.log(max(answer.estimate.high_ns, 1.0) / max(answer.estimate.low_ns, 1.0)) / 2 / _NINE_OF_TEN for answer in answers
    ]
    of_table = np.array(sigmas).reshape(-1, 2).mean(axis=1)
    result: Floats = np.exp(np.random.default_rng(0).standard_normal((_DRAWS, len(task.tables))) * of_table)
    return result


def _drawn_ns(one: Evaluated, draws: Floats, option: Option) -> Floats:
    """Steps of a plan with the lookups of its tables drawn, [draws]: the slowest rank of each direction may be another then."""
    here = one.here
    shards = one.division.shards(one.task.tables)
    elements = np.array([table.pooling_factor * (table.dim + 16) for table in one.model.tables])
    shares = elements / np.maximum(np.bincount(one.rank_of, weights=elements, minlength=one.task.ranks)[one.rank_of], 1e-300)
    factors = draws[:, [shard.table for shard in shards]] * shares
    of_rank = np.zeros((len(draws), one.task.ranks))
    np.add.at(of_rank.T, one.rank_of, factors.T)
    changed = np.full(len(draws), option.step_ns)
    for part in (here.forward_ns[0], here.backward_ns[0]):
        changed += (part * of_rank).max(axis=1) - part.max()
    return changed
