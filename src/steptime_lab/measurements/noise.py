"""The noise floor of measured sets: how far repeats of one question lie apart. Nobody can predict better than that.

Three distances, each relative: *within* a process (the spread of a row's repeats), *between processes* of one machine and
*between machines* (how far the medians of one key lie apart).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from steptime._measurements.recipe import spread_of
from steptime._measurements.sets import MeasuredSet


@dataclass(frozen=True, slots=True)
class Floor:
    """How far repeats lie apart: of so many keys, the median and the 90th percentile of their relative distance."""

    keys: int
    median: float
    p90: float

    @classmethod
    def of(cls, distances: Sequence[float]) -> Floor | None:
        """None where nothing was repeated: an unknown floor is not a floor of zero."""
        if not distances:
            return None
        middle, high = np.quantile(np.asarray(distances, dtype=np.float64), (0.5, 0.9))
        return cls(len(distances), float(middle), float(high))


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise floor of one set, or of a part of one."""

    name: str
    rows: int
    keys: int
    within: Floor | None
    between_processes: Floor | None
    between_machines: Floor | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def noise_of(measured: MeasuredSet, table: pa.Table, part: str = "") -> Noise:
    """The noise floor of rows of a set, or of a part of them that has a name."""
    medians: dict[str, dict[str, dict[tuple[str, str], list[float]]]] = {}
    columns = (table[column].to_pylist() for column in ("machine", "run", "process", "time_ns"))
    for key, machine, run, process, time_ns in zip(_questions(table, measured), *columns, strict=True):
        medians.setdefault(key, {}).setdefault(machine, {}).setdefault((run, process), []).append(time_ns)
    by_machine = [
        [[float(np.median(times)) for times in processes.values()] for processes in machines.values()]
        for machines in medians.values()
    ]
    rows = [times for machines in medians.values() for processes in machines.values() for times in processes.values()]
    return Noise(
        name=f"{measured.name}: {part}" if part else measured.name,
        rows=table.num_rows,
        keys=len(medians),
        within=Floor.of(
            [spread_of(times) for times in rows if len(times) > 1] if measured.repeats else _spreads_of_repeats(table)
        ),
        between_processes=Floor.of(_distances(times for machines in by_machine for times in machines)),
        between_machines=Floor.of(_distances([float(np.median(times)) for times in machines] for machines in by_machine)),
    )


def _questions(table: pa.Table, measured: MeasuredSet) -> list[str]:
    """What each row asked: its key, or where keys tell repeats apart, what is left of the row's columns without those."""
    if not measured.repeats:
        return list(table["key"].to_pylist())
    columns = [column for column in measured.case if column not in measured.repeats]
    return [json.dumps(values) for values in zip(*(table[column].to_pylist() for column in columns), strict=True)]


def noise_by(measured: MeasuredSet, table: pa.Table, column: str) -> list[Noise]:
    """The noise floor of each value of a column, such as the family of a kernel."""
    values = np.asarray(table[column].to_pylist(), dtype=object)
    return [noise_of(measured, table.filter(pa.array(values == value)), str(value)) for value in sorted(set(values))]


def _spreads_of_repeats(table: pa.Table) -> list[float]:
    """The spread of every row that has repeats: a single time has none to show."""
    pairs = zip(table["times_ns"].to_pylist(), table["spread"].to_pylist(), strict=True)
    return [spread for times, spread in pairs if len(times) > 1]


def _distances(groups: Iterable[Sequence[float]]) -> list[float]:
    """(largest - smallest) / median of every group of at least two."""
    return [float((max(times) - min(times)) / np.median(times)) for times in groups if len(times) > 1]
