"""Ranks that meet wait for the slowest of them, which is slower the more there are.

Equal cards and hosts differ a little (`spread`). What all of them have in common is in the interval; what each has for itself
makes the slowest of N slower than the usual one by the expected maximum of N draws. Ranks on parts of one GPU have one card and
one box, and how those differ was measured with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from steptime._hardware.spread import read_spread, slowest
from steptime._platforms.platform import Platform
from steptime._program.workload import Workload


@dataclass(frozen=True, slots=True)
class Stragglers:
    """How many times as long as usual the slowest card and host of ranks that meet take."""

    ranks: int = 1
    card: float = 1.0
    host: float = 1.0

    @classmethod
    def of(cls, workload: Workload, platform: Platform) -> Stragglers:
        """Of the largest set of ranks that meet, directly or through others."""
        count = meeting_ranks(workload) if platform.device.limits.share == 1 else 1
        spread = read_spread()
        return cls(count, slowest(spread.card.value, count), slowest(spread.host.value, count))


def meeting_ranks(workload: Workload) -> int:
    """How many ranks wait for each other at collectives, in the largest set of them."""
    first = {rank: rank for rank in range(workload.world_size)}

    def root(rank: int) -> int:
        while first[rank] != rank:
            first[rank] = first[first[rank]]
            rank = first[rank]
        return rank

    for members in _groups(workload):
        for rank in members[1:]:
            first[root(rank)] = root(members[0])
    sizes: dict[int, int] = {}
    for rank in first:
        sizes[root(rank)] = sizes.get(root(rank), 0) + 1
    return max(sizes.values(), default=1)


def _groups(workload: Workload) -> set[tuple[int, ...]]:
    met = {(each.group, each.ranks) for program in workload.programs for each in program.collectives}
    return {members for group, ranks in met for members in workload.groups.get(group, (ranks,)) if members}
