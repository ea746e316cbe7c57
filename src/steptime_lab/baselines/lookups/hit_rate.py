"""The published rules with a hit rate of the L2 cache, from sizes and uniformly drawn rows: both of its versions (Lin et al.).

Of the later one the curves of bandwidth over bytes are a constant and a bandwidth each, as in the earlier. Multiplications of
the backward pass are left out of both: on this GPU they take a hundredth of what the rows' bytes take.
"""

from __future__ import annotations

import numpy as np

from steptime._hardware.device import reference_device
from steptime._lookups.table import Floats
from steptime._models.lookups.batch import Lookups
from steptime_lab.baselines.lookups.heuristic import (
    OFFSET_BYTES,
    PLACE_BYTES,
    START_CACHE,
    START_MEMORY,
    START_NS,
    Rule,
    sample_bytes,
    state_bytes,
)

# Of the later version: warps of an SM (64 at 71 % occupancy), and the part of L2 that is taken to hold rows.
_WARPS, _L2_USED = 45.0, 0.9
# Rows of one block in the kernel of the earlier version: so many elements.
_BLOCK_ELEMENTS = 256.0
# Rows up to so wide have factors of their own in the later version: published 1.1 and 1.55, where the fit begins.
_NARROW, _NARROWEST = 64.0, 32.0
_NEVER = -50.0


def _live(lookups: Lookups, warps: Floats | float) -> Floats:
    """Tables that are in work at once, [tables of the pool]: as many as give every SM its warps."""
    return np.ceil(reference_device().sms.value * warps / np.maximum(lookups.pool.tables.batch, 1.0))


def _by_bags(lookups: Lookups) -> Floats:
    """Bytes from memory and from L2 where a bag hits if all of its rows are resident: C(resident, L) / C(rows, L)."""
    pool, each = lookups.pool, sample_bytes(lookups)
    tables = pool.tables
    l2_bytes = reference_device().cache_bytes.value
    cached = np.minimum(l2_bytes / _live(lookups, np.maximum(_BLOCK_ELEMENTS / tables.dim, 1.0)), pool.row_bytes * tables.rows)
    resident = cached / pool.row_bytes
    possible = (tables.pooling <= resident) & (tables.lookups > 0)
    bag = np.where(possible, tables.pooling, 0.0)
    logs = _ln_falling(resident, bag) - _ln_falling(tables.rows, bag)
    hits = np.where(possible, np.exp(np.clip(logs, _NEVER, 0.0)), 0.0)
    rows = tables.batch * each.rows
    again = np.maximum(rows - cached, 0.0)
    cache = tables.batch * (PLACE_BYTES + OFFSET_BYTES) + hits * again
    memory = tables.batch * (each.indices + each.output) + (1 - hits) * again + np.minimum(cached, rows)
    return np.column_stack([lookups.sums(memory) + state_bytes(lookups), lookups.sums(cache)])


def _by_rows(lookups: Lookups) -> Floats:
    """Bytes from memory and from L2 by each row's chance of being resident, and the mean width of rows."""
    pool, each = lookups.pool, sample_bytes(lookups)
    tables = pool.tables
    looked_up = np.maximum(tables.lookups, 1e-9)
    l2_bytes = _L2_USED * reference_device().cache_bytes.value
    resident = np.minimum(l2_bytes / (_live(lookups, _WARPS) * pool.row_bytes), np.minimum(tables.rows, looked_up))
    distinct = -tables.rows * np.expm1(looked_up * np.log1p(-1 / np.maximum(tables.rows, 2.0)))
    missed = np.where(distinct > resident, resident + (looked_up - resident) * (1 - resident / tables.rows), distinct)
    hits = np.clip(1 - missed / looked_up, 0.0, 1.0)
    memory = tables.batch * (PLACE_BYTES + OFFSET_BYTES + each.indices + each.output + (1 - hits) * each.rows)
    return np.column_stack(
        [
            lookups.sums(memory) + state_bytes(lookups),
            lookups.sums(tables.batch * hits * each.rows),
            lookups.sums(tables.dim) / lookups.counts,
        ]
    )


def _slower(moved: Floats, constants: Floats) -> Floats:
    """A constant, and the slower of memory and cache."""
    result: Floats = np.exp(constants[0]) + np.maximum(moved[:, 0] / np.exp(constants[1]), moved[:, 1] / np.exp(constants[2]))
    return result


def _slower_by_width(moved: Floats, constants: Floats) -> Floats:
    """The same, with factors for narrow rows."""
    width = moved[:, 2]
    factor = np.where(width > _NARROW, 0.0, np.where(width > _NARROWEST, constants[3], constants[4]))
    return _slower(moved * np.exp(factor)[:, None], constants)


def _ln_falling(top: Floats, terms: Floats) -> Floats:
    """ln(top * (top - 1) * ... ) of so many terms, also of broken numbers."""
    return _ln_gamma(top + 1) - _ln_gamma(np.maximum(top - terms, 0.0) + 1)


def _ln_gamma(number: Floats) -> Floats:
    """Of numbers of at least 1, to nine digits: Stirling's series from 8 on, reached by multiplication."""
    up = number + 7
    series = 1 / (12 * up) - 1 / (360 * up**3) + 1 / (1260 * up**5)
    result: Floats = (up - 0.5) * np.log(up) - up + 0.5 * np.log(2 * np.pi) + series
    for step in range(7):
        result = result - np.log(number + step)
    return result


BAGS = Rule(_by_bags, _slower, (START_NS, START_MEMORY, START_CACHE))
ROWS = Rule(_by_rows, _slower_by_width, (START_NS, START_MEMORY, START_CACHE, np.log(1.1), np.log(1.55)))
