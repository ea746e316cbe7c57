"""Ways to pick a plan without running any: the full step, parts of it left out, and what planners use instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._lookups.generators import Generator
from steptime._models.lookups.question import DIRECTIONS
from steptime._platforms.platform import Platform
from steptime._shard.evaluator import ALL_LAWS, Evaluator, Laws
from steptime._shard.lookup_times import ExactLookups
from steptime._sim.composed import Evaluation
from steptime_lab.validate.sharding.measured import MeasuredTask
from steptime_lab.validate.sharding.planner import planner_costs

Floats = npt.NDArray[np.float64]

OURS = "predicted step"
TABLE_COSTS, PLANNER, PLANNER_HERE = "sum of table costs", "bytes over bandwidth", "bytes over this platform's bandwidth"
UNIFORM, NO_SKEW, NO_HOST = "without index distribution", "without skew and host costs", "without host costs"
LAWS = {
    "contention: all ranks busy alike": Laws(contention=False),
    "exchanges: for all ranks at once": Laws(one_by_one=False),
    "neither law": Laws(contention=False, one_by_one=False),
}
ABLATIONS = (UNIFORM, NO_SKEW, NO_HOST, *LAWS)


def estimates(task: MeasuredTask, platform: Platform) -> tuple[Evaluation, dict[str, Floats]]:
    """The evaluation of a task's plans, and by every way to estimate them [plans], the smaller the better."""
    evaluator = _evaluator(task.model, task, platform)
    ours = evaluator.evaluate(task.rank_of, exact=True)
    result = {
        OURS: ours.step_ns,
        UNIFORM: _evaluator(evenly_looked_up(task.model), task, platform).evaluate(task.rank_of, exact=True).step_ns,
        NO_SKEW: _without_skew(task, evaluator, ours),
        NO_HOST: evaluator.play(task.rank_of, ours.forward_ns, ours.backward_ns).device_ns,
        **{
            name: _evaluator(task.model, task, platform, laws).evaluate(task.rank_of, exact=True).step_ns
            for name, laws in LAWS.items()
        },
        TABLE_COSTS: _slowest(task, table_costs(task.model, platform)),
        PLANNER: _slowest(task, planner_costs(task.model, task.ranks)),
        PLANNER_HERE: _slowest(task, planner_costs(task.model, task.ranks, platform)),
    }
    return ours, result


def _evaluator(model: Dlrm, task: MeasuredTask, platform: Platform, laws: Laws = ALL_LAWS) -> Evaluator:
    return Evaluator(model, platform, task.ranks, calibration=task.calibration, laws=laws)


def evenly_looked_up(model: Dlrm) -> Dlrm:
    """The same model with rows looked up evenly: sizes and pooling factors alone are known."""
    tables = tuple(
        replace(
            table,
            generator=Generator(rows=table.rows, pooling=table.pooling_factor, lengths=table.generator.lengths),
            statistics=None,
        )
        for table in model.tables
    )
    return replace(model, tables=tables)


def _without_skew(task: MeasuredTask, evaluator: Evaluator, found: Evaluation) -> Floats:
    """Every rank has the mean of all ranks' lookups, so that nobody waits."""
    forward, backward = (
        np.repeat(times.mean(axis=1, keepdims=True), times.shape[1], axis=1) for times in (found.forward_ns, found.backward_ns)
    )
    return evaluator.play(task.rank_of, forward, backward).device_ns


def table_costs(model: Dlrm, platform: Platform) -> Floats:
    """[tables] what the lookup models say of every table by itself, both directions."""
    exact = ExactLookups.of(model, platform.device, ())
    alone = np.eye(len(model.tables), dtype=np.bool_)
    result: Floats = sum(exact.of_subsets(alone, direction, ["same"] * len(alone)) for direction in DIRECTIONS) + np.zeros(
        len(alone)
    )
    return result


def _slowest(task: MeasuredTask, costs: Floats) -> Floats:
    """The largest sum of costs of a rank, [plans]."""
    sums = np.zeros((len(task.rank_of), task.ranks))
    np.add.at(sums, (np.arange(len(task.rank_of))[:, None], task.rank_of), costs)
    result: Floats = sums.max(axis=1)
    return result


def rule_picks(task: MeasuredTask) -> Mapping[str, Floats]:
    """Per rule how likely each plan is picked: its own, surely."""
    return {rule: np.eye(len(task.rank_of))[index] for rule, index in task.rules.items()}


def chance_pick(task: MeasuredTask) -> Floats:
    """A rule drawn at random."""
    result: Floats = np.mean(list(rule_picks(task).values()), axis=0)
    return result
