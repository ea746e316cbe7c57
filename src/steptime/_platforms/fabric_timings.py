"""A fabric as timed collectives show it: its nodes and tiers, and which tier each of them tells of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from steptime._hardware.description import Quantity
from steptime._hardware.fabric import NETWORK, FabricLimits, LinkTier, Published
from steptime._hardware.topology import first_ranks, place
from steptime._measurements.nccl_tests import Point
from steptime._models.collectives.fitting import Points
from steptime._models.collectives.tier import moved_share
from steptime.errors import InputError

EXCHANGE, PAIR = "all_to_all", "send_recv"


def described(name: str, points: Sequence[Point], kind: str = "nvswitch") -> FabricLimits:
    """A fabric as timed collectives show it: its nodes, a card per GPU, and what the fastest of them reached.

    `kind` is that of the links within a node, which timings do not say.
    """
    within, across = ([item for item in points if item.ranks > 1 and (item.nodes > 1) is over] for over in (False, True))
    if not within and not across:
        raise InputError(f"fabric {name}: no collective of two ranks or more among {len(points)} timed ones")
    nodes = max((item.nodes for item in across), default=1)
    per_node = max([item.ranks for item in within] + [item.ranks // item.nodes for item in across])
    tiers = [_tier("node", kind, per_node, within)] if per_node > 1 and within else []
    if across:
        tiers.append(_tier(NETWORK, NETWORK, per_node * nodes, across))
    if per_node > 1 and not within:
        raise InputError(f"fabric {name}: {per_node} ranks per node and nothing timed within one; add a run on a single node")
    versions = ", ".join(sorted({item.nccl for item in points if item.nccl})) or "unknown"
    devices = ", ".join(sorted({item.device for item in points if item.device})) or "unknown device"
    title = f"{nodes} node{'s' * (nodes > 1)} of {per_node}, {devices}"
    published = Published(f"nccl-tests, NCCL {versions}", "your own", date.today().isoformat())
    rails = per_node if nodes > 1 else 0
    return FabricLimits(name, title, per_node, nodes, rails, 1.0, tuple(tiers), Path(f"{name}.json"), (published,))


def _tier(name: str, kind: str, ranks: int, points: Sequence[Point]) -> LinkTier:
    """What its largest bus bandwidth was, and its shortest time of the fewest ranks."""
    rates = [one.bytes * moved_share(one.kind, one.ranks) / one.ns for one in points]
    best = int(np.argmax(rates))
    fastest = min(points, key=lambda one: (one.ranks, one.ns))
    return LinkTier(
        name,
        kind,
        ranks,
        Quantity(float(f"{1e9 * rates[best]:.3g}"), f"timed: {points[best].kind} of {points[best].bytes} bytes"),
        Quantity(float(f"{fastest.ns:.3g}"), f"timed: {fastest.kind} of {fastest.bytes} bytes, {fastest.ranks} ranks"),
    )


def tier_points(limits: FabricLimits, points: Sequence[Point]) -> dict[str, Points]:
    """Which tier each point tells of; groups of one rank tell of none."""
    by_tier: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        if point.ranks > 1:
            per_node = -(-point.ranks // max(point.nodes, 1))
            placed = place(limits, first_ranks(limits, point.ranks, per_node if point.nodes > 1 else None))
            by_tier[placed.tier.name].append(point)
    if limits.network is not None and limits.network.name in by_tier:
        by_tier[limits.network.name] = network_points(limits, by_tier[limits.network.name])
    if not by_tier:
        raise InputError(f"no collective of two ranks or more tells of fabric {limits.name}")
    return {name: columns(item) for name, item in by_tier.items() if item}


def columns(points: Sequence[Point]) -> Points:
    """Points as `fitting` takes them."""
    return Points(
        [point.kind for point in points],
        np.array([point.ranks for point in points], dtype=np.intp),
        np.array([float(point.bytes) for point in points]),
        np.array([point.ns for point in points]),
    )


def network_points(limits: FabricLimits, points: Sequence[Point]) -> list[Point]:
    """Collectives over nodes as those of one rank per node, by what leaves through a card.

    Where several layouts were measured, that with most ranks per node says most: only then all cards are busy. All_to_all over
    whole nodes counts by the bytes that leave; a ring of send and receive crosses each card once. Of two nodes, sizes below a
    kind's smallest come from send and receive, for a card does not know what it carries.
    """
    if limits.network is None:
        raise InputError(
            f"fabric {limits.name} has no tier of kind {NETWORK}; there are {', '.join(t.name for t in limits.tiers)}"
        )
    result: dict[str, list[Point]] = defaultdict(list)
    layouts: dict[tuple[str, int], int] = {}
    for point in points:
        per_node = point.ranks // point.nodes
        if per_node == 1 or point.kind in (EXCHANGE, PAIR):
            layouts[point.kind, point.bytes] = max(per_node, layouts.get((point.kind, point.bytes), 1))
    for point in points:
        if layouts.get((point.kind, point.bytes)) == point.ranks // point.nodes:
            result[point.kind].append(_through_a_card(limits, point))
    pairs = result.pop(PAIR, [])
    for kind, item in result.items():
        smallest, of_pair = min(point.bytes for point in item), moved_share(kind, 2)
        smaller = [replace(point, kind=kind, bytes=round(point.bytes / of_pair)) for point in pairs]
        item += [point for point in smaller if point.bytes < smallest and item[0].ranks == point.ranks]
    result[PAIR] = pairs
    return [point for item in result.values() for point in item]


def _through_a_card(limits: FabricLimits, point: Point) -> Point:
    """The collective of one rank per node that sends as much through each card."""
    per_node, nodes = point.ranks // point.nodes, point.nodes
    if point.kind == PAIR:
        return replace(point, ranks=2)
    cards = place(limits, first_ranks(limits, point.ranks, per_node)).cards
    return replace(point, ranks=nodes, bytes=point.bytes * per_node // cards)
