"""Ranks leave an exchange, or a message, one by one, on fabrics on which that was measured: a `simulate.Departures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from steptime._models.collectives.flows import Flows
from steptime._models.collectives.message import KINDS, Messages
from steptime._platforms.fabric import Fabric
from steptime._program.program import Collective
from steptime._sim.core.meetings import Meeting
from steptime._sim.core.timing import Nanoseconds

Floats = npt.NDArray[np.float64]

EXCHANGE = "all_to_all"
MESSAGE = ["recv", "send"]
"""What the two ranks of a message call."""

# Sizes of even exchanges that the fabric's model is asked about once, from bytes to gigabytes; lines between them.
_SIZES = np.concatenate([[0.0], np.geomspace(256.0, 1.1e11, 480)])


@dataclass(frozen=True, eq=False)
class ExchangeDepartures:
    """The law of one fabric."""

    fabric: Fabric
    buffered_bytes: float
    _even_ns: dict[int, Floats] = field(default_factory=dict)  # ranks -> of even exchanges of `_SIZES`
    _sent: dict[int, tuple[Meeting, Floats | None]] = field(default_factory=dict)  # by the meeting's identity
    _flows: dict[int, tuple[Floats, Flows]] = field(default_factory=dict)  # the same: of exchanges that took so long together

    @classmethod
    def of(cls, fabric: Fabric | None) -> ExchangeDepartures | None:
        """None where nobody measured ranks that come one by one."""
        if fabric is None or fabric.limits.buffered_bytes is None:
            return None
        return cls(fabric, fabric.limits.buffered_bytes.value)

    def durations_ns(
        self, meeting: Meeting, calls: Mapping[int, Collective], arrivals_ns: Nanoseconds, together_ns: Nanoseconds
    ) -> Nanoseconds | None:
        """As `simulate.Departures` has it."""
        if id(meeting) not in self._sent:
            self._sent[id(meeting)] = (meeting, _sent_at(meeting.members[0], calls))
        sent = self._sent[id(meeting)][1]
        if sent is None:
            return None
        together = together_ns.max(axis=0).astype(np.float64)
        known = self._flows.get(id(meeting))
        if known is None or not np.array_equal(known[0], together):  # a window that is repeated asks for the same again
            known = self._flows[id(meeting)] = together, self.flows(sent[:, :, None], together)
        return np.rint(known[1].departures_ns(arrivals_ns.astype(np.float64))).astype(np.int64)

    def flows(self, sent: Floats, together_ns: Floats) -> Flows:
        """Exchanges of [senders, receivers, exchanges] bytes, which take so long where all ranks reach them at once."""
        ranks = len(sent)
        if ranks not in self._even_ns:
            self._even_ns[ranks] = self.fabric.times(even_exchanges(_SIZES, ranks), range(ranks)).ns
        known = self._even_ns[ranks]
        return Flows.of(sent, self.buffered_bytes, lambda size: np.interp(size, _SIZES, known), together_ns)


def even_exchanges(sizes: Floats, ranks: int) -> Messages:
    """Of buffers of these bytes."""
    kind = np.full(len(sizes), KINDS.index(EXCHANGE), dtype=np.intp)
    return Messages(kind, np.full(len(sizes), ranks, dtype=np.intp), sizes, sizes, sizes)


def sent_bytes(calls: Sequence[Collective | None]) -> Floats:
    """Bytes from rank to rank, [sender, receiver]; of ranks that say nothing, what those that receive from it say."""
    ranks = len(calls)
    sent = np.full((ranks, ranks), np.nan)
    known = [(index, call) for index, call in enumerate(calls) if call is not None]
    for index, collective in known:
        sent[index] = _split(collective.in_splits, collective.bytes_in, ranks)
    for index, collective in known:
        received = _split(collective.out_splits, collective.bytes_out, ranks)
        sent[:, index] = np.where(np.isnan(sent[:, index]), received, sent[:, index])
    return np.where(np.isnan(sent), np.nanmean(sent) if np.isfinite(sent).any() else 0.0, sent)


def _split(splits: Sequence[int], total: int, ranks: int) -> Floats:
    shares = np.array(splits, dtype=np.float64) if len(splits) == ranks else np.ones(ranks)
    return shares * (total / max(float(shares.sum()), 1.0))


def _sent_at(members: tuple[int, ...], calls: Mapping[int, Collective]) -> Floats | None:
    """In the order of the calls; None where it is neither exchange nor message, or not all of its ranks are there."""
    if sorted(members) != sorted(calls):
        return None
    kinds = [call.kind for call in calls.values()]
    if sorted(kinds) == MESSAGE:
        sent = np.zeros((2, 2))
        sent[kinds.index("send"), kinds.index("recv")] = max(call.bytes_in for call in calls.values())
        return sent
    if any(kind != EXCHANGE for kind in kinds):
        return None
    order = [members.index(rank) for rank in calls]
    return sent_bytes([calls[member] for member in members])[np.ix_(order, order)]
