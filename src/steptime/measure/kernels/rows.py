"""From what the device did in every repeat of a call to one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from steptime.measure.kernels.cases import Case
from steptime.measure.kernels.profile import Segment


def row_of(case: Case, cache: str, repeats: Sequence[Segment], *, share: int, others: str) -> dict[str, Any] | None:
    """The row of a case in one cache state; nothing where the op launched nothing.

    Which kernels an op launches can change between repeats. Those of the commonest list are given one
    by one; `times_ns` has all.
    """
    lists = Counter(tuple(work.name for work in segment) for segment in repeats if segment)
    if not lists:
        return None
    names = lists.most_common(1)[0][0]
    alike = [segment for segment in repeats if tuple(work.name for work in segment) == names]
    durations = np.array([[work.duration_ns for work in segment] for segment in alike], dtype=np.float64)  # (repeat, kernel)
    spans = [segment[-1].start_ns + segment[-1].duration_ns - segment[0].start_ns for segment in repeats if segment]
    return {
        **case.asked(),
        "cache": cache,
        "share": share,
        "others": others,
        "kernel_names": list(names),
        "kernel_ns": np.median(durations, axis=0).tolist(),
        "span_ns": float(np.median(spans)),
        "event_ns": None,
        "times_ns": [float(sum(work.duration_ns for work in segment)) for segment in repeats if segment],
    }
