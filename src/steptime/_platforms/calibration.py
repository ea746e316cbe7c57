"""`Calibration`: how fast the host and the wire of one machine are, from the minute that `steptime calibrate` measures.

There is one way from measured costs to speeds, `Calibration.of`. `steptime calibrate` writes the costs to a file, `predict` and
`shard` read them back, and `validate` takes them from the rows that a run measured before its steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from steptime._models.collectives.message import KINDS, Message
from steptime._models.host.model import LAUNCH_PER_CPU, STEP, Burst, Speed
from steptime._platforms.machine_costs import HostBurst, MachineCosts, WireCost
from steptime._platforms.platform import Platform
from steptime.errors import InputError

# Smaller messages are latency, which calibrations of a few calls repeat badly.
_LEAST_BYTES = 64 << 10
_STREAMED = "stream"
# How much of what a calibration shows is taken, in logarithms; the rest is the usual machine's: bursts and collectives of one
# machine, minutes apart, differ nearly as much as those of several. Collectives of a step begin one by one where those of a
# calibration run back to back. The three were chosen on the shipped steps (2026-11-16).
_HOST_WEIGHT, _WIRE_WEIGHT, _ONE_BY_ONE = 0.6, 0.75, 1.03
# What is left unknown once a machine is calibrated: between processes that time the same step minutes apart, measured steps
# differ by 6 % on the average and by 11 % (standard deviation of the logarithm of their ratio; DLRM of 2 and 4 ranks on one
# machine, two visits each): host-bound ones by more than wire-bound ones.
_HOST_ERROR, _WIRE_ERROR = 0.11, 0.08
# No machine of a platform is so many times faster or slower than another: what is, is of another platform or in other units.
_FAR_OFF = 50


@dataclass(frozen=True)
class Calibration:
    """How fast a machine's host is in training steps, and its wire, per kind of collective."""

    speed: Speed = STEP
    wire: Mapping[str, float] = field(default_factory=dict)  # kind -> how many times as long as the fabric's models say
    # Standard deviations of the logarithm of what is left unknown. Uncalibrated: between the boxes that steps were measured on,
    # hosts differ by 10 % (1.8 to 2.9 times a burst's time, 2.2 taken) and wires by 9 % (0.93 to 1.29 of the models).
    host_error: float = 0.15
    wire_error: float = 0.10

    @classmethod
    def of(cls, costs: MachineCosts, platform: Platform) -> Calibration:
        """The speeds that these costs show beside the models of a platform; as uncalibrated where they show none."""
        factors = host_factors(costs.host, platform.host.usual_bursts)
        wire = _wire(costs.fabric, platform)
        return cls(
            _speed(factors) if factors else UNCALIBRATED.speed,
            wire,
            _HOST_ERROR if factors else UNCALIBRATED.host_error,
            _WIRE_ERROR if wire else UNCALIBRATED.wire_error,
        )

    @classmethod
    def read(cls, file: Path, platform: Platform) -> Calibration:
        """From the file that `steptime calibrate` wrote, for predictions on a platform."""
        costs = MachineCosts.read(file)
        if not host_factors(costs.host, platform.host.usual_bursts):
            raise InputError(
                f"{file}: none of its host costs is known to the host of platform {platform.name}; calibrate again"
            )
        result = cls.of(costs, platform)
        for what, factor in (("host", result.speed.cpu / STEP.cpu), *result.wire.items()):
            if not 1 / _FAR_OFF <= factor <= _FAR_OFF:
                raise InputError(
                    f"{file}: {what} costs {factor:.2g} times what it does on platform {platform.name}, expected "
                    f"{1 / _FAR_OFF:g} to {_FAR_OFF:g}; check the platform and the unit (ns), or calibrate again"
                )
        return result


UNCALIBRATED = Calibration()


def host_factors(bursts: Iterable[HostBurst], usual: Mapping[str, Burst]) -> dict[tuple[str, str], float]:
    """Kind and op -> how many times as long the CPU takes as on the usual machine with such a host."""
    known = ((burst, usual.get(f"{burst.kind} {burst.op}")) for burst in bursts)
    return {
        (burst.kind, burst.op): _factor(burst, of)
        for burst, of in known
        if of is not None and min(_on_cpu(burst, of), _on_cpu(of, of)) > 0
    }


def _factor(burst: HostBurst, usual: Burst) -> float:
    return _on_cpu(burst, usual) / _on_cpu(usual, usual)


def _on_cpu(burst: HostBurst | Burst, usual: Burst) -> float:
    """What of a burst gets longer in step with the CPU; of launches, which slow down less, their share of it."""
    return burst.time_ns - (1.0 - LAUNCH_PER_CPU) * usual.launch_ns


def _speed(factors: Mapping[tuple[str, str], float]) -> Speed:
    shown = float(np.mean(np.log(list(factors.values()))))
    return Speed.of_cpu(STEP.cpu * float(np.exp(_HOST_WEIGHT * shown)))


def _wire(costs: Iterable[WireCost], platform: Platform) -> dict[str, float]:
    """Per kind, how many times as long it takes as the platform's fabric says; of as many ranks as the platform has."""
    logs: dict[str, list[float]] = defaultdict(list)
    for cost in costs:
        usual = cost.mode == _STREAMED and cost.bytes >= _LEAST_BYTES and cost.ranks == platform.ranks
        if usual and cost.collective in KINDS and platform.fabric is not None and platform.fabric.knows(cost.collective):
            (expected,) = platform.fabric.estimates([Message(cost.collective, platform.ranks, cost.bytes)])
            logs[cost.collective].append(float(np.log(max(cost.time_ns, 1.0) / expected.time_ns)))
    return {kind: _ONE_BY_ONE * float(np.exp(_WIRE_WEIGHT * np.mean(item))) for kind, item in sorted(logs.items())}
