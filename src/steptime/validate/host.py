"""Predicted step times where the host has most of the say, against unprofiled ones.

A case counts where the device computes for less than 60 % of the unprofiled step. The host's time comes from the model and the
execution traces, at the speed that the calibration of the same processes shows. What the device does is taken as measured:
kernels from profiles, and of every collective the shortest of the ranks, which waited for nobody. The two are put together as
`(host^6 + (wire + exposed compute)^6)^(1/6)`: nearly the larger, and more where both are about as long; 6 is what fits the
steps of DLRM best, and 4 to 10 hardly differ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steptime.graph.formats.execution_program import to_program
from steptime.graph.formats.execution_trace import read
from steptime.measurements.programs import CasePrograms
from steptime.models.host.calibration import speed_of
from steptime.models.host.fit import CALIBRATION
from steptime.models.host.model import HostModel
from steptime.models.host.predict import HostTime, host_time
from steptime.models.host.speed import STEP, Speed

Row = Mapping[str, Any]

BUSY_BELOW = 0.6
NORM = 6.0
# Calls of `view` in the fixed loop that is timed beside every repeat of a step (measure/steps/state.py).
PROBE_VIEWS = 1000
# Of GMAE, as in all tables here: a lucky zero must not sink a geometric mean.
FLOOR = 4e-4


@dataclass(frozen=True)
class Device:
    """What the device did in a profiled step, as measured; nanoseconds."""

    compute_ns: float  # of the rank that computes longest
    exposed_ns: float  # of it, what no collective covers
    wire_ns: float  # collectives, each by the rank that waited least
    launches: tuple[Mapping[str, float], ...]  # per rank, by op


@dataclass(frozen=True)
class HostCase:
    """One timed step."""

    name: str
    workload: str
    ranks: int
    process: str
    measured_ns: float
    times_ns: tuple[float, ...]
    device: Device
    hosts: tuple[HostTime, ...]  # one per distinct program
    speed: Speed

    @property
    def host_ns(self) -> float:
        """Of the rank that has most to do."""
        return max(host.total_ns(self.speed) for host in self.hosts)

    @property
    def device_ns(self) -> float:
        """Collectives one after another, and the compute that none of them covers."""
        return self.device.wire_ns + self.device.exposed_ns

    @property
    def predicted_ns(self) -> float:
        """The step."""
        return float((self.host_ns**NORM + self.device_ns**NORM) ** (1.0 / NORM))

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ns / self.measured_ns - 1.0

    @property
    def spread(self) -> float:
        """(largest - smallest) / median of the repeats."""
        return (max(self.times_ns) - min(self.times_ns)) / self.measured_ns


def cases(
    model: HostModel,
    steps: Iterable[Row],
    kernels: Iterable[Row],
    calibrations: Iterable[Row],
    programs: Callable[[str], CasePrograms],
) -> list[HostCase]:
    """The timed steps of which the device is busy for less than 60 %, in the order given."""
    profiled: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in kernels:
        profiled[row["name"]][row["rank"]] = row
    devices = {name: device_of(list(ranks.values())) for name, ranks in profiled.items()}
    own = [row for row in calibrations if row["source"] == CALIBRATION]
    hosts: dict[str, tuple[HostTime, ...]] = {}
    found = []
    for row in steps:
        device = devices.get(row["name"])
        if device is None or device.compute_ns >= BUSY_BELOW * row["time_ns"]:
            continue
        name = str(row["name"])
        if name not in hosts:
            hosts[name] = _hosts(model, programs(name), device.launches)
        found.append(
            HostCase(
                name=name,
                workload=str(row["workload"]),
                ranks=int(row["ranks"]),
                process=f"{row['run']} {row['process']}",
                measured_ns=float(row["time_ns"]),
                times_ns=tuple(row["times_ns"]),
                device=device,
                hosts=hosts[name],
                speed=step_speed(model, row, own),
            )
        )
    return found


def _hosts(model: HostModel, programs: CasePrograms, launches: Sequence[Mapping[str, float]]) -> tuple[HostTime, ...]:
    found = []
    for owner, text in sorted(programs.traces.items()):
        trace = read(text.encode(), programs.name)
        program = to_program(trace, rank=owner, world_size=len(programs.owners))
        found.append(host_time(program, model, launches[owner] if owner < len(launches) else None))
    return tuple(found)


def step_speed(model: HostModel, step: Row, calibrations: Iterable[Row]) -> Speed:
    """The speed of the processes that timed a step: their own calibration; that of any step where they have none.

    Where a fixed loop was timed beside the repeats, it counts as much.
    """
    first, ranks = int(step["process"].lstrip("p")), int(step["ranks"])
    group = {f"p{first + rank}" for rank in range(ranks)}
    own = [row for row in calibrations if row["run"] == step["run"] and row["process"] in group]
    views = [probe / PROBE_VIEWS for probe in step.get("host_probe_ns") or ()]
    return speed_of(model, own, views) or STEP


def device_of(ranks: Sequence[Row]) -> Device:
    """What the device did, from the profiles of all ranks of a case."""
    compute, exposed = zip(*(_computed(row) for row in ranks), strict=True)
    wires = [
        np.array([float(np.median(n)) for n, k in zip(row["kernel_ns"], row["kernel"], strict=True) if _is_wire(k)])
        for row in ranks
    ]
    same = len({len(each) for each in wires}) == 1
    wire_ns = float(np.min(wires, axis=0).sum()) if same else float(min(each.sum() for each in wires))
    ordered = sorted(ranks, key=lambda row: int(row["rank"]))
    launches = tuple({str(op): float(count) for op, count in Counter(row["op"]).items()} for row in ordered)
    return Device(max(compute), max(exposed), wire_ns, launches)


def _is_wire(kernel: str) -> bool:
    return "nccl" in kernel.lower()


def _computed(row: Row) -> tuple[float, float]:
    """Compute of one rank, and what of it lies outside its collectives in the last profiled step."""
    start = np.asarray(row["start_ns"], dtype=np.float64)
    took = np.array([float(np.median(each)) for each in row["kernel_ns"]])
    wire = np.array([_is_wire(name) for name in row["kernel"]], dtype=bool)
    covered = np.zeros(len(start))
    for begin, length in zip(start[wire], took[wire], strict=True):
        covered += np.maximum(0.0, np.minimum(start + took, begin + length) - np.maximum(start, begin))
    return float(took[~wire].sum()), float(np.maximum(0.0, took - covered)[~wire].sum())


def geomean(errors: Sequence[float]) -> float:
    """Geometric mean of absolute relative errors, with its floor."""
    return float(np.exp(np.mean(np.log(np.abs(errors) + FLOOR))))


def summary(errors: Sequence[float]) -> dict[str, float]:
    """The usual figures, as fractions."""
    size = np.abs(np.asarray(errors))
    return {
        "geomean": geomean(errors), "mape": float(size.mean()), "p90": float(np.percentile(size, 90)), "max": float(size.max()),
        "bias": float(np.mean(errors)), "cases": float(len(size)),
    }  # fmt: skip
