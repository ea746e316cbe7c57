"""What the reference steps of a calibration take on the usual host of a model, by the model: captured, without a GPU."""

from __future__ import annotations

from dataclasses import replace

from steptime import capture
from steptime._calibrate.reference_steps import REFERENCE_STEPS
from steptime._models.host.model import REFERENCE_STEP, STEP, Burst, HostModel
from steptime._platforms.platform import Platform
from steptime._sim.modelled.step import modelled

# One rank of the device that hosts were measured with: how many launches an op makes is known of it.
_PLATFORM = "1xh200"
# The reference steps are predicted longer than other host-bound steps: measured over predicted, theirs over that of 18 scripts
# timed within a minute of them (benchmarks/h200/host_bound_visit.py, 2026-11-16: 0.91 and 0.90).
_OVER_OTHERS = 0.91


def reference_bursts(host: HostModel) -> dict[str, Burst]:
    """`step NAME` -> its time at the speed of training steps, and what of that is launching at speed 1."""
    platform = replace(Platform.load(_PLATFORM), host=host)
    result = {}
    for name, make in sorted(REFERENCE_STEPS.items()):
        (issued,) = modelled(capture(make), platform).programs
        cpu_ns = float(issued.gap_cpu_ns.sum() + issued.call_cpu_ns.sum())
        launch_ns = float(issued.call_launch_ns.sum())
        time_ns = _OVER_OTHERS * (cpu_ns * STEP.cpu + launch_ns * STEP.launch)
        result[f"{REFERENCE_STEP} {name}"] = Burst(time_ns, launch_ns)
    return result
