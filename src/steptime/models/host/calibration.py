"""How fast a host is now: its `Speed` from a few seconds of calibration rows, one set of factors per box."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from steptime.models.host.model import HostModel
from steptime.models.host.speed import HostCost, Speed

Row = Mapping[str, Any]

# By how much launches slow down where CPU work takes once more as long (seen in the measured rows: 4.5 us become 5.7).
LAUNCH_PER_CPU = 0.27


def speed_of(model: HostModel, rows: Iterable[Row]) -> Speed | None:
    """The factors that a calibration's rows show: means over what was asked, because each was asked at some other moment.

    None where the rows have nothing in common with what the model was fitted on.
    """
    main: list[float] = []
    backward: list[float] = []
    for row in rows:
        cost = model.around.get(f"calibrated {row['kind']} {row['op']}")
        if cost is not None and cost.cpu_ns > 0:
            (backward if row["kind"] == "backward_node" else main).append(_factor(cost, float(np.median(row["times_ns"]))))
    if not main:
        return None
    cpu = float(np.mean(main))
    return Speed(cpu, launch_factor(cpu), float(np.mean(backward)) if backward else cpu)


def speed_at(model: HostModel, view_ns: Sequence[float]) -> float:
    """The factor of CPU work from times of one `view` from Python, the call that measured rows have beside every burst."""
    return float(np.mean(view_ns)) / model.reference_cpu_ns


def launch_factor(cpu: float) -> float:
    """How launches slow down with the CPU: they were never seen to do so by themselves for longer than a burst."""
    return 1.0 + LAUNCH_PER_CPU * (cpu - 1.0)


def _factor(cost: HostCost, time_ns: float) -> float:
    """The factor at which a cost takes so long, its launches slowing down with it."""
    own = time_ns - (1.0 - LAUNCH_PER_CPU) * cost.launch_ns
    # Below half of the fast state there is nothing: it is noise in a small difference.
    return max(0.5, own / (cost.cpu_ns + LAUNCH_PER_CPU * cost.launch_ns))
