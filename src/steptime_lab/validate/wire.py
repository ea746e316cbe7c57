"""How long the collectives of a program take one after another, by the model of a fabric.

How fast a box's wire is now comes from the calibration of the processes that timed the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from steptime._models.collectives.message import Message, Messages
from steptime._models.collectives.tier import TierModel
from steptime._platforms.fabric import Fabric
from steptime._program.program import Collective

Row = Mapping[str, Any]
Column = npt.NDArray[np.float64]

FABRIC = "loopback"
# Smaller messages are latency, which calibrations of a few calls repeat badly.
CALIBRATED_BYTES = 64 << 10
# What is timed beside the repeats of a step (measure/steps/state.py).
PROBED, PROBE_BYTES = "all_reduce", 1 << 20


@dataclass(frozen=True)
class Wire:
    """Collectives of so many ranks."""

    ranks: int
    model: TierModel

    def knows(self, kind: str) -> bool:
        """Whether such a collective was measured."""
        return (kind, self.ranks) in self.model.curves

    def alone_ns(self, kind: str, size_bytes: float) -> float:
        """One collective by itself, all ranks alike."""
        return float(self.model.times(Messages.even(kind, [self.ranks], [size_bytes])).ns[0])

    def collective_ns(self, collective: Collective) -> float:
        """One collective of a program; one that was never measured takes as long as an all_reduce."""
        if collective.kind == "all_to_all" and self.knows("all_to_all"):
            return self._exchange_ns(_matrix(collective, self.ranks))
        kind = collective.kind if self.knows(collective.kind) else "all_reduce"
        return self.alone_ns(kind, max(collective.bytes_in, collective.bytes_out))

    def _exchange_ns(self, sent: Column) -> float:
        if not (sent * (1.0 - np.eye(self.ranks))).any():
            return 0.0
        whole = tuple(tuple(round(size) for size in row) for row in sent.tolist())
        message = Message("all_to_all", self.ranks, max(map(sum, whole)), whole)
        return float(self.model.times(Messages.of([message])).ns[0])


@cache
def wires() -> Mapping[int, Wire]:
    """By number of ranks, those of the shipped fabric that steps were timed on."""
    fabric = Fabric.load(FABRIC)
    (model,) = (tier for tier in fabric.tiers.values() if isinstance(tier, TierModel))
    return {ranks: Wire(ranks, model) for ranks in model.measured_ranks("all_reduce")}


def factors(wire: Wire, rows: Iterable[Row], probes_ns: Sequence[float] = ()) -> dict[str, float]:
    """Per collective, how many times as long it took in a calibration.

    `probes_ns`: times of an all_reduce of 1 MiB beside the repeats of a step, where they were taken: how fast the wire was just
    then, which counts as much as the calibration before and after does.
    """
    logs: dict[str, list[float]] = defaultdict(list)
    for kind, _, factor in _calibrations(wire, rows):
        logs[kind].append(float(np.log(factor)))
    calibrated = {kind: float(np.mean(found)) for kind, found in logs.items()}
    if len(probes_ns) and wire.knows(PROBED):
        now = float(np.log(np.median(probes_ns) / wire.alone_ns(PROBED, PROBE_BYTES)))
        since = now - calibrated.get(PROBED, now)
        calibrated = {kind: log + 0.5 * since for kind, log in calibrated.items()}
    return {kind: float(np.exp(log)) for kind, log in calibrated.items()}


@dataclass(frozen=True)
class Now:
    """How fast the wire was when a step was timed: how many times as long per kind and size, and what each call took more."""

    sizes: Mapping[str, tuple[tuple[float, float], ...]]  # kind -> ((bytes, factor), ...), ascending
    extra_ns: float = 0.0

    @property
    def factors(self) -> dict[str, float]:
        """Per kind over all sizes."""
        return {kind: float(np.exp(np.mean([np.log(factor) for _, factor in some]))) for kind, some in self.sizes.items()}


def now(wire: Wire, rows: Iterable[Row], probes_ns: Sequence[float] = ()) -> Now:
    """From the calibration of the processes that timed a step, and an all_reduce of 1 MiB beside its repeats.

    What probes take more than the calibration's own is by the call, not by the byte: half of it is taken, for it holds while
    the probe runs and not always in between.
    """
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind, nbytes, factor in _calibrations(wire, rows):
        times[kind][nbytes].append(factor)
    sizes = {
        kind: tuple((float(nbytes), float(np.mean(found))) for nbytes, found in sorted(some.items()))
        for kind, some in times.items()
    }
    calibrated = Now(sizes)
    if not len(probes_ns) or not wire.knows(PROBED):
        return calibrated
    own = dict(sizes.get(PROBED, ())).get(float(PROBE_BYTES), calibrated.factors.get(PROBED, 1.0))
    extra_ns = float(np.median(probes_ns)) - own * wire.alone_ns(PROBED, PROBE_BYTES)
    return Now(sizes, 0.5 * extra_ns)


def wire_ns(wire: Wire, collectives: Iterable[Collective], calibrated: Mapping[str, float]) -> float:
    """All collectives one after another, each at the speed that a calibration showed for its kind."""
    return sum(wire.collective_ns(each) * calibrated.get(each.kind, 1.0) for each in collectives)


def _calibrations(wire: Wire, rows: Iterable[Row]) -> Iterator[tuple[str, int, float]]:
    """Of every row that calibrates this wire: kind, bytes, how many times as long it took."""
    for row in rows:
        kind, nbytes = row["collective"], row["bytes"]
        if _plain(row) and row["ranks"] == wire.ranks and nbytes >= CALIBRATED_BYTES and wire.knows(kind):
            yield kind, nbytes, float(np.median(row["times_ns"])) / wire.alone_ns(kind, nbytes)


def _plain(row: Row) -> bool:
    """Calls behind one another on idle hosts, all ranks at once, equal parts."""
    usual = row["beside"] == "none" and row["host_threads"] == "idle" and row["arrival"] == "together"
    return usual and row["mode"] == "stream" and row["fabric"] == FABRIC and not row["splits"]


def _matrix(collective: Collective, ranks: int) -> Column:
    """Bytes from rank to rank, [sender, receiver], as one rank sees them.

    Where it sends equal parts to all, so does every other; where it receives equal parts, likewise.
    """
    given = _parts(collective.in_splits, collective.bytes_in, ranks)
    taken = _parts(collective.out_splits, collective.bytes_out, ranks)
    if np.ptp(given) <= np.ptp(taken):
        return np.repeat(taken[:, None], ranks, axis=1)
    return np.repeat(given[None, :], ranks, axis=0)


def _parts(splits: Sequence[int], total: int, ranks: int) -> Column:
    parts = np.array(splits, dtype=np.float64) if len(splits) == ranks else np.ones(ranks)
    return parts * (total / max(float(parts.sum()), 1.0))
