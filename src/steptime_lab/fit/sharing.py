"""What ranks on shares of one GPU do to each other: buffers of exchanges, and what lookups take of the memory.

From exchanges that ranks reach one by one, and lookups alone, beside copies and together (`benchmarks/h200/ranks_together.py`).
The constants belong into the files of the fabric and the device, with the source that is written beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from steptime._build.dlrm.model import Dlrm
from steptime._build.dlrm.workload import table_lookups
from steptime._files import write_whole
from steptime._models.lookups.contention import Contention, LookupsTogether, row_bytes
from steptime._models.lookups.question import BACKWARD, FORWARD
from steptime._platforms.fabric import Fabric
from steptime._shard.evaluator import messages
from steptime._sim.laws.departures import ExchangeDepartures
from steptime.errors import InputError

Floats = npt.NDArray[np.float64]

RANKS = 4
"""Ranks whose rows constants are fitted to; those of 2 and 8 check them."""

_BUFFERS = np.arange(2e5, 4.01e6, 1e5)
_FLOAT_BYTES = 4.0


@dataclass(frozen=True, eq=False)
class MeasuredExchanges:
    """Exchanges as [ranks, exchanges]; `sent` as [senders, receivers, exchanges]."""

    sent: Floats
    begun_ns: Floats
    ended_ns: Floats
    together_ns: Floats  # [exchanges] where all ranks reach them at once, by the fabric's model

    def errors(self, departures: ExchangeDepartures) -> Floats:
        """Of the end of every rank, from the last arrival on, over that of the last rank."""
        measured = self.ended_ns - self.begun_ns.max(axis=0)
        predicted = departures.flows(self.sent, self.together_ns).departures_ns(self.begun_ns)
        result: Floats = np.abs(predicted - measured) / measured.max(axis=0)
        return result


@dataclass(frozen=True, eq=False)
class OverlappingLookups:
    """Lookups forward and backward of ranks on one GPU, [cases, ranks]."""

    alone_ns: Sequence[Floats]
    copies_ns: Sequence[Floats]
    row_bytes: Sequence[Floats]
    begun_ns: Floats  # backward
    between_ns: Floats  # from the end of backward to forward
    took_ns: Sequence[Floats]  # together

    def predicted_ns(self, law: Contention) -> tuple[Floats, Floats]:
        """Forward and backward."""
        ways = zip((FORWARD, BACKWARD), self.alone_ns, self.row_bytes, strict=True)
        taken = [law.taken(way, alone, moved) for way, alone, moved in ways]
        slowed = [law.slowed(alone, copies) for alone, copies in zip(self.alone_ns, self.copies_ns, strict=True)]
        return LookupsTogether(*self.alone_ns, *taken, *slowed).durations_ns(self.begun_ns, self.between_ns)


def measured_exchanges(folder: Path, ranks: int, fabric: Fabric) -> MeasuredExchanges:
    """Both ways of every case."""
    cases = _document(folder, "exchanges", ranks)["cases"]
    marks = np.array([case["marks_ns"] for case in cases], dtype=np.float64)  # [cases, ranks, both ways begun and ended]
    columns = np.array([np.array(case["columns"]) * _FLOAT_BYTES * case["samples"] for case in cases]).T
    forward = np.repeat(columns[:, None], ranks, axis=1)
    together = fabric.times(messages(columns.T, ranks), range(ranks)).ns
    return MeasuredExchanges(
        np.concatenate([forward, forward.swapaxes(0, 1)], axis=2),
        np.concatenate([marks[:, :, 0].T, marks[:, :, 2].T], axis=1),
        np.concatenate([marks[:, :, 1].T, marks[:, :, 3].T], axis=1),
        np.concatenate([together, together]),
    )


def measured_lookups_together(folder: Path, ranks: int) -> OverlappingLookups:
    """Every time that all ranks of a task ran together, with what each takes alone and beside copies."""
    document = _document(folder, "lookups", ranks)
    rows: list[list[Floats]] = []
    for case in document["cases"]:
        model = Dlrm.from_dict(case["config"]).with_batch(case["batch"])
        known = [table_lookups(table, model.batch) for table in model.tables]
        moved = [
            np.bincount(case["plan"], row_bytes(known, way, model.optimizer), ranks).astype(np.float64)
            for way in (FORWARD, BACKWARD)
        ]
        alone, copies = (_one_by_one(case["readings"], kind, ranks) for kind in ("alone", "copies"))
        for reading in case["readings"]:
            if reading["kind"] == "together":
                marks = np.array(reading["marks_ns"], dtype=np.float64)
                took = [marks[:, 3] - marks[:, 2], marks[:, 1] - marks[:, 0]]
                rows.append([*alone, *copies, *moved, marks[:, 0], *took])
    columns = [np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)]
    between = np.full_like(columns[6], document["gap_ns"])
    return OverlappingLookups(columns[0:2], columns[2:4], columns[4:6], columns[6], between, columns[7:9])


def fit_buffered_bytes(measured: MeasuredExchanges, fabric: Fabric) -> float:
    """Of those tried, that with the least mean error."""
    means = [measured.errors(ExchangeDepartures(fabric, float(size))).mean() for size in _BUFFERS]
    return float(_BUFFERS[int(np.argmin(means))])


def fit_contention(measured: OverlappingLookups, start: Contention) -> Contention:
    """The constants with the least squared errors in time, to two digits."""

    def law(values: Floats) -> Contention:
        backward, rows = np.clip(values, 0.0, 1.0).tolist()
        return replace(start, backward=backward, rows=rows)

    def squared_ms(values: Floats) -> float:
        result = zip(measured.predicted_ns(law(values)), measured.took_ns, strict=True)
        return sum(float(np.square((predicted - took) / 1e6).sum()) for predicted, took in result)

    result = minimize(squared_ms, np.array([0.3, 0.3]), method="Nelder-Mead", options={"xatol": 1e-3, "fatol": 1e-6})
    return law(np.round(result.x, 2))


def write_sharing(file: Path, buffered_bytes: float, law: Contention, source: str) -> None:
    """As the files of a fabric and of a device have it."""
    quantity = '{{ value = {:g}, source = "{}" }}'.format
    lines = ["# Of the fabric:", f"buffered_bytes = {quantity(buffered_bytes, source)}", "", "# Of the device:", "[contention]"]
    lines += [f"{name} = {quantity(getattr(law, name), source)}" for name in ("backward", "rows")]
    write_whole(file, "\n".join(lines) + "\n")


def _document(folder: Path, kind: str, ranks: int) -> Mapping[str, Any]:
    file = folder / f"ranks_together_{kind}_{ranks}.json"
    if not file.is_file():
        raise InputError(f"{file}: not there; benchmarks/h200/ranks_together.py measures it")
    result: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def _one_by_one(readings: Sequence[Mapping[str, Any]], kind: str, ranks: int) -> tuple[Floats, Floats]:
    """Forward and backward of every rank by itself."""
    forward, backward = np.zeros(ranks), np.zeros(ranks)
    for reading in readings:
        if reading["kind"] == kind:
            rank = int(reading["values"][0])
            marks = reading["marks_ns"][rank]
            backward[rank], forward[rank] = marks[1] - marks[0], marks[3] - marks[2]
    return forward, backward
