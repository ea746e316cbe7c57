"""`PowerModel`: the power that kernels draw on one kind of card, and how long they take at lower clocks.

A card draws what it draws at rest, what leaks as it gets warmer, and the energy of its kernels:

    power  = (rest + leakage * (temperature - reference)) + sum of (core * clock^gamma + memory) / period
    core   = operations * energy of one in their precision + time * what the family's instructions draw
    memory = bytes * energy of one

Clocks are fractions of the highest one. Voltage falls with the clock, and core energy with it; memory has clocks of its own.
Three things hold the clock of an SM below what the driver asks for (H200, 2026-11-16, `steptime measure power`):

- while tensor cores work it is `tensor_clock` of that;
- no kernel draws more than `peak` times the cap for a moment: large products meet that limit even after rest, so that they are
  never timed at the highest clock, and neither were those that models were fitted on (`isolated`);
- the driver lowers the clock, within 50 ms, until the mean power is `held` times the cap.

A kernel's time goes with (1 / clock)^elasticity: 1 for what SMs compute, 0 for what memory bounds, between them for the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from steptime._files import read_whole, write_whole
from steptime._hardware.device import DeviceLimits
from steptime.errors import InputError

SCHEMA_VERSION = 1
# Families that multiply matrices on tensor cores, in these precisions.
_MULTIPLYING = ("matmul", "grouped_products", "convolution", "attention")
_TENSOR = ("bfloat16", "float16", "tf32", "float8")
# What fp32 convolutions and attention are computed in.
_AS_TF32 = ("convolution", "attention")
# The lowest clock, of the highest, that is looked at: cards stop lowering theirs somewhere there.
LOWEST_CLOCK = 0.25
# How far off the energy of an operation may be on a card of another kind: standard deviation of its logarithm, a prior.
CARRIED_ERROR = 0.25
_BY_FAMILY, _OTHER = ("active_w", "elasticity"), "other"


@dataclass(frozen=True, slots=True)
class KernelDraw:
    """What one call draws on a card at its highest clock, and what a lower one does to its time."""

    core_j: float
    memory_j: float
    elasticity: float
    tensor: bool
    isolated: float  # the clock its time is of

    def scaled(self, factor: float) -> KernelDraw:
        """Of a call so many times as large."""
        return replace(self, core_j=self.core_j * factor, memory_j=self.memory_j * factor)


def _plausible(number: object) -> bool:
    """Whether it is a number that a quantity of a power model can have."""
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < 1e6


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Of one kind of card. Powers are in W, energies in J."""

    device: str
    cap_w: float
    rest_w: float  # with a context open, at the reference temperature
    closed_w: float  # without one
    leakage_w_per_k: float
    reference_c: float
    inlet_c: float  # what the card comes to rest at, drawing nothing
    kelvin_per_w: float
    gamma: float
    tensor_clock: float
    peak: float  # of the cap
    held: float  # of the cap
    memory_byte_j: float
    collective_w: float  # while a collective is in flight: SMs that poll, memory and links that move
    flop_j: Mapping[str, float]  # by precision
    active_w: Mapping[str, float]  # by family
    elasticity: Mapping[str, float]  # by family, of what memory does not bound
    error: float  # standard deviation of the logarithm of power
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> PowerModel:
        """As `write` wrote it."""
        try:
            content = json.loads(read_whole(file))
            if content.pop("schema_version") != SCHEMA_VERSION:
                raise InputError(f"{file}: another version of power models; fit them again (steptime fit --only power)")
            result = cls(**content)
            result._check()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{file}: not a power model ({' '.join(str(error).split())[:120]})") from None
        return result

    def write(self, file: Path) -> None:
        """Whole or not at all."""
        write_whole(file, json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1) + "\n")

    def _check(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            numbers = value.values() if each.type.startswith("Mapping[str, float]") else [value]
            if each.type not in ("str", "Mapping[str, Any]") and not all(map(_plausible, numbers)):
                raise ValueError(f"{each.name} is {value!r:.60}")
        for name, known, needed in (
            ("flop_j", self.flop_j, "float32"),
            *((name, getattr(self, name), _OTHER) for name in _BY_FAMILY),
        ):
            if needed not in known:
                raise ValueError(f"{name} lacks {needed!r}")
        if not (self.cap_w > 0 and self.tensor_clock > 0 and 0 < self.base_w < self.peak * self.cap_w):
            raise ValueError(f"{self.base_w:.0f} W at rest, expected more than 0 and less than the cap of {self.cap_w:g} W")

    @property
    def base_w(self) -> float:
        """What is drawn beside kernels, before what they warm."""
        return self.rest_w + self.leakage_w_per_k * (self.inlet_c - self.reference_c)

    @property
    def _warmed(self) -> float:
        """How many times as much is drawn for what leaks of it: power warms, and warmth leaks."""
        return 1.0 / max(1.0 - self.leakage_w_per_k * self.kelvin_per_w, 0.5)

    def power_w(self, dynamic_w: float) -> float:
        """Of a card whose kernels draw so much in the mean."""
        return (self.base_w + dynamic_w) * self._warmed

    @property
    def room_w(self) -> float:
        """What kernels may draw in the mean before the clock falls."""
        return max(self.held * self.cap_w / self._warmed - self.base_w, 0.02 * self.cap_w)

    def draw(
        self,
        family: str,
        precision: str,
        *,
        flop: float,
        memory_bytes: float,
        time_ns: float,
        memory_bound: float,
        share: int = 1,
    ) -> KernelDraw:
        """Of a call that takes so long on one of `share` parts of a card, of which all do the same.

        `memory_bound` is the share of that time that memory needs.
        """
        multiplies = family in _MULTIPLYING
        if precision == "float32" and family in _AS_TF32:
            precision = "tf32"
        precision = "float8" if precision.startswith(("float8", "float4")) else precision
        each_j = self.flop_j.get(precision, self.flop_j["float32"]) if multiplies and family != "attention" else 0.0
        core_j = flop * each_j + self._of(self.active_w, family) / share * time_ns * 1e-9
        memory_j = memory_bytes * self.memory_byte_j
        elasticity = self._of(self.elasticity, family) * (1.0 - min(memory_bound, 1.0) ** 2)
        tensor = multiplies and precision in _TENSOR
        isolated = self._isolated(core_j, memory_j, self.peak_room_w / share * time_ns * 1e-9, tensor=tensor)
        return KernelDraw(core_j, memory_j, elasticity, tensor, isolated)

    @property
    def peak_room_w(self) -> float:
        """What kernels may draw for a moment."""
        return self.peak * self.cap_w - self.rest_w

    def _isolated(self, core_j: float, memory_j: float, peak_j: float, *, tensor: bool) -> float:
        """The clock of a call from rest on: where it draws no more than the peak."""
        free = self.tensor_clock if tensor else 1.0
        room_j = peak_j - memory_j
        if core_j * free**self.gamma <= room_j:
            return free
        return float(max((max(room_j, 0.0) / core_j) ** (1.0 / self.gamma), LOWEST_CLOCK))

    def carried(self, here: DeviceLimits, there: DeviceLimits) -> PowerModel | None:
        """Of another kind of card, by the limits of both; None where its cap is not known.

        An operation needs what published products say at each card's own clock (`energy`), or the same, within a quarter:
        older processes need more at the same clock and run at lower ones. What is drawn at rest, leaks and heats goes with the
        cap.
        """
        if there.power_w is None:
            return None
        size = there.power_w.value / self.cap_w
        energy = 1.0 if there.transfer is None or there.transfer.energy is None else there.transfer.energy.value
        products = {} if there.transfer is None else {name: one.value for name, one in there.transfer.product_energy.items()}
        families = dict.fromkeys(_MULTIPLYING, max(products.values(), default=energy))
        rate = there.sms.value * there.clock_hz.value / (here.sms.value * here.clock_hz.value)
        return replace(
            self,
            device=there.name,
            cap_w=there.power_w.value,
            rest_w=self.rest_w * size,
            closed_w=self.closed_w * size,
            leakage_w_per_k=self.leakage_w_per_k * size,
            kelvin_per_w=self.kelvin_per_w / size,
            collective_w=self.collective_w * size,
            flop_j={name: value * products.get(name, energy) for name, value in self.flop_j.items()},
            active_w={name: value * rate * families.get(name, energy) for name, value in self.active_w.items()},
            error=math.hypot(self.error, CARRIED_ERROR),
        )

    def plain_draw(self, family: str, time_ns: float, share: int) -> KernelDraw:
        """Of a call of which only its time is known: half bound by memory."""
        return self.draw(family, "float32", flop=0.0, memory_bytes=0.0, time_ns=time_ns, memory_bound=0.5, share=share)

    @staticmethod
    def _of(values: Mapping[str, float], family: str) -> float:
        return values.get(family, values[_OTHER])


def power_file(device: str) -> str:
    """What the file of a device's power model is called, beside its other models."""
    return f"{device}-power.json"


@cache
def read_power(file: Path) -> PowerModel | None:
    """The model in a file, if it is there."""
    return PowerModel.read(file) if file.is_file() else None
