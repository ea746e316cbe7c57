"""Groups over several nodes, put together from the model of what joins a node's ranks and that of the network.

The network's model is one of groups with a rank on each node. What stays in a node goes over the inner tier, what leaves goes
over the node's cards; ranks that share a card share its bandwidth, and so do groups at once (`GroupPlacement.sharing`; of links
within a node `sharing_inside`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from steptime._hardware.fabric import GroupPlacement
from steptime._hardware.nccl import read_nccl
from steptime._models.collectives.curve import moved_share
from steptime._models.collectives.message import KINDS, Floats, Messages
from steptime._models.collectives.paper import AnalyticTier
from steptime._models.collectives.steps import TURNS, passed_ns, ring_steps
from steptime._models.collectives.tier import CollectiveTimes, TierModel

# ln of how far a group over two nodes, put together from its tiers, may lie off beyond what the tiers say of themselves: the
# bar that all_to_all of 8 and 16 ranks is held to on published two-node tables. On ten nodes of H100, 40 ranks put together
# from what 10 take lie within .23, so that each doubling of nodes adds a third of it.
_SPANNING, _DOUBLING = 0.15, 0.05
# A kind that was not measured between nodes is answered by one that sends as many bytes through a card: ln of how far off. Of
# published two-node tables, send_recv tells all_to_all to .10 to .13; .4 is the most that `tier` allows another kind.
_STAND_IN = 0.4
_STAND_INS: Mapping[str, tuple[str, ...]] = {
    "all_reduce": ("all_gather", "reduce_scatter", "send_recv", "all_to_all"),
    "all_to_all": ("send_recv", "all_gather", "reduce_scatter", "all_reduce"),
    "all_gather": ("reduce_scatter", "all_reduce", "send_recv", "all_to_all"),
    "reduce_scatter": ("all_gather", "all_reduce", "send_recv", "all_to_all"),
    "broadcast": ("reduce", "all_gather", "send_recv", "all_reduce", "all_to_all"),
    "reduce": ("broadcast", "reduce_scatter", "send_recv", "all_reduce", "all_to_all"),
    "send_recv": ("all_to_all", "all_gather", "all_reduce", "reduce_scatter"),
    "barrier": ("all_reduce", "send_recv", "all_gather", "all_to_all"),
}

_BOTH_WAYS = ("all_gather", "reduce_scatter")

Tier = TierModel | AnalyticTier
"""What answers for the links of one tier."""


def _merged(how: Callable[[Floats, Floats], Floats], *parts: CollectiveTimes) -> CollectiveTimes:
    result = parts[0]
    for part in parts[1:]:
        low_ns, high_ns = how(result.low_ns, part.low_ns), how(result.high_ns, part.high_ns)
        result = CollectiveTimes(how(result.ns, part.ns), low_ns, high_ns, result.inside & part.inside)
    return result


@dataclass(frozen=True)
class Spanning:
    """A group's place, and what joins it within a node and between nodes."""

    placed: GroupPlacement
    inner: Tier | None  # None where no node has two of its ranks
    network: Tier

    def times(self, messages: Messages) -> CollectiveTimes:
        """How long collectives of this group take by themselves; all messages have its rank count."""
        kinds = ((KINDS[index], np.flatnonzero(messages.kind == index)) for index in np.unique(messages.kind))
        parts = ((rows, self._of_kind(kind, messages.take(rows))) for kind, rows in kinds)
        result = CollectiveTimes.joined(len(messages), parts)
        # On paper a network's factor is of groups over several nodes as they are.
        together = 0.0 if isinstance(self.network, AnalyticTier) else _SPANNING
        growth = together + _DOUBLING * max(0.0, float(np.log2(self.placed.nodes)) - 1.0)
        return result.widened(growth, result.inside & self.placed.even)

    def _of_kind(self, kind: str, messages: Messages) -> CollectiveTimes:
        if kind == "all_to_all":
            return self._all_to_all(messages)
        if kind == "all_reduce":
            return _merged(np.minimum, self._hierarchical(kind, messages), self._ring(kind, messages))
        if kind in _BOTH_WAYS:
            return self._ring(kind, messages)
        if kind == "barrier":
            return _merged(np.add, self._inside(kind, messages), self._across(kind, messages))
        if kind == "send_recv":
            return self._pairs(messages)
        return self._passed_on(kind, messages, 1.0, 1 / self.placed.cards)

    def _all_to_all(self, messages: Messages) -> CollectiveTimes:
        """What stays in the node moves while the rest leaves it."""
        placed = self.placed
        leaving = (placed.ranks - placed.per_node) / placed.ranks * placed.per_node / placed.cards
        of_all = (placed.nodes - 1) / placed.nodes  # of a buffer, in the network's own exchanges
        across = self._across("all_to_all", messages, leaving / of_all)
        if isinstance(self.network, AnalyticTier):
            # On paper an exchange has a peer on each other node; one that was timed had those of its layout.
            peers = placed.ranks - placed.per_node - (placed.nodes - 1)
            across = across.plus(np.full(len(messages), read_nccl().network.peer_ns * peers))
        return _merged(np.maximum, self._inside("all_to_all", messages, placed.per_node / placed.ranks), across)

    def _pairs(self, messages: Messages) -> CollectiveTimes:
        """Of a ring of send and receive, the steps between nodes; those within one are over before.

        A network on paper knows how many connections a pair has among so many nodes; of a measured one, two ranks were timed.
        """
        if isinstance(self.network, AnalyticTier):
            return self._across("send_recv", messages)
        result = self._across("send_recv", messages, ranks=2)
        least_ns = messages.bytes * (1e9 * self.placed.sharing_rings / read_nccl().network.pair_bytes_per_s(self.placed.nodes))
        return result.plus(np.maximum(least_ns - result.ns, 0.0))

    def _hierarchical(self, kind: str, messages: Messages) -> CollectiveTimes:
        """Within nodes, then across them over each card, then within nodes again, as trees do."""
        within = {"all_reduce": ("reduce_scatter", "all_gather")}.get(kind, (kind,))
        if self.inner is not None and not any(map(self.inner.knows, _BOTH_WAYS)):
            within = ("all_reduce",)  # it moves at least as much as either
        across = self._across(kind, messages, 1 / self.placed.cards)
        return _merged(np.add, across, *(self._inside(item, messages) for item in within))

    def _ring(self, kind: str, messages: Messages) -> CollectiveTimes:
        """Rings through all ranks, one per card: they pass through the ranks of every node, one node after the other."""
        placed = self.placed
        passed = (placed.ranks - 1) / placed.ranks  # of the bytes of a ring, over each of its links
        inner = passed / max(1 - 1 / placed.per_node, 0.5)
        result = self._passed_on(kind, messages, inner, passed / (1 - 1 / placed.nodes) / placed.cards)
        if placed.inside is None:
            return result
        across = {placed.tier.kind: float(ring_steps(kind, placed.nodes))}
        further = {placed.inside.kind: float(TURNS.get(kind, 1) * (placed.nodes - 1) * (placed.per_node - 1))}
        return result.plus(passed_ns({**across, **further}, result.ns) - passed_ns(across, result.ns))

    def _passed_on(self, kind: str, messages: Messages, inner: float, outer: float) -> CollectiveTimes:
        """A chain: as slow as its slower tier, for ranks pass on what they have meanwhile; the other adds its latency."""
        slower = _merged(np.maximum, self._inside(kind, messages, inner), self._across(kind, messages, outer))
        nothing = messages.take(np.zeros(1, dtype=np.intp)) if len(messages) else messages
        start = _merged(np.minimum, self._inside(kind, nothing, 0.0), self._across(kind, nothing, 0.0))
        return replace(_merged(np.add, slower, start), inside=slower.inside)

    def _inside(self, kind: str, messages: Messages, part: float = 1.0) -> CollectiveTimes:
        if self.inner is None or self.placed.per_node == 1:
            return CollectiveTimes.joined(len(messages))
        return self._ask(self.inner, kind, self.placed.per_node, messages, part * self.placed.sharing_inside)

    def _across(self, kind: str, messages: Messages, part: float = 1.0, ranks: int | None = None) -> CollectiveTimes:
        sharing = self.placed.sharing if kind == "all_to_all" else self.placed.sharing_rings
        count, part = self.placed.nodes if ranks is None else ranks, part * sharing
        other = next((item for item in (kind, *_STAND_INS[kind]) if self.network.knows(item)), kind)
        if other == kind:
            return self._ask(self.network, kind, count, messages, part)
        moved = 0.0 if kind == "barrier" else moved_share(kind, count) / moved_share(other, count)
        result = self._ask(self.network, other, count, messages, part * moved)
        return result.widened(_STAND_IN, np.zeros(len(messages), dtype=np.bool_))

    def _ask(self, model: Tier, kind: str, ranks: int, messages: Messages, part: float) -> CollectiveTimes:
        """So much of each message among so many; on links that other groups use meanwhile it is as if there were more."""
        kinds = np.full(len(messages), KINDS.index(kind), dtype=np.intp)
        counts = np.full(len(messages), ranks, dtype=np.intp)
        return model.times(replace(messages.scaled(part), kind=kinds, ranks=counts))
