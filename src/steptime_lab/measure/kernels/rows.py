"""From what the device did in every repeat of a call to one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from steptime_lab.measure.kernels.cases import KernelCase
from steptime_lab.measure.ops.profile import Segment


def row_of(case: KernelCase, cache: str, repeats: Sequence[Segment], *, share: int, others: str) -> dict[str, Any] | None:
    """The row of a case in one cache state; nothing where the op launched nothing."""
    told = told_by(repeats)
    return None if told is None else {**case.asked(), "cache": cache, "share": share, "others": others, **told}


def told_by(repeats: Sequence[Segment]) -> dict[str, Any] | None:
    """The measured columns; nothing where nothing was launched.

    Which kernels are launched can change between repeats (libraries choose). Those of the commonest list are given one by
    one; `times_ns` has all.
    """
    lists = Counter(tuple(work.name for work in segment) for segment in repeats if segment)
    if not lists:
        return None
    names = lists.most_common(1)[0][0]
    alike = [segment for segment in repeats if tuple(work.name for work in segment) == names]
    durations = np.array([[work.duration_ns for work in segment] for segment in alike], dtype=np.float64)  # (repeat, kernel)
    return {
        "kernel_names": list(names),
        "kernel_ns": np.median(durations, axis=0).tolist(),
        "span_ns": float(np.median([span_ns(segment) for segment in repeats if segment])),
        "event_ns": None,
        "times_ns": [float(sum(work.duration_ns for work in segment)) for segment in repeats if segment],
    }


def span_ns(segment: Segment) -> int:
    """From the first start to the last end; cuDNN runs the groups of a convolution side by side, so the last to start may not
    be the last to end."""
    return max(work.start_ns + work.duration_ns for work in segment) - min(work.start_ns for work in segment)
