"""`Calibration`: how fast the host, the device and the wire of one machine are, from what was measured or recorded on it.

There is one way from measured costs to speeds, `Calibration.of`. `steptime calibrate` writes the costs to a file, `predict` and
`shard` read them back, and `validate` takes them from the rows that a run measured before its steps. What costs show is
believed as far as it was right before: speeds are shrunk towards the usual machine's, by the variance of machines over that of
machines and of what was shown together.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from steptime._hardware.device import device_names
from steptime._models.collectives.message import KINDS, Message
from steptime._models.host.model import LAUNCH_PER_CPU, REFERENCE_STEP, STEP, Burst, Speed
from steptime._models.kernels.question import Question
from steptime._models.power.card import Draws, Load
from steptime._platforms.machine_costs import (
    MEMORY_CALL,
    PRODUCT_CALL,
    CardCosts,
    HostBurst,
    MachineCosts,
    RecordedSpeed,
    WireCost,
)
from steptime._platforms.platform import Platform
from steptime.errors import InputError

# Smaller messages are latency, which calibrations of a few calls repeat badly.
_LEAST_BYTES = 64 << 10
_STREAMED = "stream"
# Collectives of a step begin one by one, those of a calibration run back to back (chosen on the shipped steps, 2026-11-16).
_ONE_BY_ONE = 1.03
# Standard deviations of logarithms. Machines: hosts of the boxes that steps were measured on differ by 8 % (six visits, what
# each changed within minutes apart) and wires by 10 % (0.93 to 1.29 of the models); A100 boxes of public steps are 1.5 to 1.75
# times as slow as the one host that was measured (docs/devices.md), and cards of one model differ by 2 %.
HOSTS, UNKNOWN_HOSTS, WIRES, CARDS = 0.08, 0.35, 0.10, 0.02
# What is shown. Reference steps: a host changes by 9 % from one minute to another (two visits: 5, 13), and four steps stand
# for all others with 4 % (host-bound scripts scatter by 8 %: benchmarks/h200/results). Bursts and collectives: weights of 0.6
# and 0.75, chosen on the shipped steps. A recording shows a profiled host, collectives that waited and kernels of its own
# workload (docs/measuring.md has the eight shipped ones); a step without a profiler is predicted to 9 % at its host's speed.
_STEPS, _BURSTS, _STREAMS, _UNPROFILED_STEP = 0.10, 0.065, 0.058, 0.09
# Two kernels stand for all others of a card, and a product's energy for that of all kernels; of a step on a card whose energy
# is known, power is known to what mixes of kernels were off by (`steptime fit --only power`).
_TWO_KERNELS, _ENERGY_SHOWN, _POWER_OF_A_STEP = 0.03, 0.03, 0.035
_MOSTLY = 0.5
_RECORDED_HOST, _RECORDED_WIRE, _RECORDED_DEVICE = 0.27, 0.16, 0.06
# What is left unknown of a step on a machine whose speed is known: between processes that time the same step minutes apart,
# measured steps differ by 6 % on the average and by 11 % (DLRM of 2 and 4 ranks on one machine, two visits each): host-bound
# ones by more than wire-bound ones.
_HOST_OF_A_STEP, _WIRE_OF_A_STEP = 0.11, 0.063
# Nine of ten normal values lie within so many standard deviations to either side.
_NINE_OF_TEN = 1.645
# No machine of a platform is so many times faster or slower than another: what is, is of another platform or in other units.
_FAR_OFF = 50


@dataclass(frozen=True, slots=True)
class Shown:
    """How many times as long something takes as the models say, as a logarithm, and the standard deviation of that."""

    log_factor: float
    error: float

    @classmethod
    def of_run(cls, speed: RecordedSpeed, error: float) -> Shown:
        """What one recording shows: off by what recordings are, and by what its own steps differ by."""
        return cls(math.log(speed.factor), math.hypot(error / speed.share, speed.spread / math.sqrt(speed.repeats)))

    def shrunk(self, between: float) -> Shown:
        """What is to be believed where machines differ by so much."""
        weight = between**2 / (between**2 + self.error**2)
        return Shown(weight * self.log_factor, between * math.sqrt(1.0 - weight))

    @property
    def factor(self) -> float:
        """As a plain number."""
        return math.exp(self.log_factor)


@dataclass(frozen=True)
class Calibration:
    """How fast a machine's host is in training steps, its device, and its wire, per kind of collective."""

    speed: Speed = STEP
    wire: Mapping[str, float] = field(default_factory=dict)  # kind -> how many times as long as the fabric's models say
    # Standard deviations of the logarithm of what is left unknown.
    host_error: float = 0.15
    wire_error: float = 0.10
    device: float = 1.0  # how many times as long kernels take as the device's models say
    energy: float = 1.0  # how many times the energy that the card's model says its kernels need
    power_error: float | None = None  # what is left unknown of that; None: as of any card of its kind
    power_cap_w: float | None = None  # the cap in force; None: as the data sheet says

    def wire_of(self, kind: str) -> float:
        """How many times as long collectives of a kind take; of one that nobody timed, as the others do over the same links."""
        if kind in self.wire or not self.wire:
            return self.wire.get(kind, 1.0)
        return math.exp(sum(map(math.log, self.wire.values())) / len(self.wire))

    @classmethod
    def of(cls, costs: MachineCosts, platform: Platform) -> Calibration:
        """The speeds that these costs show beside the models of a platform; as uncalibrated where they show none."""
        host, device, wire = shown_host(costs, platform), shown_device(costs, platform), shown_wire(costs, platform)
        energy = shown_energy(costs.card, platform)
        return cls(
            Speed.of_cpu(STEP.cpu * host.factor) if host else UNCALIBRATED.speed,
            {kind: item.factor for kind, item in wire.items()},
            math.hypot(host.error, _HOST_OF_A_STEP) if host else UNCALIBRATED.host_error,
            max(math.hypot(item.error, _WIRE_OF_A_STEP) for item in wire.values()) if wire else UNCALIBRATED.wire_error,
            device.factor if device else UNCALIBRATED.device,
            energy.factor if energy else UNCALIBRATED.energy,
            math.hypot(energy.error, _POWER_OF_A_STEP) if energy else None,
            None if costs.card is None else costs.card.limit_w,
        )

    @classmethod
    def read(cls, file: Path, platform: Platform) -> Calibration:
        """From the file that `steptime calibrate` wrote, for predictions on a platform."""
        costs = MachineCosts.read(file)
        check_device(str(file), costs.device, platform)
        if costs.recorded is None and not host_factors(costs.host, platform.host.usual_bursts):
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


