"""Predicted step times where the host has most of the say, against unprofiled ones.

A case counts where the device computes for less than 60 % of the unprofiled step. The host's time comes from the model and the
execution traces, at the speed that the calibration of the same processes shows. What the device does is taken as measured:
kernels from profiles, collectives from the model of their fabric (`wire`). The two are put together as
`(host^6 + (wire + exposed compute)^6)^(1/6)`: nearly the larger, and more where both are about as long. Of 4, 6 and 10, 6 is
best on 2 ranks and 4 on 4 ranks, by a percent. Of several ranks the one with the longest trace counts: it has most to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime._models.error import gmae
from steptime._models.host.calibration import speed_of
from steptime._models.host.model import HostModel
from steptime._models.host.speed import STEP, HostCost, Speed
from steptime._ops.catalogue import HostClass
from steptime._program.formats.execution.reader import read
from steptime._program.from_ops import to_program
from steptime._program.program import Collective
from steptime.errors import InputError
from steptime_lab.fit.host import CALIBRATION
from steptime_lab.fit.host_time import HostTime, Part, host_time
from steptime_lab.measurements.programs import CasePrograms
from steptime_lab.measurements.shipped import shipped, shipped_programs
from steptime_lab.validate.profiled import Profiled, profiled
from steptime_lab.validate.summary import Case, Validation, repeat_errors, summary
from steptime_lab.validate.summary import Part as ValidationPart
from steptime_lab.validate.wire import Wire, factors, wire_ns, wires

Row = Mapping[str, Any]

BUSY_BELOW = 0.6
# A single rank has no wire and no neighbours: up to here its host has a say as well, and is shown apart.
MIXED_BELOW = 0.95
MIXED = "1 rank, device busy 60 to 95 %"
NORM = 6.0
# How much longer one of host and device is where it alone decides.
CLEARLY = 1.15
# Calls of `view` in the fixed loop that is timed beside every repeat of a step (measure/steps/state.py).
PROBE_VIEWS = 1000
# Warnings that are shown: one per program, and many say the same.
MOST_WARNINGS = 5


@dataclass(frozen=True)
class HostCase:
    """One timed step."""

    name: str
    workload: str
    ranks: int
    process: str
    measured_ns: float
    times_ns: tuple[float, ...]
    device: Profiled
    wire_ns: float  # collectives one after another
    host: HostTime
    speed: Speed

    @property
    def host_ns(self) -> float:
        """What the host spends."""
        return self.host.total_ns(self.speed)

    @property
    def busy(self) -> float:
        """For which part of the measured step the device computes."""
        return self.device.compute_ns / self.measured_ns

    @property
    def device_ns(self) -> float:
        """Collectives one after another, and the compute that none of them covers."""
        return self.wire_ns + self.device.exposed_ns

    @property
    def predicted_ns(self) -> float:
        """The step."""
        return step_ns(self.host_ns, self.device_ns)

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ns / self.measured_ns - 1.0

    @property
    def regime(self) -> str:
        """What decides how long the step takes: host, device (with its collectives), or both."""
        ratio = self.host_ns / max(self.device_ns, 1.0)
        return "host" if ratio > CLEARLY else "device" if ratio < 1.0 / CLEARLY else "both"


def step_ns(host_ns: float, device_ns: float) -> float:
    """A step of a host and a device that take so long."""
    return float((host_ns**NORM + device_ns**NORM) ** (1.0 / NORM))


def shipped_cases(model: HostModel) -> list[HostCase]:
    """The shipped steps that count."""
    steps, kernels, costs, collectives = (
        shipped(name).to_pylist() for name in ("steps", "step_kernels", "host", "collectives")
    )
    return cases(model, Measured(steps, kernels, costs, collectives), shipped_programs)


@dataclass(frozen=True)
class Measured:
    """Rows of the measured sets of these names."""

    steps: Sequence[Row]
    step_kernels: Sequence[Row]
    host: Sequence[Row]
    collectives: Sequence[Row] = ()


def cases(model: HostModel, measured: Measured, programs: Callable[[str], CasePrograms]) -> list[HostCase]:
    """The timed steps of which the device is busy for less than 60 %, of one rank for less than 95 %, in the order given."""
    recorded: dict[str, list[Row]] = defaultdict(list)
    for row in measured.step_kernels:
        recorded[row["name"]].append(row)
    devices = {name: profiled(ranks) for name, ranks in recorded.items()}
    calibrations = [row for row in measured.host if row["source"] == CALIBRATION]
    known = wires()
    issued: dict[str, tuple[HostTime, tuple[Collective, ...]]] = {}
    found = []
    for row in measured.steps:
        name, device = str(row["name"]), devices.get(row["name"])
        busy_below = MIXED_BELOW if row["ranks"] == 1 else BUSY_BELOW
        if device is None or device.compute_ns >= busy_below * row["time_ns"]:
            continue
        if name not in issued:
            issued[name] = _issued(model, programs(name), device.launches)
        host, collectives = issued[name]
        found.append(
            HostCase(
                name=name,
                workload=str(row["workload"]),
                ranks=int(row["ranks"]),
                process=f"{row['run']} {row['process']}",
                measured_ns=float(row["time_ns"]),
                times_ns=tuple(row["times_ns"]),
                device=device,
                wire_ns=_wire_ns(known.get(int(row["ranks"])), collectives, row, measured.collectives, device),
                host=host,
                speed=step_speed(model, row, calibrations),
            )
        )
    return found


def _issued(
    model: HostModel, programs: CasePrograms, launches: Sequence[Mapping[str, float]]
) -> tuple[HostTime, tuple[Collective, ...]]:
    owner = max(programs.traces, key=lambda rank: len(programs.traces[rank]))
    trace = read(programs.traces[owner].encode(), programs.name)
    program = to_program(trace, rank=owner, world_size=len(programs.owners))
    return host_time(program, model, launches[owner] if owner < len(launches) else None), program.collectives


def _wire_ns(
    wire: Wire | None, collectives: Sequence[Collective], step: Row, calibrations: Sequence[Row], device: Profiled
) -> float:
    """As profiled where no collective of so many ranks was measured alone."""
    if wire is None:
        return device.wire_ns
    return wire_ns(wire, collectives, factors(wire, timed_by(step, calibrations), step.get("wire_probe_ns") or ()))


def timed_by(step: Row, rows: Iterable[Row]) -> list[Row]:
    """Those rows that the processes measured which timed a step."""
    first, ranks = int(step["process"].lstrip("p")), int(step["ranks"])
    group = {f"p{first + rank}" for rank in range(ranks)}
    return [row for row in rows if row["run"] == step["run"] and row["process"] in group]


def step_speed(model: HostModel, step: Row, calibrations: Iterable[Row]) -> Speed:
    """The speed of the processes that timed a step: their own calibration; that of any step where they have none.

    Where a fixed loop was timed beside the repeats, it counts as much.
    """
    views = [probe / PROBE_VIEWS for probe in step.get("host_probe_ns") or ()]
    return speed_of(model, timed_by(step, calibrations), views) or STEP


def validate_host(model: HostModel, found: Sequence[HostCase]) -> Validation:
    """Every case and the usual figures: over all, by ranks and by regime, with simpler forms and the noise floor beside.

    Steps of one rank that keep the device busier are a part by themselves.
    """
    mixed = [case for case in found if case.busy >= BUSY_BELOW]
    found = [case for case in found if case.busy < BUSY_BELOW]
    if not found:
        raise InputError(f"no timed step keeps the device busy for less than {BUSY_BELOW:.0%}: nothing to validate the host on")
    groups: dict[str, list[HostCase]] = defaultdict(list)
    for case in found:
        ranks = f"{case.ranks} rank{'s' if case.ranks > 1 else ''}"
        for name in (ranks, f"{ranks}, {case.regime}", case.regime):
            groups[name].append(case)
    if mixed:
        groups[MIXED] = mixed
    pairs = between_processes(found)
    facts = {"pairs_of_processes": len(pairs) / 2.0, "noise_floor_between_processes": gmae(pairs)} if pairs else {}
    return Validation(
        name="host",
        title=f"steps with the device busy below {BUSY_BELOW:.0%}, unprofiled, after same-machine calibration",
        cases=[_case(case, case.predicted_ns) for case in found],
        whole=_part(model, found),
        parts={name: _part(model, groups[name]) for name in sorted(groups)},
        facts=facts,
        notes=(
            "kernels as profiled in another process, collectives by the model of their fabric, the host from its model",
            "two numbers were chosen on these steps: the norm, and the percentile that a calibration's speed is",
        ),
        warnings=sorted({warning for case in found for warning in case.host.warnings})[:MOST_WARNINGS],
    )


def _part(model: HostModel, found: Sequence[HostCase]) -> ValidationPart:
    baselines = {
        name: summary([_case(case, predicted_ns(model, case)) for case in found]) for name, predicted_ns in FORMS.items()
    }
    return ValidationPart(summary([_case(case, case.predicted_ns) for case in found]), baselines)


def _case(case: HostCase, predicted_ns: float) -> Case:
    low, high = np.percentile(case.times_ns, (10, 90))
    return Case(
        name=case.name,
        predicted=predicted_ns,
        measured=case.measured_ns,
        spread=float(high - low) / case.measured_ns,
        repeat_errors=repeat_errors(case.times_ns),
    )


def between_processes(found: Iterable[HostCase]) -> list[float]:
    """What one process measured against another that timed the same step, both ways: nobody predicts better than that."""
    rows: dict[str, list[HostCase]] = defaultdict(list)
    for case in found:
        rows[case.name].append(case)
    return [
        one.measured_ns / other.measured_ns - 1.0
        for some in rows.values() for one in some for other in some if one.process != other.process
    ]  # fmt: skip


def _without_between(_: HostModel, case: HostCase) -> float:
    costs = [cost for (_, part), cost in case.host.costs.items() if part is not Part.BETWEEN]
    return step_ns(sum(case.speed.time_ns(cost) for cost in costs), case.device_ns)


def _per_launch(model: HostModel, case: HostCase) -> float:
    """Every launch costs one op that launches, from Python, and nothing else costs anything."""
    each = HostCost(model.classes[HostClass.LAUNCH].cpu_ns, model.launch_ns) + model.mechanism("between", "forward")
    return step_ns(case.speed.time_ns(each.times(case.host.launches)), case.device_ns)


FORMS: Mapping[str, Callable[[HostModel, HostCase], float]] = {
    "ops alone, nothing between them": _without_between,
    "launches times one cost": _per_launch,
    "as fast as in bursts": lambda _, case: step_ns(case.host.total_ns(Speed()), case.device_ns),
    "no calibration": lambda _, case: step_ns(case.host.total_ns(STEP), case.device_ns),
    "the larger of host and device": lambda _, case: max(case.host_ns, case.device_ns),
    "collectives as profiled": lambda _, case: step_ns(case.host_ns, case.device.wire_ns + case.device.exposed_ns),
    "device alone": lambda _, case: case.device_ns,
}
