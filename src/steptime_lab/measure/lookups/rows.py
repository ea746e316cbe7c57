"""From what the device did in every repeat of a lookup to one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steptime_lab.measure.kernels.rows import told_by
from steptime_lab.measure.lookups.prepared import PreparedLookup
from steptime_lab.measure.ops.profile import Segment


def row_of(
    prepared: PreparedLookup, direction: str, cache: str, repeats: Sequence[Segment], *, share: int, others: str
) -> dict[str, Any] | None:
    """The row of a lookup in one direction and cache state; nothing where nothing was launched."""
    told = told_by(repeats)
    if told is None:
        return None
    case, every = prepared.case, prepared.statistics
    return {
        **case.asked(direction, cache, share, others),
        "tables": len(case.dims),
        "series": case.series,
        "pooling": [item.pooling for item in every],
        "pooling_spread": [item.pooling_spread for item in every],
        "lookups": [item.lookups for item in every],
        "unique": [item.unique for item in every],
        "reuse": [list(item.reuse) for item in every],
        **told,
    }
