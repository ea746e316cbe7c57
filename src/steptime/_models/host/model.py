"""`HostModel`: what the CPU spends on every op and between ops, and how fast a host is; fitted on measured costs, kept as JSON.

The same host runs at two speeds and changes between them within seconds: in the slow state plain CPU work takes twice as long
and a launch a quarter longer (seen in every measured run). So a cost is two numbers, and so is a speed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

import steptime
from steptime._files import write_output
from steptime._hardware.description import Catalogue, ValueRange, read_declared
from steptime._ops.catalogue import HostClass, op_kind
from steptime._values import value_class
from steptime.errors import InputError

# How much a launch slows down when CPU work takes twice as long (seen in the measured rows: 4.5 us become 5.7).
LAUNCH_PER_CPU = 0.27
SCHEMA_VERSION = 1
FOLDER = Path(steptime.__file__).parent / "data" / "hosts"
_CALIBRATED = "calibrated "
REFERENCE_STEP = "step"  # the kind of the training steps that a calibration times
_COST = ValueRange(0, 1e9, "nanoseconds or calls")
_FIRST_CALL = ValueRange(0.1, 100, "times as long")


@value_class
class HostCost:
    """Nanoseconds at speed 1: what stays on the CPU, and what launching takes."""

    cpu_ns: float = 0.0
    launch_ns: float = 0.0

    def __add__(self, other: HostCost) -> HostCost:
        return HostCost(self.cpu_ns + other.cpu_ns, self.launch_ns + other.launch_ns)

    def times(self, count: float) -> HostCost:
        """So many of it."""
        return HostCost(self.cpu_ns * count, self.launch_ns * count)


@dataclass(frozen=True, slots=True)
class Speed:
    """How many times as long each part takes as in bursts of one call on a fast host; the higher, the slower."""

    cpu: float = 1.0
    launch: float = 1.0

    @classmethod
    def of_cpu(cls, cpu: float) -> Speed:
        """The speed at which CPU work takes so many times as long; launches were never seen to slow down by themselves."""
        return cls(cpu, 1.0 + LAUNCH_PER_CPU * (cpu - 1.0))

    def time_ns(self, cost: HostCost) -> float:
        """What a cost takes at this speed."""
        return cost.cpu_ns * self.cpu + cost.launch_ns * self.launch


# A training step runs in the slow state: its main and backward threads take turns and wake from sleep every time. Ops in the
# shipped traces take 2.0 to 2.4 times as long as in bursts, a fixed loop beside steps 2.3 times in nine repeats of ten. Of the
# shipped steps the median error is least here (2.42: -1.8 %, 2.48: -1.2, 2.54: -0.5; 2026-11-18).
STEP = Speed.of_cpu(2.54)


@dataclass(frozen=True, slots=True)
class OpCost:
    """One op at speed 1, called from Python, without its launches: `cpu_ns`, and `per_tensor_ns` for each of a list.

    `launches` is how many it usually makes; where a model of the device knows better, that counts.
    """

    cpu_ns: float
    per_tensor_ns: float = 0.0
    launches: float = 0.0
    rows: int = 0  # measured ones behind it


@dataclass(frozen=True, slots=True)
class Burst:
    """What a cost that calibrations ask for takes on a usual machine: all of it, and what of that is launching at speed 1."""

    time_ns: float
    launch_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class ProfilerCost:
    """What a profiler adds: per op that begins and per launch, and by how much it stretches each kind of cost."""

    per_op_ns: float
    per_launch_ns: float
    stretch: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class HostModel:
    """Costs of one CPU with one software stack at speed 1: the fast state of the host they were measured on."""

    recipe: Mapping[str, str]  # cpu, versions, date, command of the rows behind it
    reference_cpu_ns: float  # what the reference calls of measured rows take at speed 1
    reference_launch_ns: float
    launch_ns: float  # one launch
    binding_ns: float  # what calling an op from Python costs more than from within another op
    ops: Mapping[str, OpCost]  # by name without overload
    classes: Mapping[str, OpCost]  # by `HostClass`, for ops never seen
    around: Mapping[str, HostCost]  # between ops and per mechanism: `kind op`, as measured rows name them
    profilers: Mapping[str, ProfilerCost] = field(default_factory=dict)
    bursts: Mapping[str, Burst] = field(default_factory=dict)  # what calibrations ask for: `kind op`
    first_call: float = 1.0  # how many times as long the first call of an op takes in each phase of a step
    schema_version: int = SCHEMA_VERSION

    def mechanism(self, kind: str, op: str, count: int | None = None) -> HostCost:
        """The cost of a mechanism, or an error that says which one is missing; with a count, of so many and what is fixed."""
        if count is not None:
            return self.mechanism(kind, op).times(count) + self.mechanism(f"{kind}_fixed", op)
        try:
            return self.around[f"{kind} {op}"]
        except KeyError:
            raise InputError(f"the host model has no cost of {kind} {op!r}; fit it on rows that measured it") from None

    def op(self, name: str) -> tuple[OpCost, bool]:
        """The cost of an op, and whether it was ever measured; else that of its class."""
        result = self.ops.get(name)
        return (result, True) if result is not None else (self.classes[op_kind(name).host_class], False)

    @property
    def usual_bursts(self) -> Mapping[str, Burst]:
        """What a calibration is compared with; hosts fitted before there were any have costs at speed 1 instead."""
        if self.bursts:
            return self.bursts
        costs = {name.removeprefix(_CALIBRATED): cost for name, cost in self.around.items() if name.startswith(_CALIBRATED)}
        return {name: Burst(STEP.time_ns(cost), cost.launch_ns) for name, cost in costs.items() if cost.cpu_ns > 0}

    def save(self, path: Path) -> None:
        """Write it as JSON; the same model gives the same bytes."""
        import msgspec  # noqa: PLC0415 - measuring compares with a host where msgspec may be absent

        write_output(path, msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n")

    @classmethod
    def load(cls, path: Path) -> HostModel:
        """Read what `save` wrote."""
        model = read_declared(path, cls, SCHEMA_VERSION, "a host model", "fit it again")
        model.check(str(path))
        return model

    def check(self, where: str) -> None:
        """Every class has a cost, and every cost is a time that a call can take."""
        missing = [name.value for name in HostClass if name not in self.classes]
        if missing:
            raise InputError(f"{where}: no cost of ops of the class {missing[0]!r}; fit it again")
        for key in ("reference_cpu_ns", "reference_launch_ns", "launch_ns", "binding_ns"):
            _COST.check(f"{where}: {key}", getattr(self, key))
        _FIRST_CALL.check(f"{where}: first_call", self.first_call)
        for name, profiler in self.profilers.items():
            _COST.check(f"{where}: profiler {name}: per_op_ns", profiler.per_op_ns)
            _COST.check(f"{where}: profiler {name}: per_launch_ns", profiler.per_launch_ns)
            for kind, factor in profiler.stretch.items():
                _FIRST_CALL.check(f"{where}: profiler {name}: stretch of {kind}", factor)
        for costs in (self.ops, self.classes, self.around, self.bursts):
            for name, cost in costs.items():
                for each in fields(cost):
                    _COST.check(f"{where}: {name}: {each.name}", getattr(cost, each.name))


HOSTS = Catalogue("host", FOLDER, ".json")


def read_host(name: str) -> HostModel:
    """A shipped host by its name, or one of the user's by the path of its JSON file."""
    file = HOSTS.file(name)
    return _shipped(file) if file.parent == FOLDER else HostModel.load(file)


_shipped = cache(HostModel.load)  # files of the package stay as they are


def shipped_bursts(name: str) -> Mapping[str, Burst]:
    """The usual bursts of a host that comes with the package, read without msgspec."""
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return {item: Burst(**burst) for item, burst in content["bursts"].items()}
