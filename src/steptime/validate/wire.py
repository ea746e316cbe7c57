"""How long the collectives of a program take one after another, from what each takes alone as measured.

Between measured sizes the logarithm of the time is interpolated over that of the bytes, from means over half octaves: single
sizes repeat to 5 %. How fast a box's wire is now comes from the calibration of the processes that timed the step. This stands
in for models of collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime.graph.program import Collective

Row = Mapping[str, Any]
Column = npt.NDArray[np.float64]

FABRIC = "loopback"
# Smaller messages are latency, which calibrations of a few calls repeat badly.
CALIBRATED_BYTES = 64 << 10
# An exchange with uneven parts takes as long as an even one whose ranks move as much as its busiest rank, less where that
# rank's peers are idle: to this power of their load over its (seen in the measured exchanges).
IDLE_POWER = 0.25


@dataclass(frozen=True)
class Wire:
    """Per collective the natural logarithms of bytes and of nanoseconds, for one number of ranks."""

    ranks: int
    curves: Mapping[str, tuple[Column, Column]]

    def alone_ns(self, kind: str, size_bytes: float) -> float:
        """One collective by itself; beyond the largest measured size in proportion."""
        sizes, times = self.curves[kind]
        size = float(np.log(max(size_bytes, 1.0)))
        return float(np.exp(np.interp(size, sizes, times) + max(0.0, size - sizes[-1])))

    def collective_ns(self, collective: Collective) -> float:
        """One collective of a program; one that was never measured takes as long as an all_reduce."""
        if collective.kind == "all_to_all" and "all_to_all" in self.curves:
            load, pairs = _exchanged(collective, self.ranks)
            return self.alone_ns("all_to_all", load) * (pairs / load) ** IDLE_POWER if load else 0.0
        kind = collective.kind if collective.kind in self.curves else "all_reduce"
        return self.alone_ns(kind, max(collective.bytes_in, collective.bytes_out))


def wires(rows: Iterable[Row]) -> dict[int, Wire]:
    """By number of ranks, from rows of the measured set `collectives`: sweeps of the default fabric, nothing beside them."""
    times: dict[tuple[int, str], dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "measure collectives" in row["command"] and _plain(row):
            place = np.log(row["bytes"]), np.log(np.median(row["times_ns"]))
            times[row["ranks"], row["collective"]][round(2 * np.log2(row["bytes"]))].append(place)
    curves: dict[int, dict[str, tuple[Column, Column]]] = defaultdict(dict)
    for (ranks, kind), bins in times.items():
        means = np.array([np.mean(bins[each], axis=0) for each in sorted(bins)])
        # Noise may make a larger message faster; a curve must not.
        curves[ranks][kind] = (means[:, 0], np.maximum.accumulate(means[:, 1]))
    return {ranks: Wire(ranks, found) for ranks, found in curves.items() if "all_reduce" in found}


def factors(wire: Wire, rows: Iterable[Row]) -> dict[str, float]:
    """Per collective, how many times as long it took in a calibration."""
    logs: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if _plain(row) and row["ranks"] == wire.ranks and row["bytes"] >= CALIBRATED_BYTES and row["collective"] in wire.curves:
            logs[row["collective"]].append(
                float(np.log(np.median(row["times_ns"]) / wire.alone_ns(row["collective"], row["bytes"])))
            )
    return {kind: float(np.exp(np.mean(found))) for kind, found in logs.items()}


def wire_ns(wire: Wire, collectives: Iterable[Collective], calibrated: Mapping[str, float]) -> float:
    """All collectives one after another, each at the speed that a calibration showed for its kind."""
    return sum(wire.collective_ns(each) * calibrated.get(each.kind, 1.0) for each in collectives)


def _plain(row: Row) -> bool:
    """Calls behind one another on idle hosts, all ranks at once, equal parts."""
    usual = row["beside"] == "none" and row["host_threads"] == "idle" and row["arrival"] == "together"
    return usual and row["mode"] == "stream" and row["fabric"] == FABRIC and not row["splits"]


def _exchanged(collective: Collective, ranks: int) -> tuple[float, float]:
    """As the buffer of an even exchange: what the busiest rank moves, and the root mean square of what pairs do.

    Seen from one rank: where it sends equal parts to all, so does every other; where it receives equal parts, likewise.
    """
    sent = _matrix(collective, ranks) * (1.0 - np.eye(ranks))
    load = float((sent.sum(axis=1) + sent.sum(axis=0)).max()) / 2 * ranks / (ranks - 1)
    return load, float(np.sqrt((sent**2).sum() / (ranks * (ranks - 1)))) * ranks


def _matrix(collective: Collective, ranks: int) -> Column:
    """Bytes from rank to rank, [sender, receiver]."""
    given = _parts(collective.in_splits, collective.bytes_in, ranks)
    taken = _parts(collective.out_splits, collective.bytes_out, ranks)
    if np.ptp(given) <= np.ptp(taken):
        return np.repeat(taken[:, None], ranks, axis=1)
    return np.repeat(given[None, :], ranks, axis=0)


def _parts(splits: Sequence[int], total: int, ranks: int) -> Column:
    parts = np.array(splits, dtype=np.float64) if len(splits) == ranks else np.ones(ranks)
    return parts * (total / max(float(parts.sum()), 1.0))
