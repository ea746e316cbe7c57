"""What was measured of compiled steps: both forms of a case, from the rows of `measure compiled`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steptime._measurements.store import read
from steptime_lab.measurements.sets import COMPILED
from steptime_lab.measurements.shipped import FOLDER
from steptime_lab.validate.compiled.answers import FORMS
from steptime_lab.validate.compiled.kinds import kinds_of


@dataclass(frozen=True, slots=True)
class MeasuredForm:
    """One form of a case."""

    step_ms: float
    spread: float
    times_ms: tuple[float, ...]
    allocated_bytes: int  # without what the other form held
    device_ms: float | None  # sum of its kernels; None: not profiled
    kinds: Mapping[str, int]
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """A case, eager and compiled in one process."""

    name: str
    architecture: str
    mode: str
    precision: str
    what: str
    ranks: int
    torch: str
    eager: MeasuredForm
    compiled: MeasuredForm

    @property
    def speedup(self) -> float:
        """How many times as fast the compiled step was."""
        return self.eager.step_ms / self.compiled.step_ms


def measured_pairs(folder: Path = FOLDER) -> dict[str, MeasuredPair]:
    """By name; the last rows of each count."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in read(folder, COMPILED).to_pylist():
        rows[row["name"]][row["form"]] = row
    return {name: _pair(name, own) for name, own in rows.items() if set(own) == set(FORMS)}


def _pair(name: str, rows: Mapping[str, Mapping[str, Any]]) -> MeasuredPair:
    row = rows["compiled"]
    return MeasuredPair(
        name=name,
        architecture=row["architecture"],
        mode=row["mode"],
        precision=row["precision"],
        what=row["what"],
        ranks=row["ranks"],
        torch=row["torch"],
        eager=_form(rows["eager"]),
        compiled=_form(row),
    )


def _form(row: Mapping[str, Any]) -> MeasuredForm:
    kernels, ops = row["kernel"] or (), row["op"] or ()
    return MeasuredForm(
        step_ms=row["time_ns"] / 1e6,
        spread=row["spread"],
        times_ms=tuple(time_ns / 1e6 for time_ns in row["times_ns"]),
        allocated_bytes=row["allocated_bytes"] - row["left_bytes"],
        device_ms=sum(row["kernel_ns"]) / 1e6 if row["kernel_ns"] else None,
        kinds=dict(kinds_of(kernels, ops)),
        kernels=tuple(kernels),
    )
