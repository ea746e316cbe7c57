"""Which ranks meet at which collective: matched over all programs by group, members and sequence number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steptime.errors import InputError
from steptime.graph.program import Collective, WorkKind
from steptime.sim.timing import Cohort


@dataclass(frozen=True, slots=True)
class Part:
    """Ranks `low` to `high` (places, not numbers) of one cohort, which advance together."""

    cohort: int
    low: int
    high: int


@dataclass(frozen=True, eq=False)
class Party:
    """One part at one collective. `group` numbers, per rank, the concrete groups of the meeting; None: all in one."""

    part: int
    work: int
    collective: Collective
    waits: bool
    group: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class Meeting:
    """Parties that must all have arrived before any of them departs. `missing`: ranks that never issue it."""

    parties: tuple[Party, ...]
    groups: int
    missing: tuple[int, ...]


_Key = tuple[str, tuple[int, ...], int, int]


def meetings(cohorts: Sequence[Cohort], parts: Sequence[Part]) -> tuple[Meeting, ...]:
    """All meetings of these parts."""
    parties: list[Party] = []
    attending: dict[_Key, list[tuple[int, int]]] = {}  # key -> (party, rank's place in its part; -1: all of the part)
    for number, part in enumerate(parts):
        cohort = cohorts[part.cohort]
        occurrences: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        for work in np.flatnonzero(cohort.program.works.kind == WorkKind.COLLECTIVE).tolist():
            index = int(cohort.program.works.collective[work])
            if index < 0:
                collective = Collective("unknown", f"rank {cohort.ranks[0]} work {work}", (), 0)
            else:
                collective = cohort.program.collectives[index]
            name = (collective.group, collective.ranks, collective.sequence)
            for ranks, place in _concrete(cohort, part, index, collective):
                attending.setdefault((name[0], ranks, name[2], occurrences[name]), []).append((len(parties), place))
            occurrences[name] += 1
            parties.append(Party(number, work, collective, bool(cohort.timing.waits[work])))
    present = frozenset(rank for cohort in cohorts for rank in cohort.ranks)
    return _gather(cohorts, parts, parties, attending, present)


def _concrete(cohort: Cohort, part: Part, index: int, collective: Collective) -> list[tuple[tuple[int, ...], int]]:
    """(members, place of the rank in its part) per rank; one entry with place -1 where all ranks of the part agree."""
    if index < 0:
        return [((cohort.ranks[place],), place - part.low) for place in range(part.low, part.high)]
    if cohort.members is None:
        found = [(collective.ranks, -1)]
    else:
        found = [(cohort.members[place][index], place - part.low) for place in range(part.low, part.high)]
    for ranks, place in found:
        own = cohort.ranks[part.low : part.high] if place < 0 else (cohort.ranks[part.low + place],)
        if ranks and not set(own) <= set(ranks):
            raise InputError(
                f"rank {min(set(own) - set(ranks))} issues {collective.kind} {collective.sequence} of group"
                f" {collective.group!r}, whose ranks are {_few(ranks)}: expected a member; check the trace's process groups"
            )
    return found


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _gather(
    cohorts: Sequence[Cohort],
    parts: Sequence[Part],
    parties: list[Party],
    attending: dict[_Key, list[tuple[int, int]]],
    present: frozenset[int],
) -> tuple[Meeting, ...]:
    """Join parties that share a concrete group, directly or through others, into meetings."""
    leader = list(range(len(parties)))

    def find(party: int) -> int:
        while leader[party] != party:
            leader[party] = leader[leader[party]]
            party = leader[party]
        return party

    for who in attending.values():
        first = find(who[0][0])
        for party, _ in who[1:]:
            other = find(party)
            first, other = min(first, other), max(first, other)
            leader[other] = first
    keys: dict[int, list[_Key]] = {}
    for key, who in attending.items():
        keys.setdefault(find(who[0][0]), []).append(key)
    return tuple(_meeting(cohorts, parts, parties, attending, keys[lead], present) for lead in sorted(keys))


def _meeting(
    cohorts: Sequence[Cohort],
    parts: Sequence[Part],
    parties: list[Party],
    attending: dict[_Key, list[tuple[int, int]]],
    keys: list[_Key],
    present: frozenset[int],
) -> Meeting:
    groups: dict[int, npt.NDArray[np.int64]] = {}
    missing: set[int] = set()
    for number, key in enumerate(keys):
        here: set[int] = set()
        for party, place in attending[key]:
            part = parts[parties[party].part]
            group = groups.setdefault(party, np.zeros(part.high - part.low, dtype=np.int64))
            group[slice(None) if place < 0 else place] = number
            ranks = cohorts[part.cohort].ranks
            here.update(ranks[part.low : part.high] if place < 0 else (ranks[part.low + place],))
        missing |= (present & set(key[1])) - here
    one = len(keys) == 1
    joined = (
        Party(parties[p].part, parties[p].work, parties[p].collective, parties[p].waits, None if one else groups[p])
        for p in sorted(groups)
    )
    return Meeting(tuple(joined), len(keys), tuple(sorted(missing)))
