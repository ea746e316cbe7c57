"""The shipped training steps as they were measured: every visit of a case, the calibration of its machine, and its profile.

A case is a timed step; processes that timed the same one are its visits. A visit's calibration is what its own processes
measured before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from steptime._platforms.calibration import Calibration
from steptime_lab.measurements.shipped import shipped
from steptime_lab.validate.calibrations import PLATFORMS, RunCalibrations
from steptime_lab.validate.profiled import Profiled, profiled

Row = Mapping[str, Any]

GPU_BOUND, HOST_BOUND, WIRE_BOUND, MIXED = "GPU-bound", "host-bound", "wire-bound", "mixed"
# Of the unprofiled step: what the device computes, and what of its collectives nothing covers.
_BUSY, _IDLE, _EXPOSED = 0.95, 0.60, 0.40
# On more ranks, steps in which the device idles are as often those of ranks that wait for each other.
_TELLING_RANKS, _TELLING_BUSY = 2, 0.75
DLRM = "dlrm"
_STEP_COLUMNS = (
    "name", "workload", "config", "plan", "batch", "ranks", "time_ns", "times_ns", "spread", "run", "process", "machine",
)  # fmt: skip
_PROFILE_COLUMNS = (
    "name", "workload", "rank", "ranks", "op", "kernel", "start_ns", "launch_ns", "kernel_ns", "host_ns", "run", "machine",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Visit:
    """One process, or group of processes, that timed a case."""

    process: str
    machine: str
    measured_ns: float
    times_ns: tuple[float, ...]
    spread: float  # of its repeats
    calibration: Calibration


@dataclass(frozen=True)
class StepCase:
    """A timed step."""

    name: str
    workload: str
    ranks: int
    config: str  # JSON
    plan: str  # JSON, of a DLRM
    batch: int
    visits: tuple[Visit, ...]
    profile: tuple[Row, ...]  # of `step_kernels`, by rank
    reference: Calibration  # of the run that profiled
    inflation: float = 1.0  # how many times as long the profiled host took as it does unprofiled, by other cases

    @property
    def measured_ns(self) -> float:
        """The median of the visits."""
        return median(visit.measured_ns for visit in self.visits)

    @property
    def spread(self) -> float:
        """Of the repeats of a visit, in the middle of the visits."""
        return median(visit.spread for visit in self.visits)

    @cached_property
    def device(self) -> Profiled:
        """What the device did in the profiled steps."""
        return profiled(self.profile)

    @property
    def exposed_ns(self) -> float:
        """Of the collectives as profiled, free of waiting, what no compute covers."""
        covered = self.device.compute_ns - self.device.exposed_ns
        return max(0.0, self.device.wire_ns - covered) if self.ranks > 1 else 0.0

    @property
    def regime(self) -> str:
        """What mostly determines the step time."""
        if self.device.compute_ns >= _BUSY * self.measured_ns:
            return GPU_BOUND
        if self.exposed_ns > _EXPOSED * self.measured_ns:
            return WIRE_BOUND
        return HOST_BOUND if self.device.compute_ns < _IDLE * self.measured_ns else MIXED

    @property
    def telling(self) -> bool:
        """Whether the step is bound by its host, and so shows how much a profiler slows the host down."""
        idle = self.device.compute_ns < _TELLING_BUSY * self.measured_ns
        return idle and (self.ranks == 1 or (self.ranks == _TELLING_RANKS and self.regime == HOST_BOUND))

    @property
    def inflations(self) -> list[float]:
        """Per visit: how many times as long the profiled host took, at the speed of the host that was profiled."""
        speed = self.reference.speed.cpu
        return [self.profiled_host_ns / (visit.measured_ns * speed / visit.calibration.speed.cpu) for visit in self.visits]

    @property
    def profiled_host_ns(self) -> float:
        """The host's time in the quickest profiled step, of the rank with most to do."""
        return float(max(min(row["host_ns"]) for row in self.profile))


def shipped_steps(names: Iterable[str] | None = None, *, inflated: bool = False) -> list[StepCase]:
    """The shipped cases that were profiled as well, or those of some names, by name.

    `inflated`: how much the profiler took is wanted as well, for which the other cases are read too.
    """
    wanted = None if names is None else set(names)
    read = None if inflated else wanted
    steps, profiles = _by_name("steps", _STEP_COLUMNS, read), _by_name("step_kernels", _PROFILE_COLUMNS, read)
    calibrations = RunCalibrations()
    results = [
        _case(rows, profiles[name], calibrations)
        for name, rows in sorted(steps.items())
        if name in profiles and rows[0]["ranks"] in PLATFORMS
    ]
    telling = [case for case in results if case.telling] if inflated else []
    return [replace(case, inflation=inflation_of(case, telling)) for case in results if wanted is None or case.name in wanted]


def inflation_of(case: StepCase, telling: Iterable[StepCase]) -> float:
    """How many times as long its profiled host took, by other cases: DLRMs apart from the rest, never the one in question."""
    alike = [
        inflation
        for other in telling
        if other.name != case.name and (other.workload == DLRM) == (case.workload == DLRM)
        for inflation in other.inflations
    ]
    return max(1.0, median(alike)) if alike else 1.0


def _by_name(name: str, columns: Sequence[str], wanted: set[str] | None) -> dict[str, list[Row]]:
    table = shipped(name).select(columns)
    if wanted is not None:
        table = table.filter([item in wanted for item in table["name"].to_pylist()])
    result: dict[str, list[Row]] = defaultdict(list)
    for row in table.to_pylist():
        result[row["name"]].append(row)
    return result


def _case(rows: Sequence[Row], profile: Sequence[Row], calibrations: RunCalibrations) -> StepCase:
    first = rows[0]
    visits = tuple(
        Visit(
            process=f"{row['run']} {row['process']}",
            machine=str(row["machine"]),
            measured_ns=float(row["time_ns"]),
            times_ns=tuple(row["times_ns"]),
            spread=float(row["spread"]),
            calibration=calibrations.of_step(row),
        )
        for row in rows
    )
    return StepCase(
        name=str(first["name"]),
        workload=str(first["workload"]),
        ranks=int(first["ranks"]),
        config=str(first["config"]),
        plan=str(first["plan"] or "{}"),
        batch=int(first["batch"]),
        visits=visits,
        profile=tuple(sorted(profile, key=lambda row: int(row["rank"]))),
        reference=calibrations.of_run(str(profile[0]["run"]), int(first["ranks"])),
    )
