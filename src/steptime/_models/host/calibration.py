"""How fast a host is in training steps: its `Speed` from a few seconds of calibration rows, one factor set per box."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from steptime._models.host.model import HostModel
from steptime._models.host.speed import LAUNCH_PER_CPU, HostCost, Speed

Row = Mapping[str, Any]

# Steps run in the slow state (speed.STEP says why); bursts of a calibration lie in either, and the slow one is their upper end.
# Chosen on the shipped steps: 80 to 95 differ by half a percent in their geomean, the median of the bursts is 2 % worse.
SLOW_PERCENTILE = 90.0


def speed_of(model: HostModel, rows: Iterable[Row], views_ns: Sequence[float] = ()) -> Speed | None:
    """The speed of steps on the host that these calibration rows are of; None where they share nothing with the model's.

    `views_ns`: times of one `view` from Python, where such a loop was timed beside the steps.
    """
    factors: list[float] = []
    for row in rows:
        cost = model.around.get(f"calibrated {row['kind']} {row['op']}")
        if cost is not None and cost.cpu_ns > 0:
            factors.extend(_factor(cost, time_ns) for time_ns in row["times_ns"])
            factors.extend(view_ns / model.reference_cpu_ns for view_ns in row["reference_cpu_ns"] or ())
    found = [float(np.percentile(factors, SLOW_PERCENTILE))] if factors else []
    if views_ns:
        found.append(float(np.median(views_ns)) / model.reference_cpu_ns)
    return Speed.of_cpu(float(np.mean(found))) if found else None


def _factor(cost: HostCost, time_ns: float) -> float:
    """The factor at which a cost takes so long, its launches slowing down with it."""
    own = time_ns - (1.0 - LAUNCH_PER_CPU) * cost.launch_ns
    return own / (cost.cpu_ns + LAUNCH_PER_CPU * cost.launch_ns)
