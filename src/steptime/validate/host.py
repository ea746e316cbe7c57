"""Predicted step times where the host has most of the say, against unprofiled ones.

A case counts where the device computes for less than 60 % of the unprofiled step. The host's time comes from the model and the
execution traces, at the speed that the calibration of the same processes shows. What the device does is taken as measured:
kernels from profiles, and of every collective the shortest of the ranks, which waited for nobody. The two are put together as
`(host^6 + (wire + exposed compute)^6)^(1/6)`: nearly the larger, and more where both are about as long. Of 4, 6 and 10, 6 is
best on 2 ranks and 4 on 4 ranks, by a percent. Of several ranks the one with the longest trace counts: it has most to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.graph.formats.execution_program import to_program
from steptime.graph.formats.execution_trace import read
from steptime.measurements.programs import CasePrograms
from steptime.measurements.shipped import shipped, shipped_programs
from steptime.models.host.calibration import speed_of
from steptime.models.host.fit import CALIBRATION
from steptime.models.host.model import LAUNCH, HostModel
from steptime.models.host.predict import HostTime, Part, host_time
from steptime.models.host.speed import STEP, HostCost, Speed
from steptime.validate.profiled import Profiled, profiled

Row = Mapping[str, Any]

BUSY_BELOW = 0.6
NORM = 6.0
# How much longer one of host and device is where it alone decides.
CLEARLY = 1.15
# Calls of `view` in the fixed loop that is timed beside every repeat of a step (measure/steps/state.py).
PROBE_VIEWS = 1000
# Of GMAE, as in all tables here: a lucky zero must not sink a geometric mean.
FLOOR = 4e-4


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
    host: HostTime
    speed: Speed

    @property
    def host_ns(self) -> float:
        """What the host spends."""
        return self.host.total_ns(self.speed)

    @property
    def device_ns(self) -> float:
        """Collectives one after another, and the compute that none of them covers."""
        return self.device.wire_ns + self.device.exposed_ns

    def step_ns(self, host_ns: float) -> float:
        """The step with a host that spends so much."""
        return float((host_ns**NORM + self.device_ns**NORM) ** (1.0 / NORM))

    @property
    def predicted_ns(self) -> float:
        """The step."""
        return self.step_ns(self.host_ns)

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ns / self.measured_ns - 1.0

    @property
    def regime(self) -> str:
        """What decides how long the step takes: host, device (with its collectives), or both."""
        ratio = self.host_ns / max(self.device_ns, 1.0)
        return "host" if ratio > CLEARLY else "device" if ratio < 1.0 / CLEARLY else "both"


def shipped_cases(model: HostModel) -> list[HostCase]:
    """The shipped steps that count."""
    steps, kernels, costs = (shipped(name).to_pylist() for name in ("steps", "step_kernels", "host"))
    return cases(model, steps, kernels, costs, shipped_programs)


def cases(
    model: HostModel,
    steps: Iterable[Row],
    kernels: Iterable[Row],
    calibrations: Iterable[Row],
    programs: Callable[[str], CasePrograms],
) -> list[HostCase]:
    """The timed steps of which the device is busy for less than 60 %, in the order given."""
    recorded: dict[str, list[Row]] = defaultdict(list)
    for row in kernels:
        recorded[row["name"]].append(row)
    devices = {name: profiled(ranks) for name, ranks in recorded.items()}
    own = [row for row in calibrations if row["source"] == CALIBRATION]
    hosts: dict[str, HostTime] = {}
    found = []
    for row in steps:
        name, device = str(row["name"]), devices.get(row["name"])
        if device is None or device.compute_ns >= BUSY_BELOW * row["time_ns"]:
            continue
        if name not in hosts:
            hosts[name] = _host(model, programs(name), device.launches)
        found.append(
            HostCase(
                name=name,
                workload=str(row["workload"]),
                ranks=int(row["ranks"]),
                process=f"{row['run']} {row['process']}",
                measured_ns=float(row["time_ns"]),
                times_ns=tuple(row["times_ns"]),
                device=device,
                host=hosts[name],
                speed=step_speed(model, row, own),
            )
        )
    return found


def _host(model: HostModel, programs: CasePrograms, launches: Sequence[Mapping[str, float]]) -> HostTime:
    owner = max(programs.traces, key=lambda rank: len(programs.traces[rank]))
    trace = read(programs.traces[owner].encode(), programs.name)
    program = to_program(trace, rank=owner, world_size=len(programs.owners))
    return host_time(program, model, launches[owner] if owner < len(launches) else None)


def step_speed(model: HostModel, step: Row, calibrations: Iterable[Row]) -> Speed:
    """The speed of the processes that timed a step: their own calibration; that of any step where they have none.

    Where a fixed loop was timed beside the repeats, it counts as much.
    """
    first, ranks = int(step["process"].lstrip("p")), int(step["ranks"])
    group = {f"p{first + rank}" for rank in range(ranks)}
    own = [row for row in calibrations if row["run"] == step["run"] and row["process"] in group]
    views = [probe / PROBE_VIEWS for probe in step.get("host_probe_ns") or ()]
    return speed_of(model, own, views) or STEP


def report(model: HostModel, found: Sequence[HostCase]) -> dict[str, Any]:
    """Every case and the usual figures, as fractions: over all, by ranks, by regime, and of simpler forms."""
    groups: dict[str, list[HostCase]] = defaultdict(list)
    for case in found:
        groups[f"{case.ranks} rank{'s' if case.ranks > 1 else ''}"].append(case)
        groups[f"{case.ranks} rank{'s' if case.ranks > 1 else ''}, {case.regime}"].append(case)
        groups[case.regime].append(case)
    return {
        "cases": [
            {
                "name": case.name, "predicted": case.predicted_ns, "measured": case.measured_ns, "error": case.error,
                "spread": _spread(case), "ranks": case.ranks, "regime": case.regime, "process": case.process,
            }
            for case in found
        ],
        "summary": {**summary([case.error for case in found]), "noise_floor": noise_floor(found)},
        "parts": {
            name: {**summary([case.error for case in some]), "noise_floor": noise_floor(some)}
            for name, some in sorted(groups.items())
        },
        "baselines": {
            name: summary([case.step_ns(host_ns(model, case)) / case.measured_ns - 1.0 for case in found])
            for name, host_ns in FORMS.items()
        },
    }  # fmt: skip


def _without_between(_: HostModel, case: HostCase) -> float:
    costs = [cost for (_, part), cost in case.host.costs.items() if part is not Part.BETWEEN]
    return sum(case.speed.time_ns(cost) for cost in costs)


def _per_launch(model: HostModel, case: HostCase) -> float:
    """Every launch costs one op that launches, from Python, and nothing else costs anything."""
    each = HostCost(model.classes[LAUNCH].cpu_ns, model.launch_ns) + model.mechanism("between", "forward")
    return case.speed.time_ns(each.times(case.host.launches))


def _fast(_: HostModel, case: HostCase) -> float:
    return case.host.total_ns(Speed())


def _any_box(_: HostModel, case: HostCase) -> float:
    return case.host.total_ns(STEP)


FORMS: Mapping[str, Callable[[HostModel, HostCase], float]] = {
    "ops alone, nothing between them": _without_between,
    "launches times one cost": _per_launch,
    "as fast as in bursts": _fast,
    "no calibration": _any_box,
    "device alone": lambda _model, _case: 0.0,
}


def geomean(errors: Sequence[float]) -> float:
    """Geometric mean of absolute relative errors, with its floor."""
    return float(np.exp(np.mean(np.log(np.abs(errors) + FLOOR)))) if len(errors) else float("nan")


def summary(errors: Sequence[float]) -> dict[str, float]:
    """The usual figures of relative errors."""
    size = np.abs(np.asarray(errors, dtype=np.float64))
    if not len(size):
        return {"cases": 0.0}
    mean = geomean(errors)
    return {
        "cases": float(len(size)), "geomean": mean, "gmae": mean, "mape": float(size.mean()),
        "p90": float(np.percentile(size, 90)), "max": float(size.max()), "bias": float(np.mean(errors)),
    }  # fmt: skip


def noise_floor(found: Iterable[HostCase]) -> dict[str, float]:
    """How well a repeat says what the median of the others is, and a row what another process measured; geometric means."""
    rows: dict[str, list[HostCase]] = defaultdict(list)
    for case in found:
        rows[case.name].append(case)
    within = [each for some in rows.values() for case in some for each in _left_out(case.times_ns)]
    between = [
        one.measured_ns / other.measured_ns - 1.0
        for some in rows.values() for one in some for other in some if one.process != other.process
    ]  # fmt: skip
    floor = {"within_process": geomean(within)} if within else {}
    return {**floor, "between_processes": geomean(between), "pairs": len(between) / 2} if between else floor


def _left_out(times_ns: Sequence[float]) -> list[float]:
    """Each repeat against the median of the others."""
    others = [float(np.median([*times_ns[:at], *times_ns[at + 1 :]])) for at in range(len(times_ns)) if len(times_ns) > 1]
    return [time_ns / other - 1.0 for time_ns, other in zip(times_ns, others, strict=False)]


def _spread(case: HostCase) -> float:
    low, high = np.percentile(case.times_ns, (10, 90))
    return float(high - low) / case.measured_ns
