"""The rule that planners use: every lookup reads its row from memory; a constant and a bandwidth are fitted.

Bytes are those of the published simple rule: indices, offsets, rows (backward: read and written) and outputs, in whole sectors.
"""

from __future__ import annotations

import numpy as np

from steptime._lookups.table import Floats
from steptime._models.lookups.batch import Lookups
from steptime_lab.baselines.lookups.heuristic import (
    OFFSET_BYTES,
    PLACE_BYTES,
    START_MEMORY,
    START_NS,
    Rule,
    sample_bytes,
    state_bytes,
)


def _moved(lookups: Lookups) -> Floats:
    each = sample_bytes(lookups)
    samples = lookups.pool.tables.batch
    all_bytes = samples * (PLACE_BYTES + OFFSET_BYTES + each.indices + each.rows + each.output)
    return (lookups.sums(all_bytes) + state_bytes(lookups))[:, None]


def _time_ns(moved: Floats, constants: Floats) -> Floats:
    result: Floats = np.exp(constants[0]) + moved[:, 0] / np.exp(constants[1])
    return result


RULE = Rule(_moved, _time_ns, (START_NS, START_MEMORY))
fit = RULE.fit
load = RULE.load
