"""From what the device did in every repeat of a lookup to one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from steptime.measure.kernels.profile import Segment
from steptime.measure.lookups.prepared import Prepared


def row_of(
    prepared: Prepared, direction: str, cache: str, repeats: Sequence[Segment], *, share: int, others: str
) -> dict[str, Any] | None:
    """The row of a lookup in one direction and cache state; nothing where nothing was launched.

    Which kernels are launched can change between repeats (libraries choose). Those of the commonest list are given one by
    one; `times_ns` has all.
    """
    lists = Counter(tuple(work.name for work in segment) for segment in repeats if segment)
    if not lists:
        return None
    names = lists.most_common(1)[0][0]
    alike = [segment for segment in repeats if tuple(work.name for work in segment) == names]
    durations = np.array([[work.duration_ns for work in segment] for segment in alike], dtype=np.float64)  # (repeat, kernel)
    spans = [segment[-1].start_ns + segment[-1].duration_ns - segment[0].start_ns for segment in repeats if segment]
    case, every = prepared.case, prepared.statistics
    return {
        **case.asked(direction, cache, share, others),
        "tables": len(case.dims),
        "series": case.series,
        "pooling": [one.pooling for one in every],
        "pooling_spread": [one.pooling_spread for one in every],
        "lookups": [one.lookups for one in every],
        "unique": [one.unique for one in every],
        "reuse": [list(one.reuse) for one in every],
        "kernel_names": list(names),
        "kernel_ns": np.median(durations, axis=0).tolist(),
        "span_ns": float(np.median(spans)),
        "event_ns": None,
        "times_ns": [float(sum(work.duration_ns for work in segment)) for segment in repeats if segment],
    }
