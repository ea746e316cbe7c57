"""Ways to pick a plan without running any: the full step, parts of it left out, and what planners use instead.

`planner_costs` is the estimate that TorchRec's planner balances: bytes over bandwidth, table by table, for whole tables on
ranks. Written after torchrec 1.8.0, torchrec/distributed/planner/: estimator/estimator.py (TableWiseEvaluator, which is that
of slices of columns too; fused kernel, no weights), estimator/types.py (ShardPerfContext), types.py (BasicCommsBandwidths;
Perf.total, which leaves the exchange of indices out), constants.py, and perf_models.py (NoopPerfModel: the largest sum of
shards' totals over ranks). tests/torchrec/test_estimator.py holds both equal.
"""

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

Floats = npt.NDArray[np.float64]

_GIB = 1024.0**3
# constants.py: HBM_MEM_BW, INTRA_NODE_BANDWIDTH and CROSS_NODE_BANDWIDTH, bytes a second.
_MEMORY, _NODE, _NETWORK = 897 * _GIB, 600 * _GIB, 12.5 * _GIB
# Its topology's local_world_size, which is the machine's; here that of the usual node.
_NODE_RANKS = 8
# constants.py: BIGINT_DTYPE; fp32 rows and outputs.
_INDEX_BYTES, _ITEM_BYTES = 8.0, 4.0
# "Minimum embedding dim is set to 32 due to kernel usage".
_LEAST_DIM = 32.0
# constants.py: FULL_BLOCK_EMB_DIM, HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY, BWD_COMPUTE_MULTIPLIER.
_FULL_DIM, _HALF_DIM, _HALF_PENALTY, _QUARTER_PENALTY, _BACKWARD = 128.0, 64.0, 1.15, 1.75, 2.0


def planner_costs(model: Dlrm, ranks: int, platform: Platform | None = None) -> Floats:
    """[tables] seconds of each; with the planner's own bandwidths, or those of a platform's data sheets."""
    dim = np.array([float(table.dim) for table in model.tables])
    pooling = np.array([table.pooling_factor for table in model.tables])
    own = _MEMORY, _NODE if ranks <= _NODE_RANKS else _NETWORK
    memory, links = own if platform is None else _bandwidths(platform, ranks)
    penalty = np.where(dim >= _FULL_DIM, 1.0, np.where(dim >= _HALF_DIM, _HALF_PENALTY, _QUARTER_PENALTY))
    lookups = model.batch * pooling
    written = model.batch * np.minimum(pooling, 1.0) * dim * _ITEM_BYTES  # bags that may be empty count in part
    read = np.ceil(lookups * _INDEX_BYTES) + lookups * np.maximum(dim, _LEAST_DIM) * _ITEM_BYTES
    forward = (read + written) * penalty / memory
    result: Floats = forward * (1.0 + _BACKWARD) + 2.0 * written / links
    return result


def _bandwidths(platform: Platform, ranks: int) -> tuple[float, float]:
    """Of memory, a part of a GPU having its part of it, and of the innermost links that join all ranks."""
    limits = platform.device.limits
    if platform.fabric is None or ranks == 1:
        links = _NODE
    else:
        links = next(tier.bandwidth_bytes_per_s.value for tier in platform.fabric.limits.tiers if tier.ranks >= ranks)
    return limits.bandwidth_bytes_per_s.value / limits.share, links


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
