"""The shipped training steps as they were measured: every visit of a case, the calibration of its machine, and its profile.

A case is a timed step; processes that timed the same one are its visits. A visit's calibration is what `steptime calibrate`
would have given them: from the rows that its own processes measured before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._measurements.store import read
from steptime._platforms.calibration import Calibration
from steptime._platforms.machine_costs import MachineCosts
from steptime._platforms.platform import Platform
from steptime._sim.explain import bound
from steptime_lab.fit.host import CALIBRATION
from steptime_lab.measurements.sets import measured_set
from steptime_lab.measurements.shipped import FILE_NAME, FOLDER, CasePrograms, read_programs, shipped

# Ranks of a shipped case share one GPU: one of so many parts for each.
PLATFORMS = {
    1: "1xh200",
    2: "2xh200-half-loopback",
    4: "4xh200-quarter-loopback",
    8: "8xh200-eighth-loopback",
}


class RunCalibrations:
    """Of the runs in a folder, the shipped ones if none is given, each on the platform that its ranks were on."""

    def __init__(self, folder: Path = FOLDER) -> None:
        host, collectives = (read(folder, measured_set(name)).to_pylist() for name in ("host", "collectives"))
        self._host = _by_run(row for row in host if row["source"] == CALIBRATION)
        self._collectives = _by_run(collectives)
        self._known: dict[tuple[str, str, int], Calibration] = {}

    def of_step(self, row: Row) -> Calibration:
        """What the processes measured that timed a row of `steps`, before they did."""
        first, ranks = int(row["process"].lstrip("p")), int(row["ranks"])
        return self._of(row["run"], tuple(f"p{first + rank}" for rank in range(ranks)), ranks)

    def of_run(self, run: str, ranks: int) -> Calibration:
        """What all processes of a run measured."""
        return self._of(run, (), ranks)

    def _of(self, run: str, processes: tuple[str, ...], ranks: int) -> Calibration:
        key = (run, ",".join(processes), ranks)
        if key not in self._known:
            host, collectives = (_before(rows[run], processes) for rows in (self._host, self._collectives))
            self._known[key] = Calibration.of(MachineCosts.of_rows(host, collectives), platform_of(ranks))
        return self._known[key]


@cache
def platform_of(ranks: int) -> Platform:
    """The shipped platform that cases of so many ranks were timed on."""
    return Platform.load(PLATFORMS[ranks])


def _before(rows: Sequence[Row], processes: tuple[str, ...]) -> list[Row]:
    """Of these processes, or of all, the rows of the first calibration: some measured another one after their steps."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        if not processes or row["process"] in processes:
            first.setdefault((row["process"], row["key"]), row)
    return list(first.values())


def _by_run(rows: Iterable[Row]) -> dict[str, list[Row]]:
    runs: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        runs[row["run"]].append(row)
    return runs


@dataclass(frozen=True)
class Profiled:
    """The device's part of a step; nanoseconds."""

    compute_ns: float  # of the rank that computes longest
    exposed_ns: float  # of it, what no collective covers
    wire_ns: float  # collectives, each by the rank that waited least, in the quietest of the profiled steps


def profiled(ranks: Sequence[Row]) -> Profiled:
    """From the rows of `step_kernels` of all ranks of a case."""
    ordered = sorted(ranks, key=lambda row: int(row["rank"]))
    times = [_times(row["kernel_ns"]) for row in ordered]
    wires = [np.array(["nccl" in name.lower() for name in row["kernel"]], dtype=bool) for row in ordered]
    computed = [_computed(row, np.median(took, axis=1), wire) for row, took, wire in zip(ordered, times, wires, strict=True)]
    collectives = [took[wire] for took, wire in zip(times, wires, strict=True)]
    return Profiled(
        compute_ns=max(compute for compute, _ in computed),
        exposed_ns=max(exposed for _, exposed in computed),
        wire_ns=_wire(collectives),
    )


def _times(kernel_ns: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """[kernels, steps]: as many steps as every kernel has."""
    steps = min((len(each) for each in kernel_ns), default=0)
    return np.array([each[:steps] for each in kernel_ns], dtype=np.float64).reshape(len(kernel_ns), max(steps, 1))


def _wire(collectives: Sequence[npt.NDArray[np.float64]]) -> float:
    """Ranks wait for each other inside a collective: the last to come shows how long it really takes."""
    steps = min(each.shape[1] for each in collectives)
    if len({len(each) for each in collectives}) > 1:
        return float(min(each.sum(axis=0).min() for each in collectives))
    return float(np.min([each[:, :steps] for each in collectives], axis=0).sum(axis=0).min())


def _computed(row: Row, took: npt.NDArray[np.float64], wire: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Compute of one rank, and what of it lies outside its collectives in the last profiled step."""
    start = np.asarray(row["start_ns"], dtype=np.float64)
    covered = np.zeros(len(start))
    for begin, length in zip(start[wire], took[wire], strict=True):
        covered += np.maximum(0.0, np.minimum(start + took, begin + length) - np.maximum(start, begin))
    return float(took[~wire].sum()), float(np.maximum(0.0, took - covered)[~wire].sum())


Row = Mapping[str, Any]

GPU_BOUND, HOST_BOUND, WIRE_BOUND, MIXED = "GPU-bound", "host-bound", "wire-bound", "mixed"
# On more ranks, steps in which the device idles are as often those of ranks that wait for each other.
_TELLING_RANKS, _TELLING_BUSY = 2, 0.75
DLRM = "dlrm"
_LOT = 16  # cases, as many as lie side by side in the file
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
        if self.device.compute_ns >= bound.GPU_BOUND * self.measured_ns:
            return GPU_BOUND
        if self.exposed_ns > bound.WIRE_BOUND * self.measured_ns:
            return WIRE_BOUND
        return HOST_BOUND if self.device.compute_ns < bound.HOST_BOUND * self.measured_ns else MIXED

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
    steps, profiles = rows_by_name("steps", _STEP_COLUMNS, read), rows_by_name("step_kernels", _PROFILE_COLUMNS, read)
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


def rows_by_name(name: str, columns: Sequence[str], wanted: Iterable[str] | None = None) -> dict[str, list[Row]]:
    """The rows of a shipped set by case: all, or those of some names."""
    table = shipped(name).select(columns)
    if wanted is not None:
        names = set(wanted)
        table = table.filter([item in names for item in table["name"].to_pylist()])
    result: dict[str, list[Row]] = defaultdict(list)
    for row in table.to_pylist():
        result[row["name"]].append(row)
    return result


def programs_of(names: Iterable[str]) -> Iterator[CasePrograms]:
    """The programs of shipped cases, read in lots, of which one is in memory."""
    ordered = sorted(names)
    for first in range(0, len(ordered), _LOT):
        yield from read_programs(FOLDER / FILE_NAME, ordered[first : first + _LOT])


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
