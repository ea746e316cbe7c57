"""The estimate that TorchRec's planner balances: bytes over bandwidth, table by table, for whole tables on ranks.

Written after torchrec 1.8.0, torchrec/distributed/planner/: estimator/estimator.py (TableWiseEvaluator, which is that of slices
of columns too; fused kernel, no weights), estimator/types.py (ShardPerfContext), types.py (BasicCommsBandwidths; Perf.total,
which leaves the exchange of indices out), constants.py, and perf_models.py (NoopPerfModel: the largest sum of shards' totals
over ranks). tests/torchrec/test_estimator.py holds both equal.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._platforms.platform import Platform

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
