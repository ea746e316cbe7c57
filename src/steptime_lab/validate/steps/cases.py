"""The shipped training steps as they were measured: every visit of a case, the calibration of its machine, and its profile.

A case is a timed step; processes that timed the same one are its visits. A visit's calibration is what its own processes
measured beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from steptime._models.host.calibration import speed_of
from steptime._models.host.model import HostModel
from steptime._models.host.speed import STEP
from steptime._platforms.platform import Platform
from steptime._sim.modelled.calibrated import HOST_ERROR, WIRE_ERROR
from steptime._sim.modelled.step import Calibration
from steptime_lab.fit.host import CALIBRATION
from steptime_lab.measurements.shipped import shipped
from steptime_lab.validate.host import step_speed, timed_by
from steptime_lab.validate.profiled import Profiled, profiled
from steptime_lab.validate.wire import Now, factors, now, wires

Row = Mapping[str, Any]

GPU_BOUND, HOST_BOUND, WIRE_BOUND, MIXED = "GPU-bound", "host-bound", "wire-bound", "mixed"
# Of the unprofiled step: what the device computes, and what of its collectives nothing covers.
_BUSY, _IDLE, _EXPOSED = 0.95, 0.60, 0.40
# On more ranks, steps in which the device idles are as often those of ranks that wait for each other.
_TELLING_RANKS, _TELLING_BUSY = 2, 0.75
DLRM = "dlrm"
# Ranks of a case share one GPU: one of so many parts for each.
_PLATFORMS = {
    1: "1xh200",
    2: "2xh200-half-loopback",
    4: "4xh200-quarter-loopback",
    8: "8xh200-eighth-loopback",
}
_STEP_COLUMNS = (
    "name", "workload", "config", "plan", "batch", "ranks", "time_ns", "times_ns", "spread", "run", "process", "machine",
    "host_probe_ns", "wire_probe_ns",
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
        """What has most of the say in how long the step takes."""
        if self.device.compute_ns >= _BUSY * self.measured_ns:
            return GPU_BOUND
        if self.exposed_ns > _EXPOSED * self.measured_ns:
            return WIRE_BOUND
        return HOST_BOUND if self.device.compute_ns < _IDLE * self.measured_ns else MIXED

    @property
    def telling(self) -> bool:
        """Whether the step is its host's time, so that it tells how much longer a profiled host takes."""
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


def platform_name(ranks: int) -> str:
    """The shipped platform that cases of so many ranks were timed on."""
    return _PLATFORMS[ranks]


def shipped_steps(names: Iterable[str] | None = None, *, inflated: bool = False) -> list[StepCase]:
    """The shipped cases that were profiled as well, or those of some names, by name.

    `inflated`: how much the profiler took is wanted as well, for which the other cases are read too.
    """
    wanted = None if names is None else set(names)
    read = None if inflated else wanted
    steps, profiles = _by_name("steps", _STEP_COLUMNS, read), _by_name("step_kernels", _PROFILE_COLUMNS, read)
    calibrations = _Calibrations(Platform.load(_PLATFORMS[1]).host)
    found = [
        _case(rows, profiles[name], calibrations)
        for name, rows in sorted(steps.items())
        if name in profiles and rows[0]["ranks"] in _PLATFORMS
    ]
    telling = [case for case in found if case.telling] if inflated else []
    return [replace(case, inflation=inflation_of(case, telling)) for case in found if wanted is None or case.name in wanted]


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
        table = table.filter([one in wanted for one in table["name"].to_pylist()])
    found: dict[str, list[Row]] = defaultdict(list)
    for row in table.to_pylist():
        found[row["name"]].append(row)
    return found


def _by_run(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["run"]].append(row)
    return found


class _Calibrations:
    """What processes measured beside their steps."""

    def __init__(self, host: HostModel) -> None:
        self._host = host
        self._costs = _by_run(row for row in shipped("host").to_pylist() if row["source"] == CALIBRATION)
        self._collectives = _by_run(shipped("collectives").to_pylist())
        self._of_runs: dict[tuple[str, int], Calibration] = {}

    def of_step(self, row: Row) -> Calibration:
        """Of the processes that timed a row of `steps`."""
        wire = wires().get(row["ranks"])
        rows, probes = timed_by(row, self._collectives[row["run"]]), row["wire_probe_ns"] or ()
        known = now(wire, rows, probes) if wire is not None else Now({})
        speed = step_speed(self._host, row, self._costs[row["run"]])
        # A visit knows its machine as well as any that was calibrated.
        return Calibration(speed, known.factors, HOST_ERROR, WIRE_ERROR, known.sizes, known.extra_ns)

    def of_run(self, run: str, ranks: int) -> Calibration:
        """Of all processes of a run."""
        if (run, ranks) not in self._of_runs:
            wire = wires().get(ranks)
            known = factors(wire, self._collectives[run]) if wire is not None else {}
            speed = speed_of(self._host, self._costs[run], [])
            self._of_runs[run, ranks] = Calibration(speed or STEP, known)
        return self._of_runs[run, ranks]


def _case(rows: Sequence[Row], profile: Sequence[Row], calibrations: _Calibrations) -> StepCase:
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