def hosts_differ(platform: Platform) -> float:
    """By how much hosts of such machines differ: those of devices that nobody measured here by more."""
    return UNKNOWN_HOSTS if platform.device.limits.analytic else HOSTS


def shown_host(costs: MachineCosts, platform: Platform) -> Shown | None:
    """What is to be believed of the host; None where the costs do not tell."""
    shown = shown_by_costs(costs.host, platform.host.usual_bursts)
    if shown is not None:
        return shown.shrunk(hosts_differ(platform))
    run = costs.recorded
    if run is not None and run.unprofiled is not None:
        return Shown.of_run(run.unprofiled, _UNPROFILED_STEP).shrunk(hosts_differ(platform))
    if run is not None and run.host is not None:
        return Shown.of_run(run.host, _RECORDED_HOST).shrunk(hosts_differ(platform))
    return None


def shown_by_costs(bursts: Sequence[HostBurst], usual: Mapping[str, Burst]) -> Shown | None:
    """Reference steps, off by what they differ by between slots and by more between processes; of older files, bursts."""
    steps = [burst for burst in bursts if burst.kind == REFERENCE_STEP]
    factors = host_factors(steps or bursts, usual)
    if not factors:
        return None
    shown = float(np.mean(np.log(list(factors.values()))))
    if not steps:
        return Shown(shown, _BURSTS)
    # Nine of ten normal values less one of ten lie 2.56 standard deviations apart.
    variances = [(burst.spread / 2.56) ** 2 / burst.repeats for burst in steps]
    return Shown(shown, math.hypot(_STEPS, math.sqrt(sum(variances)) / len(variances)))


