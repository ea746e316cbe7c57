"""How long the exchanges of looked-up rows take under many plans: every rank sends its tables' columns to all, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime.build.dlrm import Dlrm
from steptime.models.collectives.message import KINDS, Messages
from steptime.platforms.fabric import Fabric
from steptime.sharding.evaluation_laws import buffered_fraction

Floats = npt.NDArray[np.float64]

_FLOAT_BYTES = 4
_ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, eq=False)
class Exchanges:
    """The exchanges of one model among the first ranks of a fabric."""

    fabric: Fabric
    ranks: int
    column_bytes: Floats  # [tables] that a rank sends to one other for a table of its own
    buffered: float  # what an exchange takes less where all ranks but one have been there for long

    @classmethod
    def of(cls, model: Dlrm, fabric: Fabric, ranks: int) -> Exchanges:
        """Rows are exchanged as 32-bit floats, every rank's part of the batch."""
        sent = [float(_FLOAT_BYTES * (model.batch // ranks) * table.dim) for table in model.tables]
        return cls(fabric, ranks, np.array(sent), buffered_fraction(fabric.limits.name, ranks))

    def times(self, sent: Floats) -> Floats:
        """Of one exchange, [plans], ns, as of the one back; `sent` are bytes from each rank to any other, [plans, ranks]."""
        return self.fabric.times(messages(sent, self.ranks), range(self.ranks)).ns


def messages(sent: Floats, ranks: int) -> Messages:
    """Exchanges as columns, as `Messages.of` makes them one by one from splits."""
    total = sent.sum(axis=1)
    # Bytes that a rank sends and receives, its own part left out, over what it would of an even exchange of one byte.
    busiest = ((ranks - 2) * sent + total[:, None]).max(axis=1) / 2 * (ranks / max(ranks - 1, 1))
    pairs = np.sqrt((sent**2).mean(axis=1)) * ranks
    even = np.ptp(sent, axis=1) == 0
    load = np.where(even, total, busiest)
    kind = np.full(len(sent), KINDS.index(_ALL_TO_ALL), dtype=np.intp)
    counts = np.full(len(sent), ranks, dtype=np.intp)
    return Messages(kind, counts, ranks * sent.max(axis=1), load, np.where(even, total, pairs))
