"""Where a group of ranks lies in a fabric: the tiers that join it, its nodes and cards, and who else uses its links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from steptime._hardware.fabric import NETWORK, FabricLimits, LinkTier
from steptime.errors import InputError

# Their links are one bus that all ranks of a block share; every other tier gives each rank links of its own.
_SHARED_BUSES = ("pcie",)


@dataclass(frozen=True, slots=True)
class Placement:
    """A group in a fabric. `sharing`: how many times as long its bytes take because of groups that run meanwhile.

    Of a group over several nodes that is what leaves a node; `sharing_inside` is the same of what does not.
    """

    ranks: int
    tier: LinkTier  # the innermost that joins all of them
    inside: LinkTier | None  # the innermost that joins those of one node; None where no node has two
    nodes: int
    per_node: int  # the most of them on one node
    cards: int  # network cards that they use on that node
    even: bool  # as many on every node
    sharing: float = 1.0
    sharing_inside: float = 1.0

    @property
    def spans_nodes(self) -> bool:
        """Whether something leaves a node."""
        return self.nodes > 1


def first_ranks(limits: FabricLimits, ranks: int, per_node: int | None = None) -> tuple[int, ...]:
    """The first `ranks` of a fabric, or so many of each node."""
    chosen = limits.gpus_per_node if per_node is None else per_node
    if not 1 <= chosen <= limits.gpus_per_node:
        raise InputError(f"fabric {limits.name} has {limits.gpus_per_node} GPUs per node; {chosen} per node were asked for")
    result = tuple(node * limits.gpus_per_node + local for node in range(limits.nodes) for local in range(chosen))[:ranks]
    if len(result) < ranks:
        where = f"{limits.nodes} node{'s' * (limits.nodes > 1)} of {chosen}"
        raise InputError(f"fabric {limits.name} has {limits.ranks} ranks ({where}); a group of {ranks} was asked for")
    return result


def place(limits: FabricLimits, group: Sequence[int]) -> Placement:
    """A group by itself."""
    return place_together(limits, [group])[0]


def place_together(limits: FabricLimits, groups: Sequence[Sequence[int]]) -> list[Placement]:
    """Groups that run at the same time: where they share links, each has its part of them."""
    alone = [_alone(limits, group) for group in groups]
    links = [_links(limits, group, item) for group, item in zip(groups, alone, strict=True)]
    users = Counter(link for used in links for link in used)
    crowd = _crowd(limits, links)
    results = []
    for item, used in zip(alone, links, strict=True):
        inside = max((users[link] for link in used if link[0] != NETWORK), default=1)
        across = max((users[link] for link in used if link[0] == NETWORK), default=1) * crowd
        results.append(replace(item, sharing=across if item.spans_nodes else inside, sharing_inside=inside))
    return results


def _alone(limits: FabricLimits, group: Sequence[int]) -> Placement:
    _check(limits, group)
    nodes = Counter(rank // limits.gpus_per_node for rank in group)
    fullest, most = max(nodes.items(), key=lambda one: one[1])
    of_node = [rank for rank in group if rank // limits.gpus_per_node == fullest]
    return Placement(
        ranks=len(group),
        tier=_joining(limits, group),
        inside=_joining(limits, of_node) if most > 1 else None,
        nodes=len(nodes),
        per_node=most,
        cards=len({limits.card_of(rank) for rank in of_node}),
        even=len(set(nodes.values())) == 1,
    )


def _check(limits: FabricLimits, group: Sequence[int]) -> None:
    there = f"fabric {limits.name} has ranks 0 to {limits.ranks - 1}"
    if not group:
        raise InputError(f"a group without ranks; {there}")
    unknown = sorted({rank for rank in group if not 0 <= rank < limits.ranks})
    if unknown:
        raise InputError(f"a group with unknown rank{'s' * (len(unknown) > 1)} {', '.join(map(str, unknown))}; {there}")
    if len(set(group)) < len(group):
        twice = next(rank for rank, times in Counter(group).items() if times > 1)
        raise InputError(f"a group with rank {twice} twice; {there}")


def _joining(limits: FabricLimits, group: Sequence[int]) -> LinkTier:
    return next(tier for tier in limits.tiers if len({rank // tier.ranks for rank in group}) == 1)


def _links(limits: FabricLimits, group: Sequence[int], placed: Placement) -> set[tuple[str, int, int]]:
    """What a group keeps busy: cards, buses, and the links of each of its ranks."""
    results: set[tuple[str, int, int]] = set()
    if len(group) == 1:
        return results
    if placed.spans_nodes:
        results |= {(NETWORK, *limits.card_of(rank)) for rank in group}
    if placed.inside is not None:
        for rank in group:
            own = rank // placed.inside.ranks if placed.inside.kind in _SHARED_BUSES else rank
            results.add((placed.inside.name, own, 0))
    return results


def _crowd(limits: FabricLimits, links: Sequence[set[tuple[str, int, int]]]) -> float:
    """What a network that carries less than all cards adds: nothing while few of a node's cards are busy."""
    cards = {link for used in links for link in used if link[0] == NETWORK}
    busiest = max(Counter(node for _, node, _ in cards).values(), default=0)
    return max(1.0, limits.oversubscription * busiest / max(limits.rails, 1))
