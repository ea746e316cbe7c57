"""How long the exchanges of looked-up rows take under many plans: every rank sends its tables' columns to all, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime._build.dlrm.model import Dlrm
from steptime._models.collectives.message import KINDS, Messages
from steptime._platforms.calibration import UNCALIBRATED, Calibration
from steptime._platforms.fabric import Fabric
from steptime._sim.composed import Ends
from steptime._sim.laws.departures import EXCHANGE, ExchangeDepartures

Floats = npt.NDArray[np.float64]

_FLOAT_BYTES = 4


@dataclass(frozen=True, eq=False)
class Exchanges:
    """The exchanges of one model among the first ranks of a fabric."""

    fabric: Fabric
    ranks: int
    column_bytes: Floats  # [tables] that a rank sends to one other for a table of its own
    departures: ExchangeDepartures | None  # where ranks leave one by one
    slower: float  # by which all exchanges take longer, as somebody calibrated

    @classmethod
    def of(
        cls, model: Dlrm, fabric: Fabric, ranks: int, calibration: Calibration = UNCALIBRATED, *, one_by_one: bool = True
    ) -> Exchanges:
        """Rows are exchanged as 32-bit floats, every rank's part of the batch."""
        sent = np.array([float(_FLOAT_BYTES * (model.batch // ranks) * table.dim) for table in model.tables])
        return cls(
            fabric, ranks, sent, ExchangeDepartures.of(fabric) if one_by_one else None, calibration.wire.get(EXCHANGE, 1.0)
        )

    def times(self, sent: Floats) -> Floats:
        """Of one exchange reached together, [plans], ns; `sent` are bytes from each rank to any other, [plans, ranks]."""
        return self.slower * self.fabric.times(messages(sent, self.ranks), range(self.ranks)).ns

    def ends(self, sent: Floats) -> Ends:
        """Of plans that send so much from each rank to any other, [plans, ranks]: forward first, then back."""
        together = self.times(sent)
        departures = self.departures
        if departures is None:
            at_once = np.repeat(together[:, None], self.ranks, axis=1)
            return lambda _number, _arrivals_ns: at_once
        forward = np.repeat(sent.T[:, None], self.ranks, axis=1)
        ways = [departures.flows(each, together) for each in (forward, forward.swapaxes(0, 1))]
        return lambda number, arrivals_ns: ways[number].departures_ns(arrivals_ns.T).T


def messages(sent: Floats, ranks: int) -> Messages:
    """Exchanges as columns, as `Messages.of` makes them one by one from splits."""
    total = sent.sum(axis=1)
    # Bytes that a rank sends and receives, its own part left out, over what it would of an even exchange of one byte.
    busiest = ((ranks - 2) * sent + total[:, None]).max(axis=1) / 2 * (ranks / max(ranks - 1, 1))
    pairs = np.sqrt((sent**2).mean(axis=1)) * ranks
    even = np.ptp(sent, axis=1) == 0
    load = np.where(even, total, busiest)
    kind = np.full(len(sent), KINDS.index(EXCHANGE), dtype=np.intp)
    counts = np.full(len(sent), ranks, dtype=np.intp)
    return Messages(kind, counts, ranks * sent.max(axis=1), load, np.where(even, total, pairs))