def shown_device(costs: MachineCosts, platform: Platform) -> Shown | None:
    """What is to be believed of the device: cards of a measured model differ little, one from a data sheet by its transfer."""
    transfer = platform.device.limits.transfer
    between = CARDS if transfer is None else math.log(transfer.interval_factor["product"].value) / _NINE_OF_TEN
    if costs.card is not None and platform.device.limits.share == 1:
        card, (product, memory) = costs.card, platform.device.estimates([Question(PRODUCT_CALL), Question(MEMORY_CALL)])
        logs = [math.log(card.product_ns / product.estimate.time_ns), math.log(card.memory_ns / memory.estimate.time_ns)]
        return Shown(float(np.mean(logs)), _TWO_KERNELS).shrunk(between)
    if costs.recorded is None or costs.recorded.device is None:
        return None
    return Shown.of_run(costs.recorded.device, _RECORDED_DEVICE).shrunk(between)


def shown_energy(card: CardCosts | None, platform: Platform) -> Shown | None:
    """The energy of a card's kernels, of what its model says: by the clock that its cap leaves a product, or by its power."""
    model = platform.device.power
    if card is None or model is None or card.power_w is None or card.clock_hz is None or platform.device.limits.share > 1:
        return None
    model = replace(model, cap_w=card.limit_w or model.cap_w)
    (product,) = platform.device.estimates([Question(PRODUCT_CALL)])
    if product.draw is None:
        return None
    draws = Draws.of([product.estimate.time_ns], [product.draw], 1)
    load = Load((draws,), (np.ones(1),), product.estimate.time_ns, 1.0, 0.0)
    factors = np.geomspace(0.3, 3.0, 461)
    clocks, powers = load.solved(model, factors)
    held = (card.capped or 0.0) > _MOSTLY
    wanted, seen = (card.clock_hz / platform.device.limits.clock_hz.value, clocks) if held else (card.power_w, powers)
    nearest = float(factors[int(np.abs(seen - wanted).argmin())])
    return Shown(math.log(nearest), _ENERGY_SHOWN).shrunk(model.error)


def shown_wire(costs: MachineCosts, platform: Platform) -> dict[str, Shown]:
    """What is to be believed of the wire, per kind of collective that the costs tell of."""
    measured = _streamed(costs.fabric, platform)
    if measured:
        shrunk = {kind: Shown(log, _STREAMS).shrunk(WIRES) for kind, log in measured.items()}
        return {kind: Shown(item.log_factor + math.log(_ONE_BY_ONE), item.error) for kind, item in shrunk.items()}
    if costs.recorded is None or platform.fabric is None:
        return {}
    return {
        kind: Shown.of_run(speed, _RECORDED_WIRE).shrunk(WIRES)
        for kind, speed in sorted(costs.recorded.wire.items())
        if kind in KINDS and platform.fabric.knows(kind)
    }


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


def _streamed(costs: Iterable[WireCost], platform: Platform) -> dict[str, float]:
    """Per kind, the logarithm of how many times as long collectives take as the platform's fabric says; of its ranks."""
    logs: dict[str, list[float]] = defaultdict(list)
    for cost in costs:
        usual = cost.mode == _STREAMED and cost.bytes >= _LEAST_BYTES and cost.ranks == platform.ranks
        if usual and cost.collective in KINDS and platform.fabric is not None and platform.fabric.knows(cost.collective):
            (expected,) = platform.fabric.estimates([Message(cost.collective, platform.ranks, cost.bytes)])
            logs[cost.collective].append(math.log(max(cost.time_ns, 1.0) / expected.time_ns))
    return {kind: float(np.mean(item)) for kind, item in sorted(logs.items())}


def chips_in(name: str) -> set[str]:
    """Shipped models of GPUs that a driver's name of one holds: `h100` of "NVIDIA H100 80GB HBM3"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    joined = {*words, *(first + second for first, second in pairwise(words))}
    # A name begins with the model, which has a number: `h100-pcie`, `rtx-4090`.
    models = (re.match(r"[a-z]+-?[0-9]+[a-z]*", device) for device in device_names())
    return joined & {model[0].replace("-", "") for model in models if model is not None}


def check_device(where: str, device: str | None, platform: Platform) -> None:
    """Raises where speeds are another machine's: of a CPU, or of a GPU (as its driver names it) that is not the platform's."""
    if device is None:
        return
    if not device:
        raise InputError(f"{where}: was made without a GPU; run `steptime calibrate` on a machine like {platform.name}")
    measured, asked = chips_in(device), chips_in(platform.device.limits.name)
    if measured and asked and not measured & asked:
        raise InputError(f"{where}: was made on {device}, which platform {platform.name} is not; name one with that GPU")
