"""What was measured of the zoo's architectures: the step without a profiler, and device time by family of ops with one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptime._measurements.store import read
from steptime._ops.families import WorkFamily, kernel_family, op_family
from steptime_lab.measurements.sets import ZOO, ZOO_KERNELS
from steptime_lab.measurements.shipped import FOLDER

# An op of one of these claims all kernels inside it, as in a prediction's breakdown.
_LAST_ENCLOSING = WorkFamily.NORMALIZATION
_BY_KERNEL = {"Memset": WorkFamily.MEMSET, "Memcpy": WorkFamily.COPY}


@dataclass(frozen=True, slots=True)
class ZooKernels:
    """Kernels of a profiled step."""

    device_ms: float
    launches: int
    families: Mapping[str, float]  # family of ops -> ms


@dataclass(frozen=True, slots=True)
class ZooMeasured:
    """One architecture."""

    name: str
    group: str
    step_ms: float
    spread: float
    times_ms: tuple[float, ...]
    allocated_bytes: int  # without what another architecture had left in the process
    finite: bool
    capped: bool  # whether the power cap held the clock most of the time
    kernels: ZooKernels | None  # None: it was not profiled


def measured_zoo(folder: Path = FOLDER) -> dict[str, ZooMeasured]:
    """By name; the last row of each counts."""
    kernels = {row["architecture"]: _kernels(row) for row in read(folder, ZOO_KERNELS).to_pylist()}
    rows = read(folder, ZOO).to_pylist()
    return {row["architecture"]: _measured(row, kernels.get(row["architecture"])) for row in rows}


def _measured(row: Mapping[str, Any], kernels: ZooKernels | None) -> ZooMeasured:
    return ZooMeasured(
        name=row["architecture"],
        group=row["group"],
        step_ms=row["time_ns"] / 1e6,
        spread=row["spread"],
        times_ms=tuple(time_ns / 1e6 for time_ns in row["times_ns"]),
        allocated_bytes=row["allocated_bytes"] - (row["left_bytes"] or 0),
        finite=bool(row["finite"]),
        capped=(row["capped"] or 0.0) > 0.5,
        kernels=kernels,
    )


def _kernels(row: Mapping[str, Any]) -> ZooKernels:
    families: dict[str, float] = defaultdict(float)
    for op, around, kernel, time_ns in zip(row["op"], row["around"], row["kernel"], row["kernel_ns"], strict=True):
        families[family_of(op, around, kernel).label] += time_ns / 1e6
    return ZooKernels(sum(families.values()), row["launches"], dict(families))


def family_of(op: str, around: str, kernel: str) -> WorkFamily:
    """The family of a kernel by the ops around its launch, else by its name."""
    for prefix, family in _BY_KERNEL.items():
        if kernel.startswith(prefix):
            return family
    outer = op_family(around)
    if outer <= _LAST_ENCLOSING:
        return outer
    inner = op_family(op)
    return kernel_family(kernel) if inner == WorkFamily.OTHER else inner
